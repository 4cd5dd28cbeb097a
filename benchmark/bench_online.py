"""How long an online request waits while a batch fills the engine.

    python benchmark/bench_online.py [--flex]

Stock SGLang and this package run the demo model on a CPU, each in its own process. A job
of 400 requests takes all of the KV. While it runs, short online requests arrive one after
another. The scheduler counts the steps that begin after a request has arrived and before
the step that computes its first prompt token.

With --flex, a server answers ordinary calls next to a batch, with and without clients of
flex calls. The figures are the batch's seconds and the ordinary calls' first token.

The last line is one JSON document. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from online_flex import measure_flex
from report import Figure, add_save, finish, print_figures, print_table
from throughput_engine import WARM_UP_PROMPTS, answer_all
from throughput_jobs import NUM_IDS

from sglang_batch.run.demo_model import write_demo_model

ENGINES = ("stock fcfs", "ours dfs")
NUM_LINES, NUM_ONLINE = 400, 10
LINE = {"max_new_tokens": 160, "temperature": 0, "ignore_eos": True}
SHORT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
ARGUMENTS = [
    "--dtype=float32",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=8192",
    "--max-running-requests=64",
    "--chunked-prefill-size=512",
    "--enable-mixed-chunk",
    "--log-level=error",
]
# The job is under way after this, and far from its end when the last request comes.
FIRST_AFTER_S, EVERY_S = 1.5, 0.1
PATH_VARIABLE = "BENCHMARK_WAITS_FILE"
PREFIX = "online-"
MOST_STEPS = 2


# In the scheduler process -------------------------------------------------------------


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's function of this name, which also writes the waits to a file."""
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before looking the class up: a plugin may have replaced it
    count_waits(scheduler.Scheduler, Path(os.environ[PATH_VARIABLE]))
    scheduler.run_scheduler_process(*args, **kwargs)


def count_waits(scheduler_class: Any, path: Path) -> None:
    """Write ``rid,steps,running`` for each online request that starts."""
    add, run_batch = scheduler_class._add_request_to_queue, scheduler_class.run_batch
    num_steps = 0
    came: dict[str, int] = {}

    def noted_add(scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        if req.rid.startswith(PREFIX):
            came.setdefault(req.rid, num_steps)
        return add(scheduler, req, *args, **kwargs)

    def noted_run(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        for req in batch.reqs:
            if req.rid in came:
                waited = num_steps - came.pop(req.rid)
                with path.open("a") as file:
                    file.write(f"{req.rid},{waited},{len(batch.reqs)}\n")
        num_steps += 1
        return run_batch(scheduler, batch, *args, **kwargs)

    scheduler_class._add_request_to_queue = noted_add
    scheduler_class.run_batch = noted_run


# In the process of the engine ---------------------------------------------------------


async def send_online(manager: Any, batch: asyncio.Future[Any]) -> int:
    """Send online requests while the batch runs. Returns their number."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def ask(number: int) -> None:
        request = GenerateReqInput(
            input_ids=[number + 1] * 24, sampling_params=SHORT, rid=f"{PREFIX}{number}"
        )
        async for _ in manager.generate_request(request):
            pass

    await asyncio.sleep(FIRST_AFTER_S)
    asked = []
    for number in range(NUM_ONLINE):
        asked.append(asyncio.ensure_future(ask(number)))
        await asyncio.sleep(EVERY_S)
    in_time = 0 if batch.done() else NUM_ONLINE
    await asyncio.gather(batch, *asked)
    return in_time


def prompts(seed: int) -> list[list[int]]:
    drawn = np.random.default_rng(seed).integers(0, NUM_IDS, (NUM_LINES, 64))
    lines: list[list[int]] = drawn.tolist()
    return lines


def run_stock(model: str, seed: int) -> int:
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()  # a plugin makes SGLang run on a CPU
    from sglang.srt.server_args import prepare_server_args

    arguments = [f"--model-path={model}", "--schedule-policy=fcfs", *ARGUMENTS]
    engine = sglang.Engine(server_args=prepare_server_args(arguments))
    engine.generate(input_ids=WARM_UP_PROMPTS, sampling_params=SHORT)

    async def run() -> int:
        job = engine.async_generate(input_ids=prompts(seed), sampling_params=LINE)
        return await send_online(engine.tokenizer_manager, asyncio.ensure_future(job))

    try:
        return int(engine.loop.run_until_complete(run()))
    finally:
        engine.shutdown()


def run_ours(model: str, seed: int) -> int:
    from sglang_batch.config import OfflineBatchConfig
    from sglang_batch.srt.engine import in_process

    config = OfflineBatchConfig(policy="dfs")
    server_args = in_process.parse_server_args([f"--model-path={model}", *ARGUMENTS])
    with in_process.engine(server_args) as (engine, loop):
        loop.run_until_complete(engine.connect())

        async def run() -> int:
            await answer_all(engine, config, WARM_UP_PROMPTS, [SHORT] * 4)
            job = answer_all(engine, config, prompts(seed), [LINE] * NUM_LINES)
            return await send_online(engine.manager, asyncio.ensure_future(job))

        return int(loop.run_until_complete(run()))


def engine_main(name: str, model: str, seed: int) -> None:
    from sglang.srt.entrypoints.engine import Engine

    Engine.run_scheduler_process_func = staticmethod(run_scheduler_process)
    run = run_stock if name == ENGINES[0] else run_ours
    if not run(model, seed):
        raise RuntimeError("The job ended before the last online request came.")


# The command --------------------------------------------------------------------------


def waits(name: str, model: Path, seed: int) -> list[int]:
    """Steps that each online request waited.

    Raises:
        RuntimeError: the engine failed, or the job was too short.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        path = Path(scratch) / "waits.csv"
        done = subprocess.run(
            [sys.executable, __file__, "--engine", name, str(model), str(seed)],
            env={**os.environ, PATH_VARIABLE: str(path), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-4000:]}")
        rows = [line.split(",") for line in path.read_text().splitlines()]
    if len(rows) != NUM_ONLINE:
        raise RuntimeError(f"{name}: {len(rows)} of {NUM_ONLINE} requests started.")
    return [int(steps) for _, steps, _ in rows]


def measure_waits(seed: int, repeats: int) -> tuple[dict[str, Any], list[Figure]]:
    """Print the table. Returns the entries of the document, and the figures."""
    taken: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        path = Path(scratch) / "model"
        write_demo_model(path)
        for number in range(repeats):
            for name in ENGINES:
                steps = waits(name, path, seed + number)
                taken.setdefault(name, []).extend(steps)
    print_table(
        f"Steps that an online request waits, {NUM_ONLINE} requests, {repeats} repeats",
        ["engine", "median", "least", "most"],
        [[n, median(t), min(t), max(t)] for n, t in taken.items()],
    )
    stock, ours = (taken[name] for name in ENGINES)
    figures = [
        Figure(
            "online request: most steps it waits", max(ours), target=("<=", MOST_STEPS),
            note=f"stock {max(stock)}",
        )
    ]  # fmt: skip
    return {"steps": taken}, figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flex", action="store_true", help="measure flex calls")
    parser.add_argument("--repeats", type=int, default=3, help="default: 3")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    add_save(parser)
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        name, model, seed = options.engine
        engine_main(name, model, int(seed))
        return 0
    measure = measure_flex if options.flex else measure_waits
    document, figures = measure(options.seed, options.repeats)
    print_figures("Figures", figures)
    finish(
        {**document, "figures": [figure.as_json for figure in figures]}, options.save
    )
    return 1 if any(figure.met is False for figure in figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
