"""What the examples share: a tiny model, a server, and lines of a batch file.

They run as they are. For a model or server of your own, pass ``--model-path`` or
``--url``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sglang_batch.run.demo_model import write_demo_model

# The random model runs on a CPU.
ENGINE_OPTIONS: dict[str, Any] = {"dtype": "float32"}
START_TIMEOUT_S = 300


@contextmanager
def model() -> Iterator[str]:
    """The path of a tiny random model, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="sglang-batch-example-") as directory:
        path = Path(directory) / "demo"
        write_demo_model(path)
        yield str(path)


@contextmanager
def model_flags(path: str | None) -> Iterator[list[str]]:
    """``--model-path`` for a command, and further options for the tiny model."""
    if path is not None:
        yield ["--model-path", path]
        return
    with model() as demo:
        flags = [f"--{k.replace('_', '-')}={v}" for k, v in ENGINE_OPTIONS.items()]
        yield ["--model-path", demo, "--served-model-name", "demo", *flags]


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """``url``, or the URL of a server that runs until the block ends.

    Raises:
        SystemExit: the server did not start. Its log has been printed.
    """
    if url is not None:
        yield url
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with model_flags(None) as flags, tempfile.TemporaryDirectory() as batches:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sglang.launch_server", *flags),
                *("--port", str(port), "--log-level", "warning"),
                *("--offline-batch", "--offline-batch-dir", batches),
            ],
            start_new_session=True,
        )
        try:
            own = f"http://127.0.0.1:{port}"
            _wait(process, own)
            yield own
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise SystemExit("error: the server did not start; its log is above.")


def write_requests(path: Path, questions: Iterable[str]) -> Path:
    """A batch file of chat completions: one line per question."""
    with path.open("w") as file:
        for number, question in enumerate(questions):
            body = {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 16,
            }
            line = {
                "custom_id": f"question-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "demo", **body},
            }
            file.write(json.dumps(line) + "\n")
    return path


def print_answers(lines: bytes) -> None:
    """The answers in an output file. The tiny model is random: so are they."""
    for line in map(json.loads, lines.splitlines()):
        message = line["response"]["body"]["choices"][0]["message"]
        print(f"{line['custom_id']}: {message['content'][:60]!r}")
