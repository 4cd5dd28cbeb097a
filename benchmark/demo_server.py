"""A throw-away offline server, and a batch followed on it, for the demos."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openai import OpenAI
from openai.types import Batch
from tqdm import tqdm

START_TIMEOUT_S = 600
POLL_S = 0.2
LOG_TAIL_CHARS = 4000


@contextmanager
def launched(
    model: Path,
    name: str,
    scratch: Path,
    *args: str,
    port: int | None = None,
    threads: int | None = None,
) -> Iterator[str]:
    """Launch an offline server for a small model. Yields its URL.

    Args:
        threads: of OpenMP. None: those of the environment, or one, since a second thread
            only gets in a toy model's way.
    """
    port = port or _free_port()
    command = [
        *(sys.executable, "-m", "sglang_batch", "serve"),
        *("--model-path", str(model), "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--offline-batch-dir", str(scratch / "batches")),
        *("--mem-fraction-static", "0.3", "--max-total-tokens", "20000"),
        *args,
    ]
    print("$ " + " ".join(["python", *command[1:]]), flush=True)
    log_path = scratch / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                "OMP_NUM_THREADS": "1",
                **os.environ,
                **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
            },
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url, log_path)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def follow(api: OpenAI, batch_id: str) -> Batch:
    """Wait for a batch to end, with a progress bar."""
    with tqdm(desc="validating", unit="req") as bar:
        while True:
            batch = api.batches.retrieve(batch_id)
            counts = batch.request_counts
            bar.set_description_str(batch.status, refresh=False)
            if counts is not None and counts.total:
                bar.total = counts.total
                bar.update(counts.completed + counts.failed - bar.n)
            if batch.status in ("completed", "failed", "cancelled", "expired"):
                return batch
            time.sleep(POLL_S)


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, log_path: Path
) -> None:
    started = time.monotonic()
    while time.monotonic() - started < START_TIMEOUT_S:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    tail = log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:]
    raise SystemExit(f"{tail}\nerror: the server did not start; its log is above.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
