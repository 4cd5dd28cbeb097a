"""Jobs without requests, or with none that fits into the KV cache, in every entry point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sglang_batch.config import AUTO, POLICIES, OfflineBatchConfig
from sglang_batch.errors import InputError
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.job.job_shards import JobProgress
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.plan import Candidates
from sglang_batch.planner.prefixes.bucket_splitters import (
    buckets_of,
    choose_splitters,
    sample_numbers,
)
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.planner.sharding.speeds import ShardSpeeds
from sglang_batch.prediction.report import forecast

CAPACITY = 64
ORDERS = [policy for policy in POLICIES if policy != AUTO]
# The lengths of prompts: none at all, and each larger than the KV cache.
JOBS = {"empty": [], "one too large": [100], "all too large": [100, 200, 100]}


def requests_of(lengths: list[int]) -> PlanRequests:
    n = len(lengths)
    return PlanRequests(
        np.arange(sum(lengths), dtype=np.int32),
        np.cumsum([0, *lengths]).astype(np.int64),
        np.full(n, 9, np.int32),
        np.full(n, UNKNOWN, np.int32),
    )


def machine() -> Machine:
    cost = CostModel(token_time_s=1e-4, kv_read_time_s=1e-7)
    return Machine(cost, EngineLimits(CAPACITY))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("job", JOBS)
def test_a_job_of_nothing_is_planned_and_observed(
    job: str, policy: str, shards: int
) -> None:
    n = len(JOBS[job])
    config = replace(OfflineBatchConfig(), policy=policy)
    progress = JobProgress(np.full(n, -1), np.zeros(n, np.bool_), np.ones(n), True)
    planner = JobPlanner(
        requests_of(JOBS[job]), np.arange(n), machine(), config, shards, progress
    )
    answers: list[Any] = [
        (np.arange(n), np.full(n, length, np.int32)) for length in (-1, 5, 9)
    ]
    planner.observed_before(answers[:1], np.ones(n, np.bool_))
    for speeds in (None, ShardSpeeds.equal(shards), ShardSpeeds.equal(shards + 1)):
        plans = planner.plans(progress, speeds)
        parts = [part for plan in plans for part in (*plan.sides, plan.too_large)]
        placed = [number for part in parts for number in part.tolist()]
        assert sorted(placed) == list(range(n))
        for numbers, lengths in answers:
            planner.observe(numbers, lengths)


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("job", JOBS)
def test_an_order_of_nothing(job: str, policy: str) -> None:
    requests = requests_of(JOBS[job])
    found = Candidates(requests, machine(), OrderSettings())
    assert len(found.too_large) == len(requests)
    assert not len(found.order(policy).requests)
    assert not len(found.run(policy).admission_order)


def test_a_forecast_of_nothing() -> None:
    settings = OrderSettings(seed=0)
    for share in (0.0, 0.5):
        found = forecast(
            requests_of([]), machine(), ORDERS, settings,
            true_output_len=np.zeros(0, np.int32), sample_share=share,
        )  # fmt: skip
        assert {run.seconds for run in found.runs.values()} == {0.0}
        assert found.best_of(ORDERS) in ORDERS
    for job in ("one too large", "all too large"):
        with pytest.raises(InputError, match="No request fits"):
            forecast(requests_of(JOBS[job]), machine(), ORDERS, settings)


@pytest.mark.parametrize("num_buckets", [1, 4])
def test_buckets_of_nothing(num_buckets: int) -> None:
    empty = requests_of([])
    assert not len(sample_numbers(0, num_buckets, 0))
    splitters = choose_splitters(empty.tokens, empty.offsets, num_buckets)
    assert splitters.num_buckets == 1
    assert not len(buckets_of(empty.tokens, empty.offsets, splitters))
