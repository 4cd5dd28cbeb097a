"""The engine died: who hears of it, and nobody waits for what will not come."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sglang.srt.environ import envs

from sglang_batch.srt.plugin.engine_death import CORE_DUMP_WAIT, CORE_DUMPS, tell

WORKER = """
import signal, sys, time, setproctitle
setproctitle.setproctitle("sglang::tokenizer_worker:1")
def write_down(*_):
    time.sleep(0.1)
    print("written down", flush=True)
    sys.exit()
signal.signal(signal.SIGQUIT, write_down)
print("ready", file=sys.stderr, flush=True)
time.sleep(9)
"""

MAIN = f"""
import os, signal, subprocess, sys
from uvicorn import Config
from uvicorn.supervisors import Multiprocess
from sglang_batch.srt.plugin import engine_death
other = subprocess.Popen(["sleep", "9"])
def kill_all(*_):
    print("all are killed", flush=True)
    other.kill()
    os._exit(0)
signal.signal(signal.SIGQUIT, kill_all)
with engine_death.telling_workers():
    Multiprocess(Config("app", workers=2), [])
    command = [sys.executable, "-c", {WORKER!r}]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert worker.stderr.readline() == b"ready\\n"
    os.kill(os.getpid(), signal.SIGQUIT)
    assert False, "uvicorn took the signal"
"""


def test_workers_write_down_what_they_know_before_all_are_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAIN],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["written down", "all are killed"], done.stderr


@pytest.mark.parametrize(
    ("asked_for", "given", "waits"), [("", "", 0), ("1", "", 60), ("", "7", 7)]
)
def test_only_core_dumps_that_can_come_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, asked_for: str, given: str, waits: float
) -> None:
    for name, value in ((CORE_DUMPS, asked_for), (CORE_DUMP_WAIT, given)):
        monkeypatch.setenv(name, value)  # what the test sets is undone
        if not value:
            monkeypatch.delenv(name)
    tell()
    assert envs.SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS.get() == waits
