"""The setting ``max_wait_steps`` on its way to those who decide who joins."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scheduling_jobs import MACHINE, arrive, plan_of

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.requests import PlanRequests
from sglang_batch.scheduling.job_plan import JobPlan
from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.kv_accounting import KvAccounting
from sglang_batch.scheduling.length_backlog import LengthBacklogs

POLICIES = pytest.mark.parametrize("policy", ["length-tree", "length-aligned"])
SHORT, LONG, STEPS = 10, 300, 8


def requests_of(num_short: int) -> PlanRequests:
    """Many short prompts, and the last is a long one."""
    lengths = np.array([*[SHORT] * num_short, LONG])
    tokens = np.arange(lengths.sum(), dtype=np.int32)
    n = len(lengths)
    steps = np.full(n, STEPS, np.int32)
    offsets = np.cumsum([0, *lengths.tolist()], dtype=np.int64)
    return PlanRequests(tokens, offsets, steps, steps)


def scheduled(config: OfflineBatchConfig) -> JobState:
    """The job as the scheduler has it, after its plan has been sent there."""
    requests = requests_of(200)
    (planned,) = JobPlanner(requests, np.arange(len(requests)), MACHINE, config).plans()
    plan = JobPlan.from_bytes(planned.for_scheduler(MACHINE).to_bytes())
    return JobState("job", plan, 1, LengthBacklogs(KvAccounting(2000)))


@POLICIES
@pytest.mark.parametrize(("limit", "joins_at"), [(None, -1), (70, 71), (90, 91)])
def test_a_scheduler_lets_one_join_that_waited_too_long(
    policy: str, limit: int | None, joins_at: int
) -> None:
    """In each step a short request comes and one joins. Sixty wait before it."""
    job = scheduled(OfflineBatchConfig(policy=policy, max_wait_steps=limit))
    long, found = arrive(job, 200), -1
    running = []
    for number in range(60):
        arrive(job, number)
    for step in range(99):
        arrive(job, 60 + step)
        request = job.backlog.first()
        assert request is not None
        if request is long:
            found = step
            break
        job.backlog.join(request)
        running.append(request)
        if len(running) > 3:
            job.backlog.left(running.pop(0))
        job.backlog.tick()
    assert found == joins_at


@pytest.mark.parametrize("value", [0, -1, 1.5, "9", True])
def test_what_is_no_number_of_steps_is_refused(value: object) -> None:
    text = json.dumps({"max_wait_steps": value})
    with pytest.raises(ConfigError, match=r"max_wait_steps=.* a whole number of 1 or"):
        OfflineBatchConfig.from_json(text)
    if value in (0, -1):
        with pytest.raises(ConfigError, match="must be 1 or more"):
            OrderSettings(max_wait_steps=int(str(value)))


def test_it_may_be_larger_than_any_count() -> None:
    config = OfflineBatchConfig(policy="length-tree", max_wait_steps=1 << 70)
    job = scheduled(config)
    request = arrive(job, 0)
    assert job.backlog.first() is request
    assert plan_of([(1,)]).max_wait_steps is None
