"""A job's plan is the planner's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import make_machine, make_request
from dispatcher_jobs import plan_requests, planner_of, two_kinds, unknown

from sglang_batch.planner.lengths.output_length import Observed
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.plan import make_plan
from sglang_batch.policies import DENSE_ORDERS, POLICIES

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
    expected = make_plan(
        plan_requests(requests),
        make_machine(),
        policy,
        settings=OrderSettings(seed=0),
        observed=answers,
    )
    (found,) = planner.plans()
    assert found.plan.policy == expected.policy
    assert np.array_equal(found.plan.scan.requests, expected.scan.requests)
    assert found.plan.scan.num_left == expected.scan.num_left
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
    planner.observe(np.arange(100), np.full(100, 40, np.int32))
    assert planner.plans()[0].plan.estimates.est_output_len.max() == 10
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
