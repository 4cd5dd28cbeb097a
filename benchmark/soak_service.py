"""Row of the soak: time of the service over that of the engine alone."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path
from statistics import median

from report import Figure, print_table
from soak_engine import same_line, stock_engine
from soak_server import ENDED, SoakServer, write_lines

PATIENCE_S = 1200
# Polling is work for the server, too.
POLL_S = 0.1
# Percent of the engine's time that the service may add.
OVERHEAD = 8.0
# Of the realistic prompts: a long text that many share, and then a question.
SHARED_TEXTS, SHARED_WORDS = 20, 150
# The work of a batch in each status, as its client sees it.
STAGES = {"in_progress": "checked", "completed": "run and written"}


def tiny_prompts(count: int, seed: int) -> list[str]:
    """Distinct prompts of a few tokens each."""
    return [f"{seed}:{i}?" for i in range(count)]


def realistic_prompts(count: int, seed: int) -> list[str]:
    """Questions about a few texts, in random order."""
    return [
        f"Text {i % SHARED_TEXTS} of {seed}. "
        + f"word{i % SHARED_TEXTS} " * SHARED_WORDS
        + f"\nQuestion {i}: what does it say?"
        for i in range(count)
    ]


PROMPTS = {"tiny": tiny_prompts, "realistic": realistic_prompts}


def batch_seconds(
    server: SoakServer, scratch: Path, prompts: list[str]
) -> dict[str, float]:
    """Wall time from the call that makes a batch to its end, on a cold cache.

    Returns:
        ``all`` and the parts of it that :data:`STAGES` name. A client that misses a
        status counts its part to the next one.
    """
    source = write_lines(
        scratch / "batch.jsonl",
        (same_line(f"line-{i}", prompt) for i, prompt in enumerate(prompts)),
    )
    api = server.api
    file = api.files.create(file=source, purpose="batch")
    flush = urllib.request.Request(f"{server.url}/flush_cache", method="POST")
    urllib.request.urlopen(flush).close()
    began = time.perf_counter()
    batch = api.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    seen: dict[str, float] = {}
    while batch.status not in ENDED:
        if time.perf_counter() > began + PATIENCE_S:
            raise TimeoutError(f"the batch is {batch.status}: {batch}")
        time.sleep(POLL_S)
        batch = api.batches.retrieve(batch.id)
        seen.setdefault(batch.status, time.perf_counter() - began)
    counts = batch.request_counts
    if batch.status != "completed" or not counts or counts.completed != len(prompts):
        raise RuntimeError(f"the batch did not complete: {batch}")
    parts, last = {}, 0.0
    for status, name in STAGES.items():
        parts[name] = seen.get(status, last) - last
        last += parts[name]
    return {"all": seen["completed"], **parts}


def overhead_rows(
    server: SoakServer,
    model: Path,
    scratch: Path,
    kinds: dict[str, int],
    repeats: int,
) -> list[Figure]:
    """The service against ``Engine.generate`` over the same requests, in alternation.

    Args:
        kinds: how many requests of each kind of prompts.
    """
    figures, rows = [], []
    with stock_engine(model) as engine:
        for kind, count in kinds.items():
            warm_up = PROMPTS[kind](50, -1)
            engine.seconds(warm_up)
            batch_seconds(server, scratch, warm_up)
            ours, theirs = [], []
            for repeat in range(repeats):
                prompts = PROMPTS[kind](count, repeat)
                theirs.append(engine.seconds(prompts))
                took = batch_seconds(server, scratch, prompts)
                ours.append(took["all"])
                seconds = [f"{value:.2f}" for value in (theirs[-1], *took.values())]
                rows.append([kind, count, *seconds])
            over = 100 * (median(ours) / median(theirs) - 1)
            each_ms = 1000 * (median(ours) - median(theirs)) / count
            note = (
                f"{median(ours):.2f} s, Engine.generate {median(theirs):.2f} s; "
                f"{each_ms:.2f} ms a line"
            )
            name = f"overhead, {count:,} {kind} prompts"
            figures.append(Figure(name, over, "%", ("<=", OVERHEAD), note))
    header = ["prompts", "lines", "Engine.generate", "batch", *STAGES.values()]
    print_table("Seconds of a batch and of its parts", header, rows)
    return figures
