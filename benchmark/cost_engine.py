"""One job on one engine: its seconds as predicted, and as measured.

    python benchmark/cost_engine.py TASK

TASK is a file of JSON: the model, the arguments of the server, the policy, and the job's prompts,
sampling parameters and output lengths. The engine plans with the costs that are kept for it.
Prints one line of JSON.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
from report import paths_given
from throughput_engine import WARM_UP_PROMPTS, answer_all, num_steps

from sglang_batch.planner.costs.cost_model import NO_EXTRAS
from sglang_batch.planner.machine_model import Machine
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.planner.simulator.simulator import Simulation
from sglang_batch.prediction.report import forecast

# Share of the answers that a plan knows of, over a job: the first plan has a sample of 1 %, and
# each later one twice the answers of the last, from 64 on.
_KNOWN = 0.25


def main() -> None:
    [path] = paths_given(__doc__, "TASK")
    task = json.loads(path.read_text())
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
        before = num_steps(loop, engine)
        measured = run(task["prompts"], task["sampling_params"])
        steps = num_steps(loop, engine) - before
    print(
        json.dumps(
            {
                "predicted_s": predicted.seconds,
                "predicted_steps": predicted.num_steps,
                "measured_s": measured,
                "measured_steps": steps,
                "timed": machine.cost.extras != NO_EXTRAS,
            }
        )
    )


def predict(task: dict[str, Any], machine: Machine) -> Simulation:
    """The simulated job: its order by the engine's knowledge of the answers' lengths, its
    steps by the true ones."""
    prompts = task["prompts"]
    output_len = np.array(task["output_lens"], np.int32)
    params = task["sampling_params"]
    known = np.array([bool(each.get("ignore_eos")) for each in params])
    requests = PlanRequests(
        np.concatenate(prompts).astype(np.int32),
        np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        np.array([each["max_new_tokens"] for each in params], np.int32),
        np.where(known, output_len, UNKNOWN).astype(np.int32),
    )
    policy = task["policy"]
    found = forecast(
        requests,
        machine,
        [policy],
        OrderSettings(),
        true_output_len=output_len,
        sample_share=0.0 if known.all() else _KNOWN,
    )
    return found.runs[policy]


if __name__ == "__main__":
    main()
