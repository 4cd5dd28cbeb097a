"""The benchmarks run, small, and end with a line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
from forked_children import script_command

BENCHMARKS = Path(__file__).parents[2] / "benchmark"


def quick_run(
    script: str, *arguments: str, with_sglang: bool = False
) -> dict[str, Any]:
    """The JSON of a ``--quick`` run, which has to end with status 0.

    with_sglang: it is a fork of a process that has imported SGLang.
    """
    path, arguments = BENCHMARKS / script, (*arguments, "--quick")
    if with_sglang:
        done = preloaded.run(script_command(path, *arguments), timeout=300)
    else:
        done = subprocess.run(
            [sys.executable, str(path), *arguments],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert {"cpu", "cores", "numpy", "commit", "date"} <= document["machine"].keys()
    # Of files, only the names.
    named = [Path(a).name if Path(a).is_absolute() else a for a in arguments]
    assert document["command"].endswith(" ".join((script, *named)))
    return document


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_the_orders() -> None:
    document = quick_run("bench_order.py")
    of_traces = [each for each in document["figures"] if "trace" in each["name"]]
    assert len(of_traces) == 4 * 2 + 4 * 2
    assert all(figure["met"] for figure in of_traces)
    traces, documents = document["tables"]
    assert len(traces["rows"]) == 4 * 4
    assert len(documents["rows"]) == 7 * 2 * 4


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_auto_on_the_engine() -> None:
    document = quick_run("bench_auto.py", "--engine", "2", with_sglang=True)
    (table,) = document["tables"]
    assert [row[0] for row in table["rows"]] == ["0 few-shot", "1 documents"]
    figures = {figure["name"]: figure["value"] for figure in document["figures"]}
    assert 0.5 < figures["prompt tokens computed over the best, worst"] <= 1.1


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_jobs_that_share_an_engine() -> None:
    document = quick_run("bench_doors.py", "fair", with_sglang=True)
    assert document["missed"] == []
    names = {figure["name"]: figure["value"] for figure in document["figures"]}
    assert names["small job, 6 beside 150"] <= 1.3
    assert names["two equal jobs, off by"] <= 0.05


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_the_dense_engine() -> None:
    parts = "steps", "small", "sharing", "memory", "packed", "models"
    document = quick_run("bench_dense.py", *parts)
    assert document["missed"] == []
    assert {"torch", "transformers"} <= document["machine"].keys()
    names = {figure["name"]: figure["value"] for figure in document["figures"]}
    assert names["prompt tokens computed"] == 2 * (64 + 12 * 16)
    assert names["classes that answer otherwise"] == 0
    titles = [table["title"].partition(":")[0] for table in document["tables"]]
    layers = "Layers of 1024 x 4096, and an encoder"
    assert titles == ["Target-1", "Target-2", "Processor seconds", layers, "Classes"]


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_the_models_of_today() -> None:
    document = quick_run("bench_models.py", "families", "answers", with_sglang=True)
    assert document["missed"] == []
    *_, random_jobs = document["tables"]
    assert all(row[1] > 0 for row in random_jobs["rows"])


# Each reads the command line, or has a parser that others make.
READERS = "parse_args", "run_parts(", "paths_given(", "_server_args(", "cli_main("
SCRIPTS = [
    path
    for folder in (BENCHMARKS, BENCHMARKS / "gpu", BENCHMARKS / "kernels")
    for path in sorted(folder.glob("*.py"))
    if "\nif __name__ ==" in path.read_text()
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_begins_before_its_command_line_is_read(path: Path) -> None:
    """Asked for help, it neither starts an engine nor ends in a traceback."""
    assert any(reader in path.read_text() for reader in READERS)


def test_a_benchmark_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import report, tempfile, time\n"
        "report.end_engines_at_sigterm()\n"
        f"with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):\n"
        "    print('running', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=BENCHMARKS, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        process.terminate()
        assert process.wait(30) == 143
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_parts_and_the_file_to_save(tmp_path: Path) -> None:
    saved = tmp_path / "dense.json"
    save = "--save", str(saved)
    document = quick_run("bench_dense.py", "sharing", *save, with_sglang=True)
    assert json.loads(saved.read_text()) == document
    listed = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench_doors.py"), "--list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split()[0] for line in listed.stdout.splitlines()][:2] == [
        "fair",
        "replicas",
    ]


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_peers_on_the_random_model() -> None:
    document = quick_run("bench_peers.py", with_sglang=True)
    assert (
        document["missed"] == []
    )  # without vLLM and stock SGLang, no ratio has a target
    for table in document["tables"]:
        peers = {row[0]: row for row in table["rows"]}
        assert peers.keys() == {"transformers", "ours"}
        assert peers["ours"][-1] == peers["transformers"][-1] == "4"
