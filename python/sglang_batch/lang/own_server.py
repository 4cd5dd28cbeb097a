"""A server for one stream: started on a free port of the loopback, ended with its user.

The engine is in other processes, so it cannot harm the program that streams. A keeper
between the two ends the server when the program has ended, however it did: its end of a
pipe is closed then.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from ..errors import ConfigError, EngineError, ExitStatus

POLL_S = 0.2
# The server ends its processes within this time, or is killed.
STOP_S = 20.0
# Options that say where the server is.
_OURS = {"host", "port", "api_key", "admin_api_key", "offline_batch_dir"}


class OwnServer:
    """A server of a model, in processes of its own.

    Attributes:
        url, key: of the server, once :meth:`wait` has returned.

    Args:
        model_path: of the model, as for ``sglang-batch serve``.
        backend: its ``--backend``.
        options: further options, see :func:`flags_of`.

    Raises:
        ConfigError: an option is one that the stream sets.
    """

    def __init__(
        self, model_path: str, backend: str, options: Mapping[str, Any]
    ) -> None:
        for name in _OURS & options.keys():
            raise ConfigError(
                f"{name}={options[name]!r}: the engine of a stream has an address of its "
                "own; start `sglang-batch serve` and pass server=URL instead."
            )
        argv = ["--backend", backend, f"--model-path={model_path}", *flags_of(options)]
        self.key = secrets.token_urlsafe(16)
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._scratch = tempfile.TemporaryDirectory(prefix="sglang-batch-stream-")
        place = Path(self._scratch.name)
        self._log = place / "server.log"
        with self._log.open("wb") as log:
            self._keeper = subprocess.Popen(
                [
                    *(sys.executable, "-m", "sglang_batch.lang.own_server", *argv),
                    *("--host=127.0.0.1", f"--port={port}", f"--api-key={self.key}"),
                    f"--offline-batch-dir={place / 'batches'}",
                ],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until the server answers.

        Raises:
            ConfigError: it cannot start with this model and these options.
            EngineError: it ended.
        """
        try:
            while not self._answers():
                if self._keeper.poll() is not None:
                    raise self._failure(self._keeper.returncode)
                time.sleep(POLL_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server."""
        if self._keeper.stdin is not None:
            with suppress(OSError):
                self._keeper.stdin.close()
        self._keeper.wait()
        self._scratch.cleanup()

    def _answers(self) -> bool:
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            # No proxy of the environment is between this process and its own server.
            with httpx.Client(trust_env=False, headers=headers, timeout=5) as client:
                return client.get(f"{self.url}/health").is_success
        except httpx.HTTPError:
            return False

    def _failure(self, status: int) -> ConfigError | EngineError:
        lines = self._log.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("error: ")] or lines[-1:]
        why = said[-1].removeprefix("error: ") if said else f"exit status {status}"
        if status == ExitStatus.BAD_INPUT:
            return ConfigError(why)
        tail = "\n".join(lines[-20:])
        return EngineError(f"the engine did not start: {why}\n{tail}")


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Options by name as a command line: ``tp=2`` is ``--tp 2``, ``name=True`` a flag, and a
    mapping is JSON.
    """
    argv = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            argv.append(flag)
        elif isinstance(value, list | tuple):
            argv += [flag, *map(_word, value)]
        elif value is not None and value is not False:
            argv.append(f"{flag}={_word(value)}")
    return argv


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def keep(argv: list[str]) -> int:
    """Run a server until it ends, or standard input does. Returns the server's status."""
    server = subprocess.Popen(
        [sys.executable, "-m", "sglang_batch", "serve", *argv],
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.set_blocking(sys.stdin.fileno(), False)
    while server.poll() is None:
        if sys.stdin.buffer.read(1) == b"":
            _stop(server)
            break
        time.sleep(POLL_S)
    # What it leaves behind would keep the GPU's memory.
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    return server.wait()


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(STOP_S)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
