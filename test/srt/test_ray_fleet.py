"""Two real engines on a Ray cluster of this machine, one of which is killed in mid-run.

The command is a fork of a process that has SGLang imported. Ray's workers are new processes,
and their engines' processes are forks of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import ray
from ray._private import workers

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
    worker = Path(workers.__path__[0]) / "default_worker.py"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SGLANG_BATCH_TEST_FORKS", str(worker))
        with local_cluster(2) as cluster:
            yield cluster


def forked(command: list[str]) -> subprocess.Popen[Any]:
    python, _, _, *arguments = command
    code = "from sglang_batch.__main__ import command; command()"
    return preloaded.Popen([python, "-c", code, *arguments])


def test_a_killed_engine_costs_no_line(cluster: LocalCluster, tmp_path: Path) -> None:
    write_demo_model(tmp_path / "model")
    assert run(cluster, tmp_path, forked) == 0
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
