"""SGLang servers for tests, started as a user starts them or faster, ended with all children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import forked_children
import preloaded
import pytest
from free_ports import free_port

START_TIMEOUT_S = 300
IDLE_S = 3
LAUNCH = ("sglang.launch_server",)
# Small enough for CI: the demo model needs a few megabytes.
SERVER_ARGS = (
    "--dtype=float32",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=20000",
    "--served-model-name=demo",
)


def shared(fixture: Callable[..., Any]) -> Any:
    """A fixture of the session. All files that name it run in one process."""
    return pytest.fixture(scope="session")(fixture)


class Server:
    """A running server; ``log`` is everything it printed."""

    def __init__(
        self, process: subprocess.Popen[bytes], url: str, log_path: Path
    ) -> None:
        self.process = process
        self.url = url
        self.log_path = log_path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def until_busy(self) -> None:
        """Wait until requests run."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{self.url}/server_info", timeout=30) as found:
                states = json.load(found)["internal_states"]
            if any(state["offline_batch"]["kv_use"]["running"] for state in states):
                return
            time.sleep(0.02)
        pytest.fail("no request came into the engine")

    def assert_idle(self) -> None:
        """No process spins: all of them together use less than a third of a core."""
        before = cpu_seconds(self.process.pid)
        time.sleep(IDLE_S)
        after = cpu_seconds(self.process.pid)
        used = {name: after[name] - before.get(name, 0.0) for name in after}
        if sum(used.values()) >= IDLE_S / 3:
            pytest.fail(f"CPU seconds of {IDLE_S} s without work: {used}")

    def kill(self) -> None:
        """SIGKILL to every process of the server, as a crash would."""
        kill_group(self.process)


@contextmanager
def server(
    model: Path,
    *args: str,
    log_dir: Path,
    python: str = sys.executable,
    module: Sequence[str] = LAUNCH,
    defaults: Sequence[str] = SERVER_ARGS,
    env: dict[str, str] | None = None,
    as_user: bool = False,
) -> Iterator[Server]:
    """Run ``python -m sglang.launch_server`` or another module until the block ends.

    Args:
        as_user: start all processes anew. Otherwise they are forks of the first one, which
            takes a third of the processor time, see :mod:`forked_children`.
    """
    port = free_port()
    forked = None if as_user or python != sys.executable else quick_command(module)
    command = [
        *(forked or (python, "-m", *module)),
        f"--model-path={model}",
        "--host=127.0.0.1",
        f"--port={port}",
        *defaults,
        *args,
    ]
    log_path = log_dir / f"server-{port}.log"
    with open(log_path, "wb") as log:
        process = (preloaded.Popen if forked else subprocess.Popen)(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    running = Server(process, f"http://127.0.0.1:{port}", log_path)
    try:
        wait_until_ready(running)
        yield running
    finally:
        kill_group(process)


def quick_command(module: Sequence[str]) -> list[str] | None:
    """The command of a server whose children are forks, for :class:`preloaded.Popen`."""
    if module == LAUNCH:
        return forked_children.command("server_main")
    name, *arguments = module
    # With the other backend, `serve` becomes a new process.
    if name == "sglang_batch" and "--backend=transformers" in arguments:
        return forked_children.command("cli_main", *arguments)
    return None


def wait_until_ready(running: Server) -> None:
    """Wait for the server's end of warm-up; fail with its log if it ends first."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if running.process.poll() is not None:
            raise AssertionError(f"the server ended:\n{running.log[-4000:]}")
        try:
            with urllib.request.urlopen(f"{running.url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"the server did not start:\n{running.log[-4000:]}")


def cpu_seconds(session: int) -> dict[str, float]:
    """CPU seconds used so far by each process of a session that still runs."""
    seconds = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name of the process, in parentheses, may contain spaces.
            process, _, rest = path.read_text().rpartition(")")
            fields = rest.split()
            if int(fields[3]) == session:
                ticks = int(fields[11]) + int(fields[12])
                seconds[f"{process})"] = ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process started in a session of its own, with all its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
