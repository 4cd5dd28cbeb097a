"""Rows of the soak: memory of a large batch, and time to check its file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import bench_validation
from openai import ConflictError
from report import Figure
from soak_server import ENDED, SoakServer, chat_line, write_lines

MB = 1e6
BYTES_PER_TOKEN_ID = 4
# A batch need not end: by then it has reached its most memory.
FINISHED_LINES = 2000
PATIENCE_S = 1200


def _short_lines(count: int) -> Iterator[dict[str, Any]]:
    for i in range(count):
        yield chat_line(f"line-{i}", f"What is {i}?", max_tokens=1)


def memory_rows(
    server: SoakServer, scratch: Path, small: int, large: int
) -> list[Figure]:
    """Most memory of the serving process in a batch of ``large`` lines."""
    little, _ = _peak_bytes(server, scratch, small)
    much, input_tokens = _peak_bytes(server, scratch, large)
    spool = input_tokens * BYTES_PER_TOKEN_ID
    return [
        Figure(f"memory, {small:,} lines", little / MB, "MB"),
        Figure(f"memory, {large:,} lines", much / MB, "MB"),
        Figure(
            "more, without token ids", (much - little - spool) / MB, "MB", ("<=", 300),
            f"token ids are {spool / MB:.0f} MB",
        ),
    ]  # fmt: skip


def _peak_bytes(server: SoakServer, scratch: Path, count: int) -> tuple[int, int]:
    """Most memory over a batch of that many lines, and the tokens of its prompts."""
    source = write_lines(scratch / f"memory-{count}.jsonl", _short_lines(count))
    deadline = time.monotonic() + PATIENCE_S
    with server.watched_memory() as peak:
        batch = server.submit(source)
        while batch.status not in ENDED:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} lines are {batch.status}: {batch}")
            time.sleep(0.2)
            batch = server.api.batches.retrieve(batch.id)
            counts = batch.request_counts
            if counts and counts.completed >= min(count, FINISHED_LINES):
                break
        usage, counts = batch.usage, batch.request_counts
        if batch.status in ("in_progress", "validating"):
            with suppress(ConflictError):  # it has ended meanwhile
                batch = server.api.batches.cancel(batch.id)
        server.wait(batch, PATIENCE_S)
    source.unlink()
    if not (usage and counts and counts.completed):
        raise RuntimeError(f"no line of {count} was answered: {batch}")
    return peak[0], int(usage.input_tokens / counts.completed * count)


def validation_rows(scratch: Path, count: int, repeats: int = 3) -> list[Figure]:
    """Lines checked per second on one core."""
    source = scratch / "validation.jsonl"
    bench_validation.write_lines(source, count)
    name = "of one endpoint and model"
    rules = bench_validation.RULES[name]
    rate = max(
        bench_validation.lines_per_second(source, rules, count) for _ in range(repeats)
    )
    source.unlink()
    target = (">=", bench_validation.TARGETS[name])
    return [Figure(f"checked of {count:,} lines", rate, "lines/s", target)]
