"""What flex calls cost a batch and the ordinary calls next to them.

A server with the small model runs the same batch several times, each time with ordinary
calls next to it, and every second time also with clients that send one flex call after
another. The order of the two turns around from pair to pair, so that a machine that gets
slower counts for both. The fastest run of each is compared: whatever else a machine does
only adds to a run, and on a shared one that is more than what is measured.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
from demo_server import launched
from report import Figure, print_table
from throughput_jobs import NUM_IDS

from sglang_batch.run.demo_model import write_demo_model

MODEL = "demo"
MODES = ("without flex calls", "with flex calls")
NUM_LINES, PROMPT_LEN, ANSWER_LEN = 600, 64, 160
CALL_EVERY_S, CALL_LEN = 0.25, 8
# More clients than there is room for, so that some flex call always waits.
NUM_FLEX_CLIENTS = 8
ARGUMENTS = (
    "--dtype=float32",
    "--max-total-tokens=8192",
    "--max-running-requests=64",
    "--chunked-prefill-size=512",
    "--enable-mixed-chunk",
)
POLL_S = 0.05
MOST_BATCH_SECONDS, MOST_P95 = 1.05, 1.05


@dataclass(slots=True)
class Run:
    """One batch: its seconds, milliseconds to the first token of each ordinary call, and
    the flex calls that were answered and refused meanwhile."""

    seconds: float = 0.0
    first_ms: list[float] = field(default_factory=list)
    answered: int = 0
    refused: int = 0


def body(rng: np.random.Generator, answer_len: int, **fields: Any) -> dict[str, Any]:
    prompt = rng.integers(0, NUM_IDS, PROMPT_LEN).tolist()
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": answer_len, "temperature": 0,
        "ignore_eos": True, **fields,
    }  # fmt: skip


def lines(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    made = (
        {
            "custom_id": str(number), "method": "POST", "url": "/v1/completions",
            "body": body(rng, ANSWER_LEN),
        }
        for number in range(NUM_LINES)
    )  # fmt: skip
    return b"\n".join(json.dumps(line).encode() for line in made)


async def _json(answer: Any) -> Any:
    async with answer as got:
        got.raise_for_status()
        return await got.json()


async def run_batch(api: aiohttp.ClientSession, file_id: str) -> float:
    """Seconds from the creation of a batch to its end."""
    begin = time.perf_counter()
    fields = {"input_file_id": file_id, "endpoint": "/v1/completions"}
    batch = await _json(
        api.post("/v1/batches", json={**fields, "completion_window": "24h"})
    )
    while batch["status"] in ("validating", "in_progress", "finalizing"):
        await asyncio.sleep(POLL_S)
        batch = await _json(api.get(f"/v1/batches/{batch['id']}"))
    if batch["request_counts"]["completed"] != NUM_LINES:
        raise RuntimeError(f"The batch ended without all answers: {batch}")
    return time.perf_counter() - begin


async def call_in_turn(api: aiohttp.ClientSession, run: Run, seed: int) -> None:
    """Ordinary calls, one every :data:`CALL_EVERY_S` seconds, until it is cancelled."""

    async def ask(fields: dict[str, Any]) -> None:
        begin = time.perf_counter()
        async with api.post("/v1/completions", json=fields) as answer:
            answer.raise_for_status()
            await answer.content.readline()
            run.first_ms.append(1e3 * (time.perf_counter() - begin))
            await answer.read()

    rng = np.random.default_rng(seed)
    async with asyncio.TaskGroup() as calls:
        while True:
            calls.create_task(ask(body(rng, CALL_LEN, stream=True)))
            await asyncio.sleep(CALL_EVERY_S)


async def flex_client(api: aiohttp.ClientSession, run: Run, seed: int) -> None:
    """Flex calls as large as the lines, one after another, until it is cancelled."""
    rng = np.random.default_rng(seed)
    while True:
        fields = body(rng, ANSWER_LEN, service_tier="flex")
        async with api.post("/v1/completions", json=fields) as answer:
            await answer.read()
            if answer.status not in (200, 429):
                answer.raise_for_status()
            run.answered += answer.status == 200
            run.refused += answer.status == 429


async def measure(api: aiohttp.ClientSession, file_id: str, mode: str) -> Run:
    run = Run()
    beside = [asyncio.create_task(call_in_turn(api, run, seed=1))]
    if mode == MODES[1]:
        beside += [
            asyncio.create_task(flex_client(api, run, seed=number))
            for number in range(2, 2 + NUM_FLEX_CLIENTS)
        ]
    try:
        run.seconds = await run_batch(api, file_id)
        for task in beside:
            if task.done():
                task.result()  # its error
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    return run


async def measure_all(url: str, seed: int, repeats: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, timeout=timeout) as api:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", lines(seed), filename="lines.jsonl")
        file = await _json(api.post("/v1/files", data=form))
        for mode in MODES:  # caches and kernels are warm after these
            await measure(api, file["id"], mode)
        for number in range(repeats):
            for mode in MODES if number % 2 else MODES[::-1]:
                run = await measure(api, file["id"], mode)
                runs[mode].append(run)
                print(
                    f"  {mode}: {run.seconds:.2f} s, {len(run.first_ms)} calls,"
                    f" p95 {np.percentile(run.first_ms, 95):.0f} ms,"
                    f" {run.answered} flex calls answered",
                    flush=True,
                )
    return runs


def measure_flex(seed: int, repeats: int) -> tuple[dict[str, Any], list[Figure]]:
    """Print the table. Returns the entries of the document, and the figures."""
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model)
        with launched(model, MODEL, Path(scratch), *ARGUMENTS) as url:
            runs = asyncio.run(measure_all(url, seed, repeats))
    first = {m: np.concatenate([r.first_ms for r in rs]) for m, rs in runs.items()}
    p95 = {mode: float(np.percentile(ms, 95)) for mode, ms in first.items()}
    seconds = {mode: [run.seconds for run in rs] for mode, rs in runs.items()}
    print_table(
        f"A batch of {NUM_LINES} lines, ordinary calls every {CALL_EVERY_S} s and"
        f" {NUM_FLEX_CLIENTS} clients of flex calls, {repeats} repeats",
        [
            "", "batch s, fastest", "median", "calls", "first token p50 ms", "p95 ms", "flex answered",
            "flex refused",
        ],
        [
            [
                mode, round(min(seconds[mode]), 2), round(median(seconds[mode]), 2),
                len(first[mode]),
                round(float(np.median(first[mode])), 1), round(p95[mode], 1),
                sum(run.answered for run in rs), sum(run.refused for run in rs),
            ]
            for mode, rs in runs.items()
        ],
    )  # fmt: skip
    without, with_flex = MODES
    figures = [
        Figure(
            "batch next to flex calls: its seconds, times those without",
            min(seconds[with_flex]) / min(seconds[without]),
            target=("<=", MOST_BATCH_SECONDS),
        ),
        Figure(
            "ordinary calls next to flex calls: p95 to the first token, times that without",
            p95[with_flex] / p95[without],
            target=("<=", MOST_P95),
        ),
    ]
    seen = {m: [[r.seconds, r.answered] for r in rs] for m, rs in runs.items()}
    return {"seconds_and_flex_answers": seen}, figures
