"""Two real engines on a Ray cluster of this machine, one of which is killed in mid-run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_batch import cli
from sglang_batch.demo_model import write_demo_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from fleet_demo import DATA, run
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


def test_engines_without_room_are_refused_before_anything_loads(
    cluster: LocalCluster,
    tmp_path: Path,
    demo_model: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    status = cli.main(
        [
            "run", "--ray", cluster.address, "--engines", "3", "-i", str(DATA),
            "-o", str(tmp_path / "out.jsonl"), "--model-path", str(demo_model),
            "--served-model-name", "demo", "--device", "cpu",
        ]
    )  # fmt: skip
    assert status == 2
    assert "room for 2 of 3 engines with 1 CPU each" in capfd.readouterr().err
