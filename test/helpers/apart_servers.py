"""Prefill servers and a decode server of one model, each of which can be killed and
started again at its address."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import preloaded
from forked_children import command
from free_ports import free_port
from servers import (
    SERVER_ARGS,
    Server,
    kill_group,
    wait_until_ready,
)

# Requests in the decode server at a time: few, so that a batch takes a while.
MAX_INFLIGHT = 24


def _folder(mode: str, port: int) -> str:
    return mode if mode == "decode" else f"{mode}-{port}"


class ApartServers:
    """The servers on loopback, one of each kind unless there are more prefill servers.

    Attributes:
        prefill, more_prefill: the first prefill server, and the others.
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
        num_prefill: int = 1,
        **config: Any,
    ) -> None:
        self._model = model
        self._directory = directory
        self._args = args
        self._decode_args = decode_args
        self._config = config
        self._ports = [(free_port(), free_port()) for _ in range(num_prefill)]
        self._decode_port = free_port()
        self.more_prefill: list[Server] = []
        self.store = directory / "decode"

    def start_prefill(self) -> None:
        """Start it without waiting for it."""
        self.prefill = self._start_prefill(0)

    def start_more_prefill(self) -> None:
        """Start the other prefill servers."""
        others = range(1, len(self._ports))
        self.more_prefill = [self._start_prefill(i) for i in others]

    def _start_prefill(self, i: int) -> Server:
        port, bootstrap = self._ports[i]
        return self._start(
            "prefill", port, f"--disaggregation-bootstrap-port={bootstrap}"
        )

    def start_decode(self) -> None:
        """Start it without waiting for it."""
        config = {
            "prefill_servers": [f"http://127.0.0.1:{port}" for port, _ in self._ports],
            "max_inflight": MAX_INFLIGHT,
            **self._config,
        }
        self.decode = self._start(
            "decode",
            self._decode_port,
            f"--offline-batch-config={json.dumps(config)}",
            *self._decode_args,
        )

    def _start(self, mode: str, port: int, *args: str) -> Server:
        log_path = self._directory / f"{mode}-{time.monotonic_ns()}.log"
        argv = [
            *command("server_main"),
            *(f"--model-path={self._model}", "--host=127.0.0.1", f"--port={port}"),
            *(
                "--offline-batch",
                f"--offline-batch-dir={self._directory / _folder(mode, port)}",
            ),
            *(f"--disaggregation-mode={mode}", "--disaggregation-transfer-backend=tcp"),
            *(*SERVER_ARGS, *self._args, *args),
        ]
        with open(log_path, "wb") as log:
            process = preloaded.Popen(
                argv,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SGLANG_HOST_IP": "127.0.0.1"},
                start_new_session=True,
            )
        return Server(process, f"http://127.0.0.1:{port}", log_path)

    def wait(self) -> None:
        """Wait until both answer."""
        for server in (self.prefill, *self.more_prefill, self.decode):
            wait_until_ready(server)

    def kill(self) -> None:
        started = [self.__dict__.get(name) for name in ("prefill", "decode")]
        for server in (*started, *self.more_prefill):
            if server is not None:
                kill_group(server.process)


@contextmanager
def apart_servers(
    model: Path,
    directory: Path,
    *args: str,
    decode_args: Sequence[str] = (),
    num_prefill: int = 1,
    **config: Any,
) -> Iterator[ApartServers]:
    """Both servers, ready, until the block ends.

    Args:
        args: of both.
        decode_args, config: arguments and settings of the decode server.
    """
    servers = ApartServers(
        model,
        directory,
        *args,
        decode_args=decode_args,
        num_prefill=num_prefill,
        **config,
    )
    try:
        servers.start_prefill()
        servers.start_more_prefill()
        servers.start_decode()
        servers.wait()
        yield servers
    finally:
        servers.kill()
