"""Streams: cached tokens and seconds by the size of a window, against one batch of all rows.

Rows share prefixes in families and come in random order. One batch over the same lines is one
plan. Blocks are what ``AnswerColumns`` plans with Ray Data: each by itself, the next when the last
has ended.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from demo_server import follow, launched
from openai import OpenAI
from report import Figure, print_table

from sglang_batch import AnswerColumns, stream
from sglang_batch.run.demo_model import write_demo_model

FAMILIES, MEMBERS = 100, 40
BLOCK = 100
WINDOWS = (4000, 2000, 1000, 500)
SEED = 0
MODEL = "demo"
URL: Any = "/v1/completions"
# Fewer tokens than the families' prefixes have together, as with a real job.
ENGINE = ("--dtype=float32", "--max-total-tokens=12000", "--max-running-requests=64")


def measure(quick: bool) -> list[Figure]:
    """One batch, streams, and blocks, on one server."""
    members = MEMBERS // (8 if quick else 1)
    rows = prompts(members)
    windows = [max(1, size * members // MEMBERS) for size in WINDOWS]
    table: list[list[Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-streams-") as scratch:
        place = Path(scratch)
        write_demo_model(place / "model")
        with launched(place / "model", MODEL, place, *ENGINE) as url:
            batch = as_batch(url, rows)
            table.append(["one batch", *batch])
            print(table[-1], file=sys.stderr)
            for window in windows:
                table.append(
                    [f"stream, windows of {window:,}", *as_stream(url, rows, window)]
                )
                print(table[-1], file=sys.stderr)
            table.append([f"blocks of {BLOCK}", *as_blocks(url, rows)])
    names = ["", "cached tokens", "seconds", "rows/s"]
    print_table(
        f"{len(rows):,} rows, {FAMILIES} families, in random order", names,
        [[name, f"{share:.1%}", f"{s:.1f}", f"{len(rows) / s:.0f}"] for name, share, s in table],
    )  # fmt: skip
    whole = table[1]
    return [
        Figure(
            "a stream of one window: cached share of that of a batch",
            whole[1] / batch[0], target=(">=", 0.97), note=f"{batch[0]:.1%} of a batch",
        ),
        Figure("  seconds, of those of the batch", whole[2] / batch[1]),
        Figure(
            f"windows of {windows[2]:,}: cached share of that of a batch",
            table[3][1] / batch[0],
        ),
        Figure(f"blocks of {BLOCK}: cached share of that of a batch", table[-1][1] / batch[0]),
    ]  # fmt: skip


def prompts(members: int) -> list[dict[str, str]]:
    """Rows of families, each with a prefix of its own of about 250 tokens."""
    rng = random.Random(SEED)
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(500)]
    prefixes = [" ".join(rng.choices(words, k=40)) for _ in range(FAMILIES)]
    rows = [{"prompt": f"{p} #{i}:"} for p in prefixes for i in range(members)]
    rng.shuffle(rows)
    return rows


def bodies(rows: Iterable[dict[str, str]]) -> Iterable[dict[str, Any]]:
    for row in rows:
        yield {"model": MODEL, **row, "max_tokens": 4, "ignore_eos": True}


def as_batch(url: str, rows: list[dict[str, str]]) -> tuple[float, float]:
    """Cached share and seconds of one batch."""
    flush(url)
    lines = (
        {"custom_id": str(i), "method": "POST", "url": URL, "body": body}
        for i, body in enumerate(bodies(rows))
    )
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    api = OpenAI(base_url=f"{url}/v1", api_key="none")
    began = time.perf_counter()
    file = api.files.create(file=("rows.jsonl", data), purpose="batch")
    batch = follow(
        api,
        api.batches.create(
            input_file_id=file.id, endpoint=URL, completion_window="24h"
        ).id,
    )
    seconds = time.perf_counter() - began
    assert batch.output_file_id is not None and batch.error_file_id is None
    answers = api.files.content(batch.output_file_id).content.splitlines()
    found = [json.loads(line)["response"]["body"] for line in answers]
    return cached_share(found, len(rows)), seconds


def as_stream(url: str, rows: list[dict[str, str]], window: int) -> tuple[float, float]:
    """Cached share and seconds of a stream."""
    flush(url)
    began = time.perf_counter()
    answers = list(stream(bodies(rows), server=url, url=URL, window=window))
    seconds = time.perf_counter() - began
    assert all(answer.ok for answer in answers)
    return cached_share([answer.body for answer in answers], len(rows)), seconds


def as_blocks(url: str, rows: list[dict[str, str]]) -> tuple[float, float]:
    """Cached share and seconds of blocks, one after the other."""
    flush(url)
    template = {
        "model": MODEL,
        "prompt": "{{prompt}}",
        "max_tokens": 4,
        "ignore_eos": True,
    }
    ask = AnswerColumns(template, url=URL, body_column="body", server=url)
    began = time.perf_counter()
    found: list[dict[str, Any]] = []
    for first in range(0, len(rows), BLOCK):
        block = [row["prompt"] for row in rows[first : first + BLOCK]]
        found += map(json.loads, ask({"prompt": block})["body"])
    return cached_share(found, len(rows)), time.perf_counter() - began


def cached_share(answers: list[dict[str, Any]], number: int) -> float:
    """Of the prompt tokens of all answers."""
    usages = [answer["usage"] for answer in answers]
    assert len(usages) == number
    cached = sum(
        (u["prompt_tokens_details"] or {}).get("cached_tokens", 0) for u in usages
    )
    return float(cached / sum(usage["prompt_tokens"] for usage in usages))


def flush(url: str) -> None:
    """Empty the prefix cache."""
    call = urllib.request.Request(f"{url}/flush_cache", method="POST")
    with urllib.request.urlopen(call, timeout=60):
        pass
