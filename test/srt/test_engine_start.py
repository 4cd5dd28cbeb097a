"""What a starting engine says while it waits for its processes."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from sglang_batch.srt.engine import processes
from sglang_batch.srt.engine.processes import StartWatch, tell_while_waiting

BUSY = "while True: pass"
TITLED = "import setproctitle, time; setproctitle.setproctitle('sglang::scheduler'); time.sleep(60)"


@pytest.fixture
def children() -> Any:
    started = [
        subprocess.Popen([sys.executable, "-c", code]) for code in (BUSY, TITLED)
    ]
    yield started
    for child in started:
        child.kill()
        child.wait()


def until_titled(pid: int) -> None:
    # A process has no command line while it becomes another one.
    while psutil.Process(pid).cmdline()[:1] != ["sglang::scheduler"]:
        time.sleep(0.02)


def test_each_process_and_its_work(children: list[subprocess.Popen[bytes]]) -> None:
    busy, titled = children
    until_titled(titled.pid)
    line = StartWatch(psutil.Process()).line()
    assert line.startswith("Waiting for the engine for 0 s: ")
    assert f"a process imports SGLang (process {busy.pid}, CPU " in line
    assert f"scheduler sets up (process {titled.pid}, CPU 0 s)" in line


def test_competition_for_cores_is_named(
    children: list[subprocess.Popen[bytes]],
) -> None:
    until_titled(children[1].pid)
    time.sleep(0.1)  # it sleeps from then on
    watch = StartWatch(psutil.Process())
    watch.line()
    time.sleep(0.2)
    # As if the busy process had run for this fifth of a second in twenty.
    watch._looked -= 20
    assert "of a core each: other processes keep this machine's" in watch.line()
    children[0].kill()
    children[0].wait()
    assert "of a core" not in watch.line()


def test_lines_come_while_waiting_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "EVERY_S", 0.05)

    def slow(readers: list[int], processes: list[int]) -> str:
        time.sleep(0.4)
        return f"ready {readers} {processes}"

    assert tell_while_waiting(slow, [1], [2]) == "ready [1] [2]"
    said = capsys.readouterr().err.splitlines()
    assert len(said) >= 2
    assert all(line.startswith("Waiting for the engine for ") for line in said)
    time.sleep(0.15)
    assert capsys.readouterr().err == ""

    def fails(readers: object, processes: object) -> None:
        raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        tell_while_waiting(fails, [], [])
