"""Every policy's plan is the order in which real SGLang gets the requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from servers import SERVER_ARGS

from sglang_batch.config import POLICIES

RUN_EVERY_POLICY = """
import json, sys
from builders import CHAT, make_body
from sglang_batch.config import POLICIES, OfflineBatchConfig
from sglang_batch.job import Job
from sglang_batch.request import BatchRequestInput
from sglang_batch.srt import launch

TEXTS = [f"document {i % 4} {'x' * 40 * (i % 4)} question {i}" for i in range(24)]


class Recorder:
    '''The engine, noting what it is sent and in which order.'''

    def __init__(self, engine):
        self._engine = engine
        self.sent = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def execute(self, prepared):
        self.sent.append(int(prepared.rid.rpartition("-")[2]))
        return await self._engine.execute(prepared)


def main():
    plans = []

    make_plans = Job._plans

    def planned(self, *args):
        shards, for_scheduler = make_plans(self, *args)
        plans.append(shards[0].plan)
        return shards, for_scheduler

    Job._plans = planned
    found = {}
    args = launch.parse_server_args(sys.argv[1:])
    with launch.engine(args) as (engine, loop):
        loop.run_until_complete(engine.connect())
        for policy in POLICIES:
            recorder, answers = Recorder(engine), []
            requests = [
                BatchRequestInput(
                    i, f"r{i}", CHAT,
                    json.dumps(make_body(text, max_tokens=1 + i * 7 % 5)).encode(),
                )
                for i, text in enumerate(TEXTS)
            ]
            config = OfflineBatchConfig(policy=policy, seed=3, max_inflight=2)
            job = Job(
                "batch_" + policy, requests, range(len(TEXTS)), recorder, config,
                lambda request, output: answers.append(output.ok),
            )
            loop.run_until_complete(job.run())
            plan = plans.pop() if plans else None
            found[policy] = {
                "sent": recorder.sent,
                "ok": sum(answers),
                "plan": plan and plan.order.tolist(),
                "chosen": plan and plan.policy,
            }
        print(json.dumps({"capacity": engine.machine.limits.kv_capacity_tokens,
                          "runs": found}))


if __name__ == "__main__":
    main()
"""


def test_the_order_sent_is_that_of_the_plan(demo_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "policies.py"
    script.write_text(RUN_EVERY_POLICY)
    done = subprocess.run(
        [
            sys.executable, str(script), "--model-path", str(demo_model),
            *SERVER_ARGS,
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["capacity"] > 1000
    runs = found["runs"]
    assert list(runs) == list(POLICIES)
    for policy, run in runs.items():
        assert run["ok"] == 24, policy
        assert sorted(run["sent"]) == list(range(24)), policy
        if policy == "fcfs":
            assert run["sent"] == list(range(24))
        else:
            # What is taken from both ends is sent from both ends.
            if run["chosen"] != "dual-scan":
                assert run["sent"] == run["plan"], policy
            assert run["chosen"] == policy or policy == "auto"
    orders = {tuple(run["sent"]) for run in runs.values()}
    assert len(orders) >= 6  # on so small a job some agree
