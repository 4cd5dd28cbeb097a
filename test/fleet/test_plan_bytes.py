"""Plans and machines travel as bytes that cannot call anything."""

from __future__ import annotations

import os
import pickle
import zlib

import numpy as np
import pytest
from builders import make_machine

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import InputError
from sglang_batch.fleet import plan_bytes
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.policies import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_of_each_policy_arrives_as_it_was(policy: str) -> None:
    prompts = [[1, 2, 3, i % 4, i] for i in range(40)]
    requests = PlanRequests(
        np.concatenate([np.array(p, np.int32) for p in prompts]),
        np.arange(0, 201, 5),
        np.full(40, 16, np.int32),
        np.full(40, UNKNOWN, np.int32),
    )
    machine = make_machine()
    planner = JobPlanner(
        requests, np.arange(40), machine, OfflineBatchConfig(policy=policy)
    )
    plan = planner.plans()[0].for_scheduler(machine)
    found = plan_bytes.plan_of(plan_bytes.to_bytes(plan))
    assert found.same_requests(plan)
    assert pickle.dumps(found) == pickle.dumps(plan)


def test_a_machine_arrives_as_it_was() -> None:
    machine = make_machine()
    assert plan_bytes.machine_of(plan_bytes.to_bytes(machine)) == machine


class _Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/attacked",)


@pytest.mark.parametrize(
    "value",
    [_Attack(), print, os.system, plan_bytes.to_bytes, np.load, InputError("x"), 7],
    ids=["attack", "print", "system", "ours", "numpy", "error", "number"],
)
def test_bytes_that_are_no_plan_are_refused(value: object) -> None:
    data = zlib.compress(pickle.dumps(value))
    with pytest.raises(InputError):
        plan_bytes.plan_of(data)


@pytest.mark.parametrize("data", [b"", b"plan", zlib.compress(b"plan")])
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        plan_bytes.plan_of(data)
