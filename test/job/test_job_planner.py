"""A job's plan is the planner's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import make_machine, make_request
from dispatcher_jobs import plan_requests, planner_of, two_kinds, unknown

from sglang_batch.config import DENSE_ORDERS, POLICIES, OfflineBatchConfig
from sglang_batch.job import job_planner
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.job.job_shards import JobProgress, ShardPlan
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.output_lengths.estimates import Observed
from sglang_batch.planner.plan import Candidates, best, orders_for
from sglang_batch.planner.sharding.speeds import ShardSpeeds

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [unknown, two_kinds])
@pytest.mark.parametrize("observed", [False, True])
def test_a_job_is_planned_as_the_planner_does(
    policy: str, kind: Any, observed: bool
) -> None:
    requests = kind(50)  # too few for a sample
    planner = planner_of(requests, policy)
    answers = None
    if observed:
        numbers = np.arange(0, 50, 2)
        answers = Observed(numbers, np.full(25, 17, np.int32))
        planner.observe(numbers, answers.output_len)
    (found,) = planner.plans()
    # Without answers, auto takes an order that is good for other lengths, too.
    is_guess = policy == "auto" and kind is unknown and not observed
    machine = make_machine()
    expected = Candidates(
        plan_requests(requests), machine, OrderSettings(), observed=answers
    )
    if policy == "auto":
        runs = {name: expected.run(name) for name in orders_for(machine)}
        policy = found.plan.policy if is_guess else best(runs)
    order = expected.order(policy)
    assert found.plan.policy == policy
    assert np.array_equal(found.plan.scan.requests, order.requests)
    assert found.plan.scan.num_left == order.num_left
    assert np.array_equal(
        found.plan.estimates.est_output_len, expected.estimates.est_output_len
    )
    left, right = found.sides
    assert sorted([*left, *right]) == list(range(50))


def test_dense_batches_have_orders_of_their_own() -> None:
    (plan,) = planner_of(two_kinds(50), "auto", dense=True).plans()
    assert plan.plan.policy in DENSE_ORDERS
    planner = planner_of(unknown(200), "auto", dense=True)
    assert planner.plans()[0].plan.policy == "aligned"
    planner.observe(planner.sample, np.full(len(planner.sample), 5, np.int32))
    assert planner.plans()[0].plan.policy in DENSE_ORDERS
    (plan,) = planner_of(two_kinds(50), "fcfs", dense=True).plans()
    assert plan.plan.policy == "fcfs"


def test_answers_of_several_sequences_teach_nothing() -> None:
    requests = [make_request(i, f"prompt {i}", max_tokens=10) for i in range(100)]
    planner = planner_of(requests)
    before = planner.plans()[0].plan.estimates.est_output_len.max()
    planner.observe(np.arange(100), np.full(100, 40, np.int32))
    assert planner.plans()[0].plan.estimates.est_output_len.max() == before == 3
    planner.observe(np.arange(100), np.full(100, 4, np.int32))
    assert planner.plans()[0].plan.estimates.est_output_len.max() == 4


def test_sides_are_guessed_only_where_most_lengths_are_known() -> None:
    planner = planner_of(unknown(200), "dual-scan")
    assert len(planner.sample)
    (first,) = planner.plans()
    assert not first.both_ends
    sent, _ = first.sides
    assert set(sent[: len(planner.sample)]) == set(planner.sample)
    planner.observe(planner.sample, np.full(len(planner.sample), 5, np.int32))
    assert planner.plans()[0].both_ends
    # All lengths of these are known.
    assert planner_of(two_kinds(200), "dual-scan").plans()[0].both_ends


def speeds(*each: float) -> ShardSpeeds:
    return ShardSpeeds(np.array(each), np.array(each))


def planner_for(of: ShardSpeeds, num_too_large: int = 0) -> JobPlanner:
    """Of 60 requests that fit and others that do not, for as many replicas."""
    machine = make_machine()
    long = "x" * machine.limits.kv_capacity_tokens
    requests = plan_requests(
        [
            *(make_request(i, f"{i} prompt", max_tokens=10) for i in range(60)),
            *(make_request(60 + i, long, max_tokens=10) for i in range(num_too_large)),
        ]
    )
    n = len(requests)
    config = OfflineBatchConfig(policy="dfs")
    return JobPlanner(requests, np.arange(n), machine, config, len(of), None, of)


def replica_of(plans: list[ShardPlan], num_requests: int) -> np.ndarray:
    found = np.full(num_requests, -1, np.int32)
    for replica, plan in enumerate(plans):
        numbers = np.concatenate([plan.numbers, plan.too_large])
        assert (found[numbers] == -1).all(), "each is in one plan"
        found[numbers] = replica
    assert (found >= 0).all()
    return found


def test_replicas_have_plans_by_their_speed() -> None:
    planner = planner_for(speeds(2.0, 0.0, 1.0))
    counts = np.bincount(replica_of(planner.plans(), 60), minlength=3)
    assert counts[1] == 0
    assert counts[0] == pytest.approx(40, abs=2)


def test_replicas_that_leave_and_join_while_the_job_runs() -> None:
    planner = planner_for(ShardSpeeds.equal(2))
    of = replica_of(planner.plans(), 60)
    sent = np.flatnonzero(of == 0)[:3]
    stays, left = np.zeros(60, np.bool_), np.ones(60)
    stays[sent], left[sent] = True, 0.5
    plans = planner.plans(JobProgress(of, stays, left, True), speeds(0.0, 1.0, 1.0))
    after = replica_of(plans, 60)
    assert np.array_equal(np.flatnonzero(after == 0), sent)
    assert np.bincount(after)[1:] == pytest.approx(57 / 2, abs=2)
    # The same replicas as before.
    progress = JobProgress(after, stays, left, True)
    assert np.array_equal(replica_of(planner.plans(progress), 60), after)


def test_other_speeds_move_requests_that_may_all_move() -> None:
    planner = planner_for(ShardSpeeds.equal(2))
    planner.plans()
    counts = np.bincount(replica_of(planner.plans(speeds=speeds(3.0, 1.0)), 60))
    assert counts[0] == pytest.approx(45, abs=2)


def test_requests_that_are_too_large_go_to_replicas_that_are_there() -> None:
    plans = planner_for(speeds(1.0, 0.0, 1.0), num_too_large=5).plans()
    assert [len(plan.too_large) for plan in plans] == [3, 0, 2]
    replica_of(plans, 65)
    plans = planner_for(speeds(0.0, 0.0), num_too_large=5).plans()
    assert [len(plan.too_large) for plan in plans] == [3, 2]


@pytest.mark.parametrize("large", [False, True])
def test_auto_chooses_again_with_answers_after_the_requests_that_have_begun(
    monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    chosen: list[tuple[Any, ...]] = []
    wanted = iter(["lpt", "dual-scan", "dfs"])

    def choose(orders: Any, draws: Any, run: Any, present: str | None) -> str:
        chosen.append((orders, len(list(draws)), present))
        return next(wanted)

    monkeypatch.setattr(job_planner, "choose", choose)
    monkeypatch.setattr(job_planner, "_MOST_DRAWN", 199 if large else 400)
    n = 200
    planner = planner_of(unknown(n), "auto")
    assert planner.plans()[0].plan.policy == "dfs"
    planner.observe(planner.sample, np.full(len(planner.sample), 5, np.int32))
    assert planner.plans()[0].plan.policy == "lpt"
    left = np.ones(n)
    left[[7, 3, 90]] = 0.0, 0.5, 0.5
    progress = JobProgress(np.zeros(n, np.int32), left < 1, left, whole=True)
    # Without answers, nothing is known that was not.
    assert planner.plans(progress)[0].plan.policy == "lpt"
    planner.observe(np.array([7]), np.array([40], np.int32))
    (last,) = planner.plans(progress)
    if large:
        assert last.plan.policy == "lpt" and len(chosen) == 1
        return
    assert last.plan.policy == "dual-scan"
    (_, draws, first), (orders, _, present) = chosen
    assert (draws, first, present) == (2, None, "lpt")
    for order in orders.values():
        assert set(order.requests[:3]) == {3, 7, 90}
        assert not order.is_dynamic
        assert sorted(order.requests) == list(range(n))
