"""The simulator takes as many steps as the real engine, and finds as much cached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import SERVER_ARGS
from step_jobs import JOBS

POLICIES = ("dfs", "prefix-groups", "dual-scan")
TOLERANCE = 0.02

RUN_AND_SIMULATE = """
import asyncio, json, sys
from dataclasses import replace
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput, PauseGenerationReqInput,
)
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job import Job
from sglang_batch.planner.candidates import Candidates, Machine
from sglang_batch.planner.order import OrderSettings
from sglang_batch.request import BatchRequestInput
from sglang_batch.srt import launch
from step_jobs import JOBS, plan_requests


def request(index, prompt, length):
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling})
    return BatchRequestInput(index, f"r{index}", "/generate", body.encode())


async def totals(manager):
    state = (await manager.get_internal_state())[0]["offline_batch"]
    return state["steps"], state["cached_tokens"], state["decode_tokens"]


async def run(engine, name, rows, policy):
    '''The totals of one job. Its steps start when all of its requests are there:
    how fast they arrive is up to the machine.'''
    manager = engine._tokenizer_manager
    requests = [request(i, *row) for i, row in enumerate(rows)]
    config = OfflineBatchConfig(policy=policy, max_inflight=len(requests))
    answers = []
    job = Job(
        f"batch_{name.replace(' ', '_')}_{policy}", requests, range(len(requests)),
        engine, config, lambda request, output: answers.append(output.ok),
    )
    before = await totals(manager)
    # Past the tokenizer manager, which would hold requests back, too.
    manager._dispatch_to_scheduler(PauseGenerationReqInput(mode="in_place"))
    running = asyncio.ensure_future(job.run())
    while len(manager.rid_to_state) < len(requests) and not running.done():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    manager._dispatch_to_scheduler(ContinueGenerationReqInput())
    await running
    after = await totals(manager)
    assert answers == [True] * len(requests)
    await manager.flush_cache()
    return [y - x for x, y in zip(before, after)]


def simulated(machine, rows, policy):
    machine = Machine(machine.cost, replace(machine.limits, as_sglang=True))
    job = Candidates(plan_requests(rows), machine, OrderSettings())
    done = job.run(policy).simulation
    return [done.num_steps, done.cached_tokens, done.output_tokens - len(rows)]


def main():
    policies = json.loads(sys.argv[1])
    found = {}
    with launch.engine(launch.parse_server_args(sys.argv[2:])) as (engine, loop):
        loop.run_until_complete(engine.connect())
        for name, make in JOBS.items():
            for policy in policies:
                rows = make()
                real = loop.run_until_complete(run(engine, name, rows, policy))
                predicted = simulated(engine.machine, rows, policy)
                found[f"{name}, {policy}"] = {"real": real, "simulated": predicted}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def counts(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[int]]]:
    """Steps, cached tokens and decode tokens by case; one engine for all of them."""
    script = tmp_path_factory.mktemp("steps") / "steps.py"
    script.write_text(RUN_AND_SIMULATE)
    here = Path(__file__).parent
    server_args = [arg for arg in SERVER_ARGS if "max-total-tokens" not in arg]
    done = subprocess.run(
        [
            sys.executable, str(script), json.dumps(POLICIES),
            "--model-path", str(demo_model), *server_args, "--max-total-tokens=6144",
            "--chunked-prefill-size=512", "--max-running-requests=40",
            # As on a GPU, which the simulator models.
            "--enable-mixed-chunk",
        ],
        env={**os.environ, "PYTHONPATH": f"{here}:{here.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("job", JOBS)
def test_steps_and_cached_tokens_are_as_simulated(
    counts: dict[str, dict[str, list[int]]], job: str, policy: str
) -> None:
    case = counts[f"{job}, {policy}"]
    steps, cached, decoded = case["real"]
    assert steps > 50
    assert cached > 10_000
    assert case["simulated"][0] == pytest.approx(steps, rel=TOLERANCE)
    assert case["simulated"][1] == pytest.approx(cached, rel=TOLERANCE)
    # The first token of an answer comes with its prompt.
    assert case["simulated"][2] == decoded
