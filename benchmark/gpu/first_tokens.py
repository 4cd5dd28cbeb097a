"""How long online calls wait for their first token, alone and beside a batch.

    python benchmark/gpu/first_tokens.py --engine ours
    python benchmark/gpu/first_tokens.py --demo-model    on any machine
    python benchmark/gpu/first_tokens.py --quick         there, in a few seconds

One engine gets online calls with prompts of 512 tokens, 7.5 a second and then 0.5 a second.
They come twice: to an engine that does nothing else, and beside batches of 500 lines with
prompts and answers of 512 and 200 tokens, one batch after another. The table has p50 and
p95 in milliseconds from the call to its first token, and from each token of the calls to the
next, which is a step. Beside a batch of ours the p95 may be 1.3 times that of the engine alone
and one step more (p95, too), since a call waits for the end of the step that runs when it
comes. The last line is one JSON document; the exit status is 1 if that is missed.

ours: this package, with the policy ``dfs``.
stock: SGLang with ``fcfs``, its default, and ``--enable-mixed-chunk``. Its batches are one
    call of ``generate`` each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_models import write_model
from report import (
    Figure,
    add_save,
    finish,
    print_figures,
    print_table,
    save_as_they_come,
    write_unfinished,
)
from throughput_engine import COUNTS, WARM_UP_PROMPTS, answer_all
from throughput_jobs import NUM_IDS, exactly

from sglang_batch.run.demo_model import write_demo_model

PHASES = ("alone", "beside a batch")
MOST_TIMES_ALONE = 1.3
TIMEOUT_S = 400
ANSWER_TOKENS = 16
SECONDS_UNTIL_BUSY = 2.0


def arguments_of(options: argparse.Namespace, model: Path) -> list[str]:
    arguments = [f"--model-path={model}", "--enable-mixed-chunk", "--log-level=error"]
    if options.demo_model:
        return [
            *arguments, "--dtype=float32", "--mem-fraction-static=0.3",
            "--max-total-tokens=32768", "--max-running-requests=64",
            "--chunked-prefill-size=2048",
        ]  # fmt: skip
    return [
        *arguments, "--dtype=bfloat16", "--load-format=dummy",
        f"--max-total-tokens={options.kv_tokens}", "--max-running-requests=256",
    ]  # fmt: skip


def arrivals(options: argparse.Namespace) -> list[float]:
    """Seconds at which the calls come: the burst, then the calm."""
    burst = np.arange(0, options.burst_s, 1 / options.burst_rate)
    calm = options.burst_s + np.arange(0, options.calm_s, 1 / options.calm_rate)
    times: list[float] = np.concatenate([burst, calm]).tolist()
    return times


# In the process of the engine ---------------------------------------------------------


async def ask(manager: Any, prompt: list[int]) -> list[float]:
    """Milliseconds until the first token of an online call, and from each to the next."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=prompt, sampling_params=exactly(ANSWER_TOKENS), stream=True
    )
    times = [time.perf_counter()]
    async for _ in manager.generate_request(request):
        times.append(time.perf_counter())
    return [1e3 * (end - begin) for begin, end in pairwise(times)]


async def phase(
    manager: Any,
    task: dict[str, Any],
    seed: int,
    run_batch: Callable[[], Awaitable[Any]] | None,
) -> list[list[float]]:
    """The milliseconds of each online call, in the order in which they came."""

    async def batches() -> None:
        while run_batch is not None:
            await run_batch()

    drawn = np.random.default_rng(seed)
    beside = asyncio.ensure_future(batches())
    await asyncio.sleep(SECONDS_UNTIL_BUSY if run_batch else 0)
    begin, calls = time.perf_counter(), []
    for at in task["arrivals"]:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        prompt = drawn.integers(0, NUM_IDS, task["prompt_len"]).tolist()
        calls.append(asyncio.ensure_future(ask(manager, prompt)))
        if run_batch is not None and beside.done():
            beside.result()  # its error
    waited = list(await asyncio.gather(*calls))
    beside.cancel()
    return waited


def prompts_of(task: dict[str, Any]) -> list[list[int]]:
    size = (task["lines"], task["prompt_len"])
    drawn: list[list[int]] = (
        np.random.default_rng(0).integers(0, NUM_IDS, size).tolist()
    )
    return drawn


def engine_main(scratch: Path) -> None:
    """Run both phases of ``scratch/task.json``; ``result.json`` is written after each."""
    task = json.loads((scratch / "task.json").read_text())
    params = [exactly(task["answer_len"])] * task["lines"]
    prompts, short = prompts_of(task), [exactly(4)] * len(WARM_UP_PROMPTS)
    result: dict[str, Any] = {}

    async def measure(manager: Any, batch: Callable[[], Awaitable[Any]]) -> None:
        for seed, name in enumerate(PHASES, 1):
            beside = batch if name == PHASES[1] else None
            times = await phase(manager, task, seed, beside)
            result[name] = [first for first, *_ in times]
            result[f"steps {name}"] = [step for _, *steps in times for step in steps]
            state = (await manager.get_internal_state())[0].get("offline_batch", {})
            result["attention"] = {each: state.get(each, 0) for each in COUNTS}
            part = scratch / "result.part"
            part.write_text(json.dumps(result))
            part.rename(scratch / "result.json")

    if task["ours"]:
        from sglang_batch.config import OfflineBatchConfig
        from sglang_batch.srt.engine import in_process

        config = OfflineBatchConfig(policy="dfs")
        server_args = in_process.parse_server_args(task["arguments"])
        with in_process.engine(server_args) as (ours, loop):
            loop.run_until_complete(ours.connect())
            warm_up = answer_all(ours, config, WARM_UP_PROMPTS, short)
            loop.run_until_complete(warm_up)
            loop.run_until_complete(
                measure(ours.manager, lambda: answer_all(ours, config, prompts, params))
            )
        return
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()  # a plugin makes SGLang run on a CPU
    from sglang.srt.server_args import prepare_server_args

    engine = sglang.Engine(server_args=prepare_server_args(task["arguments"]))
    engine.generate(input_ids=WARM_UP_PROMPTS, sampling_params=exactly(4))
    engine.loop.run_until_complete(
        measure(
            engine.tokenizer_manager,
            lambda: engine.async_generate(input_ids=prompts, sampling_params=params),
        )
    )
    engine.shutdown()


# The command --------------------------------------------------------------------------


def run_engine(task: dict[str, Any], scratch: Path, results: dict[str, Any]) -> None:
    """Start the engine, and keep and print each phase as it ends.

    Raises:
        RuntimeError: the engine failed, or took too long.
    """
    (scratch / "task.json").write_text(json.dumps(task))
    file, deadline = scratch / "result.json", time.monotonic() + TIMEOUT_S
    with (scratch / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--in-engine", str(scratch)],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        while not results.keys() >= set(PHASES):
            time.sleep(0.2)
            found = json.loads(file.read_text()) if file.exists() else {}
            new = [name for name in found if name in PHASES and name not in results]
            results.update(found)
            for name in new:
                print(
                    f"  {name}: p95 {np.percentile(found[name], 95):.1f} ms", flush=True
                )
                write_unfinished()
            late = time.monotonic() > deadline
            if not new and (late or process.poll() is not None):
                tail = (scratch / "engine.log").read_text(errors="replace")[-4000:]
                raise RuntimeError(f"{'no end' if late else 'it ended'}:\n{tail}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("ours", "stock"), default="ours")
    parser.add_argument("--burst-rate", type=float, default=7.5, help="calls a second")
    parser.add_argument("--burst-s", type=float, default=60, help="default: 60")
    parser.add_argument("--calm-rate", type=float, default=0.5, help="calls a second")
    parser.add_argument("--calm-s", type=float, default=30, help="default: 30")
    parser.add_argument(
        "--kv-tokens", type=int, default=160_000, help="KV cache (default: 160000)"
    )
    parser.add_argument("--demo-model", action="store_true", help="on any machine")
    parser.add_argument(
        "--quick", action="store_true", help="the demo model and a few seconds"
    )
    parser.add_argument("--dry-run", action="store_true", help="only check the options")
    parser.add_argument("--in-engine", type=Path, help=argparse.SUPPRESS)
    add_save(parser)
    options = parser.parse_args(argv)
    if options.quick:
        options.burst_s, options.calm_s, options.demo_model = 3.0, 4.0, True
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    if options.in_engine is not None:
        engine_main(options.in_engine)
        return
    task = {
        "ours": options.engine == "ours",
        "arrivals": arrivals(options),
        "prompt_len": 64 if options.quick else 512,
        "lines": 200 if options.quick else 500,
        "answer_len": 200,
    }
    if options.dry_run:
        print(f"{len(arrivals(options))} calls, twice")
        return
    results: dict[str, Any] = {"engine": options.engine}
    save_as_they_come(options.save, results)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        if options.demo_model:
            write_demo_model(model)
        else:
            write_model(model)
        task["arguments"] = arguments_of(options, model)
        run_engine(task, Path(name), results)
    print_table(
        f"{options.engine}: milliseconds to the first token, {len(arrivals(options))}"
        f" calls; {results['attention']['attention_steps_shared']} steps shared prefixes",
        ["", "p50", "p95", "most"],
        [
            [name, *(f"{np.percentile(results[name], q):.1f}" for q in (50, 95, 100))]
            for name in (*PHASES, *(f"steps {name}" for name in PHASES))
        ],
    )
    alone, beside, step = (
        float(np.percentile(results[name], 95))
        for name in (*PHASES, f"steps {PHASES[1]}")
    )
    most = ("<=", MOST_TIMES_ALONE * alone + step)
    figure = Figure(
        "p95 of first tokens beside a batch",
        beside,
        "ms",
        most if task["ours"] else None,
    )
    print_figures("first tokens", [figure])
    missed = [figure.name] if figure.met is False else []
    for name in PHASES:  # tens of thousands
        del results[f"steps {name}"]
    results |= {"figures": [figure.as_json], "missed": missed}
    finish(results, options.save)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
