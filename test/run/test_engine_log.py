"""SGLang's log of a run: its lines, and why an engine failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_batch.errors import ConfigError, EngineError, StoreWriteError
from sglang_batch.run.engine_log import EngineLog

REDIRECTED = """\
import subprocess, sys
from pathlib import Path
from sglang_batch.run.engine_log import EngineLog
print("before")
with EngineLog(Path(sys.argv[1])) as log:
    print("ours, by accident")
    subprocess.run([sys.executable, "-c", "print('a child')"])
    print("to the terminal", file=log.terminal)
print("after")
"""
KINDS = {
    1: (EngineError, "the engine died"),
    2: (ConfigError, "the engine cannot start with this model and these options"),
}
TRACEBACK = """\
[2026-01-01 00:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    raise
{}

[2026-01-01 00:00:01] Received sigquit from a child process.
RuntimeError: Initialization failed. Please see the error messages above.
"""


def test_output_of_this_process_and_its_children_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("of an earlier run\n")
    done = subprocess.run(
        [sys.executable, "-c", REDIRECTED, str(path)], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("before\nafter\n", "to the terminal\n")
    assert path.read_text() == "of an earlier run\nours, by accident\na child\n"


@pytest.mark.parametrize(
    ("written", "started", "status", "reason"),
    [
        ("ValueError: no such model", False, 2, "ValueError: no such model"),
        (
            "RuntimeError: Not enough memory. Please",
            False,
            2,
            "RuntimeError: Not enough",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory.",
            False,
            1,
            "OutOfMemoryError: CU",
        ),
        ("ValueError: bad state", True, 1, "ValueError: bad state"),
        ("x.DistNetworkError: listen: EADDRINUSE", False, 1, "DistNetworkError: li"),
        ("x.HfHubHTTPError: 503 Server Error", False, 1, "HfHubHTTPError: 503"),
        ("httpx.ReadTimeout: The read timed out", False, 1, "ReadTimeout: The"),
        ("OSError: [Errno 122] Disk quota exceeded", False, 1, "OSError: [Errno"),
        ("FileNotFoundError: no shard 2", False, 2, "FileNotFoundError: no"),
        ("RuntimeError: fp4 is not supported here", False, 2, "RuntimeError: fp4"),
        ("KeyboardInterrupt", False, 1, "KeyboardInterrupt"),
    ],
)
def test_the_first_traceback_is_the_reason(
    tmp_path: Path, written: str, started: bool, status: int, reason: str
) -> None:
    log = EngineLog(tmp_path / "engine.log")
    log.path.write_text(TRACEBACK.format(written))
    failure = log.failure(RuntimeError("Initialization failed."), started=started)
    kind, begin = KINDS[status]
    assert type(failure) is kind
    assert str(failure).startswith(f"{begin}: {reason}")


@pytest.mark.parametrize("started", [False, True])
def test_a_child_that_the_system_killed(tmp_path: Path, started: bool) -> None:
    log = EngineLog(tmp_path / "engine.log")
    said = "Rank 0 scheduler died during initialization (exit code: -9). If exit code"
    crashed = "Subprocess scheduler_0 (pid=9) crashed with exit code -9. Triggering"
    log.path.write_text(crashed if started else "")
    error = None if started else RuntimeError(said)
    failure = log.failure(error, started=started)
    assert type(failure) is EngineError
    assert str(failure).startswith("the system killed a process of SGLang (SIGKILL)")


HANDLED = """\
[2026-01-01 00:00:00] Request r5 failed
Traceback (most recent call last):
  File "x.py", line 1, in f
KeyError: 'foo'
[2026-01-01 00:00:01] helper ended, exit code: -9
"""


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (TRACEBACK.format("torch.OutOfMemoryError: CUDA"), "OutOfMemoryError: CUDA"),
        (
            "Subprocess scheduler_0 (pid=9) crashed with exit code -11. Triggering",
            "a process of SGLang ended with SIGSEGV (exit code -11)",
        ),
        (
            "Traceback (most recent call last):\nImportError: no x\nSubprocess "
            "scheduler_0 (pid=9) crashed with exit code 1. Triggering",
            "ImportError: no x",
        ),
    ],
)
def test_a_handled_error_earlier_is_not_the_reason(
    tmp_path: Path, last: str, reason: str
) -> None:
    log = EngineLog(tmp_path / "engine.log")
    log.path.write_text(HANDLED + last)
    failure = log.failure(None, started=True)
    assert str(failure) == f"the engine died: {reason}. Engine's log: {log.path}"


@pytest.mark.parametrize("signum", [11, 15])
def test_a_start_that_a_signal_ended_may_succeed_next_time(
    tmp_path: Path, signum: int
) -> None:
    log = EngineLog(tmp_path / "engine.log")
    log.path.write_text("")
    said = f"Rank 0 scheduler died during initialization (exit code: -{signum}). If"
    failure = log.failure(RuntimeError(said), started=False)
    assert type(failure) is EngineError and str(signum) in str(failure)


def test_an_error_of_this_process_is_the_reason(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "engine.log")
    log.path.write_text(HANDLED)
    failure = log.failure(NotImplementedError("no such mode"), started=False)
    assert type(failure) is ConfigError
    assert ": NotImplementedError: no such mode Engine's log" in str(failure)


FULL = """\
import sys
from pathlib import Path
from sglang_batch.run.engine_log import EngineLog
try:
    with EngineLog(Path("/dev/full")):
        sys.stdout.write("of SGLang")
        raise ValueError("ours")
except ValueError as error:
    print("error:", error)
"""


def test_a_full_disk_hides_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("error: ours\n", "", 0)


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "engine.log"
    with pytest.raises(StoreWriteError, match=str(path)), EngineLog(path):
        pass


def test_the_last_known_activity_is_told(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "engine.log")
    log.path.write_text(
        "Load weight begin.\n"
        "Multi-thread loading shards:  10% Completed | 1/9\r"
        "Multi-thread loading shards:  60% Completed | 5/9"
    )
    assert log.activity() == "loading the weights, 60%"
