"""Equal requests computed once: tokens, seconds and memory.

A job of lines of which 30 % repeat others, at random places, is compared with the job of its first
lines of each kind. A job without equal lines is run with and without looking for them. All with
``sglang-batch run`` on the demo model; seconds are those of the summary, without the start of
the engine. The machine's speed changes, so runs of each kind follow each other in rounds, the ratio of
two kinds is the median of the rounds, and the search for equal lines is timed by itself: its
processor time, of the seconds of the fastest job.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import Figure

from sglang_batch.batch_api.equal_requests import find_equal
from sglang_batch.batch_api.jsonl import BatchFile
from sglang_batch.request import BatchRequestInput
from sglang_batch.run.demo_model import write_demo_model

LINES, REPEATS = 20_000, 0.3
# Lines of the job whose memory is measured.
MEMORY_LINES = 1_000_000
# Rounds, each with a run of each kind, every other one in reverse.
RUNS = 4
# Lines with the same prompt.
SAMPLES = 16
SEED = 0
URL = "/v1/completions"
ENGINE = ("--dtype=float32", "--max-total-tokens=40000", "--max-running-requests=128")


def measure(quick: bool) -> list[Figure]:
    """Jobs with and without equal lines."""
    scale = 20 if quick else 1
    texts = [
        f"{'Answer briefly. ' * 4}Question {i}: why?" for i in range(LINES // scale)
    ]
    num_unique = int(len(texts) * (1 - REPEATS))
    unique = texts[:num_unique]
    rng = random.Random(SEED)
    repeated = [*unique, *rng.choices(unique, k=len(texts) - num_unique)]
    rng.shuffle(repeated)
    # The unique job has the order in which lines come first in the other.
    unique = list(dict.fromkeys(repeated))
    with tempfile.TemporaryDirectory(prefix="bench-savings-") as scratch:
        place = Path(scratch)
        write_demo_model(place / "model")
        kinds = {
            "unique": (unique, "auto"),
            "repeated": (repeated, "auto"),
            "off": (unique, "off"),
        }
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for nth in range(1 if quick else RUNS):
            in_turn = list(kinds.items())[:: -1 if nth % 2 else 1]
            for kind, (prompts, dedupe) in in_turn:
                summary = run(place, prompts, dedupe)
                runs[kind].append(summary)
                print(f"{kind} {nth}: {summary['seconds']} s", file=sys.stderr)
        search = search_seconds(place, unique)
        sampled = samples(place)
    alone, merged = runs["unique"][0], runs["repeated"][0]
    seconds = {kind: [x["seconds"] for x in found] for kind, found in runs.items()}
    return [
        Figure(
            f"{len(repeated):,} lines, {len(repeated) - len(unique):,} of them equal to "
            "others: prompt and output tokens computed, off those of the unique lines",
            abs(answered(merged) - answered(alone)), target=("=", 0),
            note=f"{answered(alone):,}",
        ),
        Figure(
            "  lines answered, off all", abs(merged["completed"] - len(repeated)),
            target=("=", 0),
        ),
        Figure(
            "  seconds, of those of the unique lines, median of the rounds",
            in_rounds(seconds["repeated"], seconds["unique"]), target=("<=", 1.03),
            note=f"{min(seconds['repeated'])} s against {min(seconds['unique'])} s",
        ),
        Figure(
            "nothing equal: processor seconds of the search, of the job's seconds",
            search / min(seconds["off"]), target=("<=", 0.01),
            note=f"{search:.3f} s of {min(seconds['off'])} s",
        ),
        Figure(
            "  seconds, of those with --dedupe off, median of the rounds",
            in_rounds(seconds["unique"], seconds["off"]),
        ),
        memory(MEMORY_LINES // scale),
        sampled,
    ]  # fmt: skip


def in_rounds(seconds: list[float], others: list[float]) -> float:
    """Median over the rounds of the ratio of two kinds."""
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def answered(summary: dict[str, Any]) -> int:
    """Prompt and output tokens of the requests that were computed."""
    tokens: int = summary["prompt_tokens"] + summary["output_tokens"]
    merged: int = summary["merged_prompt_tokens"] + summary["merged_output_tokens"]
    return tokens - merged


def samples(place: Path) -> Figure:
    """Lines with equal prompts that are sampled, so that each is computed."""
    prompts = [f"{number}: {'Tell a story of the sea. ' * 20}" for number in range(8)]
    summary = run(place, prompts * SAMPLES, "auto", temperature=1.0)
    computed = summary["prompt_tokens"] - summary["cached_tokens"]
    least = sum(map(len, prompts))  # a byte is a token of the demo model
    further = len(prompts) * (SAMPLES - 1)
    return Figure(
        f"{SAMPLES} samples of equal prompts: prompt tokens computed for each further "
        "line", (computed - least) / further, target=("=", 1), note=f"{computed}",
    )  # fmt: skip


def run(
    place: Path, prompts: Sequence[str], dedupe: str, temperature: float = 0
) -> dict[str, Any]:
    """Run a job of these prompts. Returns its summary."""
    source, output = place / "in.jsonl", place / "out.jsonl"
    lines = (line(i, text, temperature) for i, text in enumerate(prompts))
    source.write_bytes(b"".join(lines))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_batch", "run", "--overwrite"),
            *("-i", str(source), "-o", str(output), f"--dedupe={dedupe}"),
            *(f"--model-path={place / 'model'}", "--served-model-name=demo", *ENGINE),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def search_seconds(place: Path, prompts: Sequence[str]) -> float:
    """Processor seconds of looking for equal lines in a file without any, the least of 5."""
    source = place / "in.jsonl"
    starts, ends = array("q"), array("q")
    with source.open("wb") as file:
        for number, text in enumerate(prompts):
            starts.append(file.tell())
            file.write(line(number, text))
            ends.append(file.tell())
    requests, found = BatchFile(source, starts, ends), []
    for _ in range(5):
        begun = time.process_time()
        assert not find_equal(requests, range(len(requests))).num_merged
        found.append(time.process_time() - begun)
    return min(found)


def line(number: int, text: str, temperature: float = 0) -> bytes:
    body: dict[str, Any] = {"model": "demo", "prompt": text, "max_tokens": 8}
    body |= {"temperature": temperature, "ignore_eos": True}
    entry = {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": body}
    return json.dumps(entry).encode() + b"\n"


class _Lines:
    """Requests that take no memory, none equal to another."""

    def __init__(self, num_lines: int) -> None:
        self._num_lines = num_lines

    def __len__(self) -> int:
        return self._num_lines

    def __getitem__(self, index: int) -> BatchRequestInput:
        body = json.loads(line(index, f"Question {index}"))["body"]
        return BatchRequestInput(index, f"{index}", URL, json.dumps(body).encode())


def memory(num_lines: int) -> Figure:
    """What is kept while a job without equal lines is searched, and while it runs."""
    numbers = np.arange(num_lines)
    find_equal(_Lines(100), numbers[:100])
    tracemalloc.start()
    found = find_equal(_Lines(num_lines), numbers)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not found.num_merged
    return Figure(
        "nothing equal: bytes a line while lines are compared", peak / num_lines,
        target=("<=", 16), note=f"{kept / num_lines:.1f} afterwards",
    )  # fmt: skip
