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
from throughput_jobs import tree_of

from sglang_batch.planner.machine_model import Machine
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.ordering.order_functions import make_order
from sglang_batch.planner.requests import PlanRequests
from sglang_batch.planner.simulator.simulator import Simulation, simulate


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
        predicted = predict(task, machine)
        measured = run(task["prompts"], task["sampling_params"])
    print(
        json.dumps(
            {
                "predicted_s": predicted.seconds,
                "predicted_steps": predicted.num_steps,
                "measured_s": measured,
                "timed": machine.cost.extras != type(machine.cost.extras)(),
            }
        )
    )


def predict(task: dict[str, Any], machine: Machine) -> Simulation:
    """The simulated run of the job, with its real output lengths."""
    prompts = task["prompts"]
    output_len = np.array(task["output_lens"], np.int32)
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    most = [params["max_new_tokens"] for params in task["sampling_params"]]
    requests = PlanRequests(
        np.concatenate(prompts).astype(np.int32),
        offsets,
        np.array(most, np.int32),
        output_len,
    )
    tree = tree_of(prompts)
    lengths = output_len.astype(np.float64)
    order = make_order(
        task["policy"],
        tree,
        requests,
        machine.cost,
        lengths,
        lengths**2,
        OrderSettings(),
        machine.limits.kv_capacity_tokens,
    )
    return simulate(
        tree,
        machine.cost,
        machine.limits,
        order=order.requests,
        output_len=output_len,
        max_new_tokens=requests.max_new_tokens,
        density=order.density,
        num_left=order.num_left,
    )


if __name__ == "__main__":
    main()
