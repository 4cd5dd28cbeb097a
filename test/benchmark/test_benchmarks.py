"""The benchmarks run, small, and end with a line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmark"


def quick_run(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON of a ``--quick`` run, which has to end with status 0."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments, "--quick"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert {"cpu", "cores", "numpy", "commit", "date"} <= document["machine"].keys()
    assert document["command"].endswith(" ".join((script, *arguments, "--quick")))
    return document


@pytest.mark.timeout(330)
def test_the_planners_figures() -> None:
    document = quick_run("bench_planner.py")
    assert document["missed"] == []
    figures = document["figures"]
    exact = figures["Worked examples of the papers"]
    assert len(exact) == 8
    assert all(figure["met"] for figure in exact)
    sharing = figures["Prefix sharing"]
    assert sharing and all(figure["value"] >= 0.995 for figure in sharing)
    # Every stage of the plan was seen.
    stages = {
        figure["name"].strip() for figure in figures["Plan of BlendServe's trace 1"]
    }
    assert {"tree", "densities", "split", "sort"} <= stages


@pytest.mark.timeout(330)
def test_the_orders() -> None:
    document = quick_run("bench_order.py")
    assert all(figure["met"] for figure in document["figures"])
    (traces,) = document["tables"]
    assert len(traces["rows"]) == 4 * 3


@pytest.mark.timeout(330)
def test_jobs_that_share_an_engine() -> None:
    document = quick_run("bench_doors.py", "fair")
    assert document["missed"] == []
    names = {figure["name"]: figure["value"] for figure in document["figures"]}
    assert names["small job, 6 beside 150"] <= 1.3
    assert names["two equal jobs, off by"] <= 0.05
