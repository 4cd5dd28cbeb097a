"""What a run shows: a status on a terminal, lines at growing distances in a file."""

from __future__ import annotations

import io
from concurrent.futures import Future
from pathlib import Path

import pytest

from sglang_batch.fleet.fleet_worker import WorkerState
from sglang_batch.job.engine import KvUse
from sglang_batch.request import Usage
from sglang_batch.run import progress
from sglang_batch.run.progress import Display, Progress
from sglang_batch.run.running_job import engines_running
from sglang_batch.store.result_log import ResultLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_a_file_gets_lines_at_doubling_distances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, file = Clock(monkeypatch), io.StringIO()
    display = Display(file)
    began = clock.now
    with display.showing(lambda: f"{clock.now - began:.0f} s"):
        for _ in range(400):
            clock.now += 1
            display._tick()
    assert file.getvalue().split("\n") == [
        *("5 s", "15 s", "35 s", "75 s", "155 s", "315 s", "")
    ]


def test_a_terminal_shows_the_present_status_below_the_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, terminal = Clock(monkeypatch), Terminal()
    display = Display(terminal)
    with display.showing(lambda: "x" * 200):
        display._tick()
        clock.now += 1
        display.say("a line")
    redrawn = "\r\x1b[K" + "x" * 79
    assert terminal.getvalue() == f"{redrawn}\r\x1b[Ka line\n"


def test_progress_tells_what_the_job_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    log = ResultLog(tmp_path / "log", 4)
    log.put(0, b"{}", ok=True, usage=Usage())  # of an earlier run
    compiling: Future[None] = Future()
    shown = Progress(Display(io.StringIO()), 4, log, compiling)
    shown.rendered()
    assert str(shown).startswith("Reading prompts: 33%, 1/3")
    shown.rendered()
    shown.rendered()
    clock.now += 7
    assert str(shown) == "Compiling the planner, once per installation (7 s)"
    compiling.set_result(None)
    assert str(shown) == "Planning, and computing the first prompts (7 s)"
    shown.kv_use = KvUse(2, left=900, right=0, online=0, shared=300, capacity=4000)
    assert (
        str(shown)
        == "Running: no answer yet, 2 requests in the batch with 1,200 tokens of KV (7 s)"
    )
    usage = Usage(input_tokens=100, cached_tokens=90, output_tokens=11)
    log.put(1, b"{}", ok=True, usage=usage)
    shown.answered()
    log.put(2, b"{}", ok=False, usage=Usage())
    shown.answered()
    assert str(shown).startswith("Running: 75%, 3/4 [00:07<")
    assert str(shown).endswith(", 1 failed, cached 90%, 3 tokens/s computed]")


def engine(name: str, status: str) -> WorkerState:
    return WorkerState(name, status, 0, 0, 0, 0, None, 0.0, 0, "")


def test_a_job_in_buckets_renders_as_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, log = Clock(monkeypatch), ResultLog(tmp_path / "log", 4)
    shown = Progress(Display(io.StringIO()), 4, log)
    shown.will_render(0)
    shown.rendered()
    assert str(shown).startswith("Planning")
    for index in range(2):
        clock.now += 5
        shown.rendered()
        log.put(index, b"{}", ok=True, usage=Usage())
        shown.answered()
    assert str(shown).startswith("Running") and "2/4" in str(shown)
    assert "00:10" in str(shown)
    log.close()


def test_progress_tells_how_many_engines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    log = ResultLog(tmp_path / "log", 2)
    engines = [engine("a", "running"), engine("b", "lost"), engine("c", "running")]
    shown = Progress(
        Display(io.StringIO()), 2, log, engines=lambda: engines_running(engines)
    )
    shown.rendered()
    shown.rendered()
    log.put(0, b"{}", ok=True, usage=Usage())
    shown.answered()
    assert str(shown).endswith(", 2 of 3 engines, cached 0%, 0 tokens/s computed]")
    del engines[1:]
    assert "engines" not in str(shown)
