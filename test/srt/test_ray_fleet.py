"""Two real engines on a Ray cluster of this machine, one of which is killed in mid-run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from sglang_batch.errors import ConfigError
from sglang_batch.fleet.ray.ray_fleet import RayFleet, check_room, join_cluster
from sglang_batch.run.demo_model import write_demo_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from fleet_demo import run
from fleet_parts.local_cluster import (
    LocalCluster,
    local_cluster,
    processes,
    wait_until,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(2) as cluster:
        yield cluster


def test_a_killed_engine_costs_no_line(cluster: LocalCluster, tmp_path: Path) -> None:
    write_demo_model(tmp_path / "model")
    assert run(cluster, tmp_path) == 0
    # The job has ended its engines, and its directory can tell about it.
    wait_until(lambda: not processes("ray::RayWorker"), 10.0)
    log = (tmp_path / "answers.jsonl.job" / "engine.log").read_text()
    assert "is lost: its process died" in log


def test_engines_without_room_are_refused(cluster: LocalCluster) -> None:
    def fleet(engines: int, **resources: float) -> RayFleet:
        return RayFleet(cluster.address, 1, engines, engines, resources)

    join_cluster(cluster.address)
    try:
        check_room(fleet(2, CPU=1))
        with pytest.raises(
            ConfigError, match="room for 2 of 3 engines with 1 CPU each"
        ):
            check_room(fleet(3, CPU=1))
        with pytest.raises(ConfigError, match="room for 0 of 1 engines with 1 GPU"):
            check_room(fleet(1, GPU=1))
        check_room(fleet(0, GPU=1))
    finally:
        ray.shutdown()
