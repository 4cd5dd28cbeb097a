"""Jobs on an engine and in the simulator; ``main`` prints the totals of both as JSON.

Its arguments are JSON, pairs of a job's name and a policy and the ``row_share`` that they are
planned with, and those of the server.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from paused_starts import run_all_at_once
from step_jobs import MORE_JOBS, plan_requests

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.job import Job
from sglang_batch.planner.machine_model import Machine
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.plan import Candidates
from sglang_batch.request import BatchRequestInput, named_job_id
from sglang_batch.srt.engine import in_process


def request(index: int, prompt: list[int], length: int) -> BatchRequestInput:
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling})
    return BatchRequestInput(index, f"r{index}", "/generate", body.encode())


# Of which the simulator knows the first four.
# What the simulator is compared with must not depend on how fast steps are here.
ARGUMENTS = ["--offline-batch-config", '{"learn_costs": false}']
COUNTS = (
    "steps", "cached_tokens", "decode_tokens", "offloaded",
    "offload_recomputed", "resumed", "prefetched", "kv_waits",
)  # fmt: skip


async def totals(manager: Any) -> dict[str, int]:
    state = (await manager.get_internal_state())[0]["offline_batch"]
    return {name: state[name] for name in COUNTS}


async def run(engine: Any, name: str, rows: Any, policy: str) -> dict[str, int]:
    """The totals of one job. Its steps start when all of its requests are there:
    how fast they arrive is up to the machine."""
    manager = engine.manager
    requests = [request(i, *row) for i, row in enumerate(rows)]
    config = OfflineBatchConfig(policy=policy, max_inflight=len(requests))
    answers = []
    job = Job(
        named_job_id(f"{name} {policy}"),
        requests,
        range(len(requests)),
        engine,
        config,
        lambda request, output: answers.append(output.ok),
    )
    before = await totals(manager)
    await run_all_at_once(job, len(requests), manager)
    after = await totals(manager)
    assert answers == [True] * len(requests)
    await manager.flush_cache()
    return {name: after[name] - before[name] for name in COUNTS}


def simulated(machine: Machine, rows: Any, policy: str) -> dict[str, int]:
    machine = Machine(machine.cost, replace(machine.limits, as_sglang=True))
    job = Candidates(plan_requests(rows), machine, OrderSettings())
    done = job.run(policy)
    decoded = done.output_tokens - len(rows)
    moved = done.retractions + done.parked
    counts = done.num_steps, done.cached_tokens, decoded, moved
    return dict(zip(COUNTS, counts, strict=False))


def main() -> None:
    cases, row_share = json.loads(sys.argv[1])
    found = {}
    with in_process.engine(in_process.parse_server_args(ARGUMENTS + sys.argv[2:])) as (
        engine,
        loop,
    ):
        loop.run_until_complete(engine.connect())
        machine = engine.machine
        cost = replace(machine.cost, row_share=row_share)
        engine.learnt.machine = replace(machine, cost=cost)
        for name, policy in cases:
            rows = MORE_JOBS[name]()
            real = loop.run_until_complete(run(engine, name, rows, policy))
            predicted = simulated(engine.machine, rows, policy)
            found[f"{name}, {policy}"] = {"real": real, "simulated": predicted}
    print(json.dumps(found))
