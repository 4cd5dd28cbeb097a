"""A server that starts: what is refused at once, and what a signal leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from free_ports import free_port
from servers import SERVER_ARGS, Server, kill_group

from sglang_batch.srt.plugin import main_process

START_S = 120


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def arguments(port: int, node_rank: int = 0) -> Any:
    return SimpleNamespace(
        host="127.0.0.1", port=port, node_rank=node_rank, offline_batch_dir="none"
    )


def test_a_taken_port_is_refused_before_the_engine_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    launched: list[Any] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main_process._launch(launched.append, arguments(port))
        assert ended.value.code == 1
        assert capsys.readouterr().err.startswith(f"error: port {port} of 127.0.0.1 is")
        # Of several machines, the first has the port.
        main_process._launch(launched.append, arguments(port, node_rank=1))
    main_process._launch(launched.append, arguments(port))
    assert len(launched) == 2


def test_a_directory_in_use_is_refused_before_the_engine_starts(
    offline_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = offline_server.log_path.parent / "batches"
    second = arguments(free_port())
    second.offline_batch_dir = str(directory)
    with pytest.raises(SystemExit) as ended:
        main_process._launch(lambda _: None, second)
    assert ended.value.code == 1
    holder = f"(pid {offline_server.process.pid})"
    assert f"is in use by another server {holder}" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_at_a_starting_server_is_one_line(
    demo_model: Path, tmp_path: Path
) -> None:
    """A terminal sends it to all processes of the server."""
    run = started(demo_model, tmp_path)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(START_S) == 130
    said = (tmp_path / "log").read_text()
    assert "interrupted\n" in said
    assert "Traceback" not in said
    until_all_have_ended(run)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_starting_server_leaves_no_processes(
    demo_model: Path, tmp_path: Path, signum: int
) -> None:
    run = started(demo_model, tmp_path)
    run.send_signal(signum)
    assert run.wait(START_S) == -signum
    until_all_have_ended(run)


def started(model: Path, directory: Path) -> subprocess.Popen[bytes]:
    """A server as a user starts it, whose engine's processes import SGLang."""
    command = [
        *(sys.executable, "-m", "sglang_batch", "serve", f"--model-path={model}"),
        *(f"--port={free_port()}", f"--offline-batch-dir={directory}", *SERVER_ARGS),
    ]
    with open(directory / "log", "wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + START_S
    while len(psutil.Process(run.pid).children()) < 3:  # with Python's own tracker
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.05)
    return run


def until_all_have_ended(run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while processes_of(run.pid):
        if time.monotonic() > deadline:
            left = processes_of(run.pid)
            kill_group(run)
            pytest.fail(f"still there: {left}")
        time.sleep(0.1)


def processes_of(session: int) -> list[str]:
    found = []
    for each in psutil.process_iter(["name", "status"]):
        try:
            if os.getsid(each.pid) == session and each.status() != "zombie":
                found.append(each.info["name"])
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found
