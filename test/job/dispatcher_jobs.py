"""Jobs with visible order, windows and plans."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from builders import Answers, make_machine, make_request, run
from fake_engine import FakeEngine
from plan_leaves import leaves_of

from sglang_batch.config import AUTO, OfflineBatchConfig
from sglang_batch.job.job import Job
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.planner.machine_model import Machine
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.plan import Candidates, best, orders_for
from sglang_batch.planner.requests import LEFT, RIGHT, UNKNOWN, Int64s, PlanRequests
from sglang_batch.request import BatchRequestInput, RequestOutput
from sglang_batch.scheduling.job_plan import JobPlan

DUAL = "dual-scan"


class Engine(FakeEngine):
    """Keeps every plan it was told of, and can be slow or broken when it is told."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.openings: list[list[JobPlan]] = []
        self.slow: dict[int, asyncio.Event] = {}
        self.broken: dict[int, Exception] = {}
        self.routed: dict[str, int | None] = {}

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        nth = len(self.openings)
        self.openings.append(list(plans))
        self._note()
        if nth in self.slow:
            await self.slow[nth].wait()
        if nth in self.broken:
            raise self.broken[nth]
        await super().open_job(job_id, plans)

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        self.routed[prepared.custom_id] = replica
        return await super().execute(prepared, replica)

    def side(self, custom_id: str) -> int:
        plan = self.openings[-1][0]
        position = plan.position[leaves_of(plan)[number_of(custom_id)]]
        return RIGHT if plan.density is not None and position >= plan.num_left else LEFT

    def running_on(self, side: int) -> list[str]:
        return [each for each in self.running if self.side(each) == side]


def number_of(custom_id: str) -> int:
    return int(custom_id[1:])


def unknown(count: int, *, longest: int = 40) -> list[BatchRequestInput]:
    """Requests of unknown output length. Answers are as long as their prompts."""
    return [
        make_request(i, f"{i} {i % 7} {'y' * (i * 11 % longest)}") for i in range(count)
    ]


def two_kinds(count: int, *, known: bool = True) -> list[BatchRequestInput]:
    """Every second one long and answered at once, the others short with long answers."""
    requests = []
    for i in range(count):
        text = f"{i} " + "x" * 3000 if i % 2 else f"short {i}"
        most = 1 if i % 2 else 900
        requests.append(make_request(i, text, max_tokens=most, ignore_eos=known))
    return requests


def make_job(
    engine: FakeEngine,
    answers: Any,
    requests: Sequence[BatchRequestInput],
    *,
    policy: str = DUAL,
    render_lookahead: int = 1,
    **config: Any,
) -> Job:
    settings = OfflineBatchConfig(
        policy=policy, render_lookahead=render_lookahead, **config
    )
    return Job("batch_1", requests, range(len(requests)), engine, settings, answers)


def run_job(
    engine: FakeEngine, requests: Sequence[BatchRequestInput], **config: Any
) -> Answers:
    answers = Answers()
    run(make_job(engine, answers, requests, **config).run())
    assert len(answers) == len(requests)
    return answers


async def settle() -> None:
    """Let everything that can happen now happen."""
    for _ in range(30):
        await asyncio.sleep(0)


async def until_planned(engine: Engine, count: int) -> None:
    """Wait until ``count`` plans are made, in threads, and in use."""
    await engine.until(lambda: len(engine.openings) == count)
    await settle()


def everything(requests: Sequence[BatchRequestInput]) -> list[str]:
    return [request.custom_id for request in requests]


def prompts_of(requests: Sequence[BatchRequestInput]) -> list[bytes]:
    return [
        json.loads(request.body)["messages"][0]["content"].encode()
        for request in requests
    ]


def plan_requests(requests: Sequence[BatchRequestInput]) -> PlanRequests:
    """The requests as the fake engine renders them."""
    prompts, most, known = prompts_of(requests), [], []
    for request in requests:
        body = json.loads(request.body)
        most.append(body.get("max_tokens", 1 << 24))
        known.append(most[-1] if body.get("ignore_eos") else UNKNOWN)
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in prompts])])
    return PlanRequests(
        np.array([t for p in prompts for t in p], np.int32),
        offsets.astype(np.int64),
        np.array(most, np.int32),
        np.array(known, np.int32),
    )


def sent_order(
    requests: Sequence[BatchRequestInput], machine: Machine, policy: str
) -> Int64s:
    """Numbers of the requests in the order in which they enter the engine."""
    job = Candidates(plan_requests(requests), machine, OrderSettings())
    if policy == AUTO:
        orders = orders_for(machine)
        policy = best({name: job.run(name) for name in orders})
    order = job.order(policy)
    return job.run(policy).admission_order if order.is_dynamic else order.requests


def planner_of(
    requests: Sequence[BatchRequestInput],
    policy: str = DUAL,
    num_shards: int = 1,
    **limits: Any,
) -> JobPlanner:
    return JobPlanner(
        plan_requests(requests),
        np.arange(len(requests)),
        make_machine(**limits),
        OfflineBatchConfig(policy=policy),
        num_shards,
    )
