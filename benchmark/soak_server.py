"""Servers for the soak that can be killed at any moment and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from openai import OpenAI
from openai.types import Batch

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
START_TIMEOUT_S = 300
LOG_TAIL_CHARS = 4000
MODEL_NAME = "demo"
# Arguments of every engine of the soak, in a server or not.
ENGINE_ARGUMENTS = {
    "dtype": "float32",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 20_000,
    "sleep_on_idle": True,
}


def launch(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """``python -m sglang.launch_server``. Options are those of ``Popen``."""
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    return subprocess.Popen(command, **options)


class SoakServer:
    """A server of the demo model that keeps its batches in one directory.

    Args:
        model: the model's directory.
        directory: where batches and the server's log are kept.
        config: of ``--offline-batch-config``.
    """

    def __init__(self, model: Path, directory: Path, **config: Any) -> None:
        self.store = directory / "batches"
        self.log_path = directory / "server.log"
        self._arguments = [
            *("--model-path", str(model), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", *_options(ENGINE_ARGUMENTS)),
            *("--offline-batch", "--offline-batch-dir", str(self.store)),
            *("--offline-batch-config", json.dumps(config)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self, killed_after_s: float | None = None) -> None:
        """Start, and wait until requests are answered.

        Args:
            killed_after_s: do not wait, but kill it again after that many seconds.

        Raises:
            SystemExit: it ended early or took too long. The message has the end of
                its log.
        """
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log_path.open("ab") as log:
            self._process = launch(
                [*self._arguments, "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A second thread slows such a small model down.
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        if killed_after_s is not None:
            time.sleep(killed_after_s)
            self.kill()
            return
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.is_alive:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
            else:
                return
        self.kill()
        tail = self.log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:]
        raise SystemExit(f"{tail}\nerror: the server did not start; its log is above.")

    def kill(self) -> None:
        """SIGKILL to all processes of the server, as a crash would."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def rss_bytes(self) -> int:
        """Memory of the process that answers HTTP and runs batches."""
        assert self._process is not None
        return int(psutil.Process(self._process.pid).memory_info().rss)

    @property
    def api(self) -> OpenAI:
        """A client that repeats nothing that fails."""
        url = f"{self.url}/v1"
        return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)

    def submit(self, path: Path, endpoint: Any = CHAT, window: Any = "24h") -> Batch:
        """Upload a file and start a batch over it."""
        file = self.api.files.create(file=path, purpose="batch")
        return self.api.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window=window
        )

    def wait(self, batch: Batch, timeout_s: float, poll_s: float = 0.2) -> Batch:
        """The batch at its end.

        Raises:
            TimeoutError: it has not ended after ``timeout_s``.
        """
        deadline, api = time.monotonic() + timeout_s, self.api
        while batch.status not in ENDED:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{batch.id} is {batch.status} after {timeout_s} s")
            time.sleep(poll_s)
            batch = api.batches.retrieve(batch.id)
        return batch

    def results(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """The lines of a batch's output and error file."""
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                content = self.api.files.content(file_id).read()
                yield from map(json.loads, content.splitlines())

    @contextmanager
    def watched_memory(self, every_s: float = 0.05) -> Iterator[list[int]]:
        """A list whose only item is the most memory used within the context so far."""
        peak, done = [self.rss_bytes], threading.Event()

        def watch() -> None:
            while not done.wait(every_s):
                with suppress(psutil.Error):
                    peak[0] = max(peak[0], self.rss_bytes)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield peak
        finally:
            done.set()
            thread.join()


@contextmanager
def running(model: Path, directory: Path, **config: Any) -> Iterator[SoakServer]:
    """A server, as long as the context."""
    directory.mkdir(parents=True, exist_ok=True)
    server = SoakServer(model, directory, **config)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def chat_line(custom_id: str, prompt: str, **body: Any) -> dict[str, Any]:
    """A line that asks for a chat completion."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": MODEL_NAME, "messages": messages, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """A batch's input file, a line at a time."""
    with path.open("w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
    return path


def _options(arguments: dict[str, Any]) -> list[str]:
    options = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        options.append(flag if value is True else f"{flag}={value}")
    return options


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
