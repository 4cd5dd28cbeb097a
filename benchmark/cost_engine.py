"""One job on one engine: its seconds as predicted, and as measured.

    python benchmark/cost_engine.py TASK

TASK is a file of JSON: the model, the arguments of the server, the policy, and the job's prompts,
sampling parameters and output lengths. The engine plans with the costs that are kept for it.
Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from throughput_engine import WARM_UP_PROMPTS, answer_all

from sglang_batch.planner.lengths.length_sample import choose_sample
from sglang_batch.planner.machine_model import Machine
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.prediction.forecast import Lengths, forecast


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    from sglang_batch.config import OfflineBatchConfig
    from sglang_batch.srt.engine import in_process

    config = OfflineBatchConfig(policy=task["policy"])
    server_args = in_process.parse_server_args(
        [*task["arguments"], "--log-level=error"]
    )
    with in_process.engine(server_args) as (engine, loop):
        loop.run_until_complete(engine.connect())
        machine = engine.machine

        def run(prompts: list[list[int]], params: list[dict[str, Any]]) -> float:
            begin = time.perf_counter()
            loop.run_until_complete(answer_all(engine, config, prompts, params))
            return time.perf_counter() - begin

        short = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        run(WARM_UP_PROMPTS, [short] * len(WARM_UP_PROMPTS))
        seconds, steps = predict(task, machine)
        measured = run(task["prompts"], task["sampling_params"])
    print(
        json.dumps(
            {
                "predicted_s": seconds,
                "predicted_steps": steps,
                "measured_s": measured,
                "timed": machine.cost.extras != type(machine.cost.extras)(),
            }
        )
    )


def predict(task: dict[str, Any], machine: Machine) -> tuple[float, int]:
    """Seconds and steps of the simulated job.

    Its order is made with what the engine may know of the answers' lengths, and its steps have
    the true ones. Requests of unknown length begin with a sample, as in an engine, which holds
    back until it knows their answers.
    """
    prompts = task["prompts"]
    output_len = np.array(task["output_lens"], np.int32)
    known = [bool(params.get("ignore_eos")) for params in task["sampling_params"]]
    requests = PlanRequests(
        np.concatenate(prompts).astype(np.int32),
        np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        np.array(
            [params["max_new_tokens"] for params in task["sampling_params"]], np.int32
        ),
        np.where(known, output_len, UNKNOWN).astype(np.int32),
    )
    settings = OrderSettings()
    sample = np.zeros(0, np.int64)
    if not all(known):
        tree = build_prefix_tree(requests.tokens, requests.offsets)
        sample = choose_sample(tree, requests, seed=settings.seed)
    rest = np.setdiff1d(np.arange(len(requests)), sample)
    seconds, steps = 0.0, 0
    for part, share in ((sample, 0.0), (rest, 0.0 if all(known) else 0.01)):
        if len(part):
            found = forecast(
                requests.take(part),
                machine,
                [task["policy"]],
                Lengths(true=output_len[part], sample_share=share),
                settings,
            )
            run = found.runs[task["policy"]].simulation
            seconds += run.seconds
            steps += run.num_steps
    return seconds, steps


if __name__ == "__main__":
    main()
