"""A prefill server and a decode server of one model, each of which can be killed and
started again at its address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers import SERVER_ARGS, Server, free_port, kill_group, wait_until_ready

# Requests in the decode server at a time: few, so that a batch takes a while.
MAX_INFLIGHT = 24


class ApartServers:
    """The two servers on loopback.

    Attributes:
        store: the decode server's directory of batches.
    """

    prefill: Server
    decode: Server

    def __init__(
        self,
        model: Path,
        directory: Path,
        *args: str,
        decode_args: Sequence[str] = (),
        **config: Any,
    ) -> None:
        self._model = model
        self._directory = directory
        self._args = args
        self._decode_args = decode_args
        self._config = config
        self._ports = (free_port(), free_port(), free_port())
        self.store = directory / "decode"

    def start_prefill(self) -> None:
        """Start it without waiting for it."""
        port, bootstrap, _ = self._ports
        self.prefill = self._start(
            "prefill", port, f"--disaggregation-bootstrap-port={bootstrap}"
        )

    def start_decode(self) -> None:
        """Start it without waiting for it."""
        config = {
            "prefill_servers": [f"http://127.0.0.1:{self._ports[0]}"],
            "max_inflight": MAX_INFLIGHT,
            **self._config,
        }
        self.decode = self._start(
            "decode",
            self._ports[2],
            f"--offline-batch-config={json.dumps(config)}",
            *self._decode_args,
        )

    def _start(self, mode: str, port: int, *args: str) -> Server:
        log_path = self._directory / f"{mode}-{time.monotonic_ns()}.log"
        command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *(f"--model-path={self._model}", "--host=127.0.0.1", f"--port={port}"),
            *("--offline-batch", f"--offline-batch-dir={self._directory / mode}"),
            *(f"--disaggregation-mode={mode}", "--disaggregation-transfer-backend=tcp"),
            *(*SERVER_ARGS, *self._args, *args),
        ]
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SGLANG_HOST_IP": "127.0.0.1"},
                start_new_session=True,
            )
        return Server(process, f"http://127.0.0.1:{port}", log_path)

    def wait(self) -> None:
        """Wait until both answer."""
        wait_until_ready(self.prefill)
        wait_until_ready(self.decode)

    def kill(self) -> None:
        for name in ("prefill", "decode"):
            if hasattr(self, name):
                kill_group(getattr(self, name).process)


@contextmanager
def apart_servers(
    model: Path,
    directory: Path,
    *args: str,
    decode_args: Sequence[str] = (),
    **config: Any,
) -> Iterator[ApartServers]:
    """Both servers, ready, until the block ends.

    Args:
        args: of both.
        decode_args, config: arguments and settings of the decode server.
    """
    servers = ApartServers(model, directory, *args, decode_args=decode_args, **config)
    try:
        servers.start_prefill()
        servers.start_decode()
        servers.wait()
        yield servers
    finally:
        servers.kill()
