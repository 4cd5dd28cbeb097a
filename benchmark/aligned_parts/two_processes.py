"""Prefill and decode in two servers over loopback: equal answers, and nothing lost.

A batch of 400 short lines on a prefill server and a decode server of the demo model, and
on one server that does both. Then the prefill server, and then the decode server, is
killed in the middle of a batch and started again.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import soak_server
from report import Figure
from soak_server import SoakServer, chat_line, running, write_lines

from sglang_batch.run.demo_model import write_demo_model

LINES = 400
TOKENS = 16
# Requests in the decode server at a time while a server is killed.
MAX_INFLIGHT = 24
TIMEOUT_S = 240.0
_TOPICS = (
    "The tide comes in twice a day. " * 8,
    "A list is a sequence. " * 12,
    "Short. ",
)


class ModeServer(SoakServer):
    """A prefill or decode server, which keeps its address when it is started again."""

    def __init__(
        self, mode: str, model: Path, directory: Path, *args: str, **config: Any
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(model, directory, **config)
        self._port = soak_server._free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._arguments += [
            *(f"--port={self._port}", f"--disaggregation-mode={mode}"),
            *("--disaggregation-transfer-backend=tcp", *args),
        ]

    def launch(self) -> None:
        """Start without waiting."""
        with self.log_path.open("ab") as log:
            self._process = soak_server.launch(
                self._arguments,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    "SGLANG_HOST_IP": "127.0.0.1",
                },
            )

    def wait_until_ready(self) -> None:
        """Wait until it answers.

        Raises:
            SystemExit: it ended early or took too long.
        """
        deadline = time.monotonic() + soak_server.START_TIMEOUT_S
        while time.monotonic() < deadline and self.is_alive:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        tail = self.log_path.read_text(errors="replace")[-soak_server.LOG_TAIL_CHARS :]
        raise SystemExit(f"{tail}\nerror: a server did not start; its log is above.")


@contextmanager
def two_servers(
    model: Path, directory: Path
) -> Iterator[tuple[ModeServer, ModeServer]]:
    """A prefill server and a decode server, as long as the context."""
    bootstrap = f"--disaggregation-bootstrap-port={soak_server._free_port()}"
    prefill = ModeServer("prefill", model, directory / "prefill", bootstrap)
    config = {"prefill_servers": [prefill.url], "max_inflight": MAX_INFLIGHT}
    decode = ModeServer("decode", model, directory / "decode", **config)
    try:
        prefill.launch()
        decode.launch()
        prefill.wait_until_ready()
        decode.wait_until_ready()
        yield prefill, decode
    finally:
        prefill.kill()
        decode.kill()


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has fewer lines."""
    lines = LINES // 4 if quick else LINES
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as name:
        scratch = Path(name)
        model = scratch / "model"
        write_demo_model(model)
        path = write_lines(scratch / "in.jsonl", _lines(lines))
        with running(model, scratch / "one") as server:
            one_s, wanted = _run(server, path)
            computed = _prompt_tokens(server)
        with two_servers(model, scratch) as (prefill, decode):
            two_s, found = _run(decode, path)
            figures = [
                Figure("two processes: lines with another answer",
                       _different(found, wanted), "", ("=", 0)),
                Figure("two processes: prompt tokens computed, over those of one",
                       _prompt_tokens(prefill) / computed, "", ("<=", 1.05)),
                Figure("two processes: seconds of the batch", two_s, "s", None,
                       f"{one_s:.2f} s in one process, which has both cores"),
            ]  # fmt: skip
            for name, killed in (("prefill", prefill), ("decode", decode)):
                figures += _killed(name, killed, decode, path, wanted)
                prefill.wait_until_ready()
    return figures


def _lines(count: int) -> Iterator[dict[str, Any]]:
    for i in range(count):
        prompt = f"{_TOPICS[i % len(_TOPICS)]}{'Why? ' * (i % 7)}Question {i}."
        yield chat_line(f"line-{i}", prompt, max_tokens=TOKENS, temperature=0)


def _run(
    server: SoakServer, path: Path, meanwhile: Callable[[Path], None] | None = None
) -> tuple[float, list[tuple[str, str]]]:
    """Seconds of a batch, and the id and answer of each of its result lines.

    Args:
        meanwhile: called with the log of results when the batch has begun.
    """
    start = time.perf_counter()
    batch = server.submit(path)
    if meanwhile is not None:
        meanwhile(server.store / "batches" / batch.id / "results.jsonl")
    batch = server.wait(batch, TIMEOUT_S, 0.05)
    seconds = time.perf_counter() - start
    return seconds, [
        (line["custom_id"], json.dumps(line["response"]["body"].get("choices")))
        for line in server.results(batch)
    ]


def _prompt_tokens(server: SoakServer) -> int:
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=10) as answer:
        state = json.load(answer)["internal_states"][0]["offline_batch"]
    return int(state["prefill_tokens"])


def _different(found: list[tuple[str, str]], wanted: list[tuple[str, str]]) -> int:
    answers = dict(found)
    return sum(answers.get(line) != answer for line, answer in wanted)


def _killed(
    name: str,
    killed: ModeServer,
    decode: ModeServer,
    path: Path,
    wanted: list[tuple[str, str]],
) -> list[Figure]:
    """Kill a server once a quarter of the lines is answered, and start it again."""
    before = 0

    def kill(log: Path) -> None:
        nonlocal before
        deadline = time.monotonic() + TIMEOUT_S
        while (before := _num_results(log)) < len(wanted) // 4:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{before} results after {TIMEOUT_S} s")
            time.sleep(0.005)
        killed.kill()
        before = _num_results(log)
        killed.launch()
        if killed is decode:
            decode.wait_until_ready()

    _, found = _run(decode, path, kill)
    counts = Counter(line for line, _ in found)
    twice = sum(count > 1 for count in counts.values())
    case = f"{name} server killed"
    return [
        Figure(f"{case}: answers before", before, "", ("<=", len(wanted) - 1)),
        Figure(f"{case}: lines lost", len(wanted) - len(counts), "", ("=", 0)),
        Figure(f"{case}: lines answered twice", twice, "", ("=", 0)),
        Figure(
            f"{case}: lines with another answer",
            _different(found, wanted),
            "",
            ("=", 0),
        ),
    ]


def _num_results(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0
