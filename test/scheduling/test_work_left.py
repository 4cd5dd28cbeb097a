"""The remaining work of a job, as its requests turn out longer or shorter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduling_jobs import plan_of

from sglang_batch.scheduling.job_plan import JobPlan, StepCost
from sglang_batch.scheduling.job_work import WorkLeft, density_of
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

PROMPTS = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)]
COST = StepCost(
    token_time_s=0.25,
    attention_time_s=0.0,
    kv_read_time_s=0.5,
    weight_read_time_s=0.0,
)


def planned(steps: float) -> JobPlan:
    """Four requests of three tokens, with the sums for ``steps`` each."""
    plan = plan_of(PROMPTS, est_decode_steps=steps)
    return replace(
        plan,
        cost=COST,
        compute_s=4 * (3 + steps) * 0.25,
        kv_read_s=4 * reads(steps) * 0.5,
    )


def reads(steps: float) -> float:
    return 3 * steps + steps**2 / 2


def reads_of_an_answer(steps: int) -> int:
    """Before each of its steps it has one token more, its own included."""
    return sum(3 + step for step in range(1, steps + 1))


def request(leaf: int, steps: int, est_decode_steps: int = 8) -> ScheduledRequest:
    return ScheduledRequest(
        None, leaf, 0, leaf, 3, 3, 1000, est_decode_steps, steps=steps
    )


def test_what_was_done_is_not_left() -> None:
    work = WorkLeft(planned(8.0))
    assert density_of([work]) == pytest.approx(11.0 / (2 * reads(8)))
    work.did(5.0, 0.0)
    assert density_of([work]) == pytest.approx(6.0 / (2 * reads(8)))
    work.did(0.0, reads(8))
    assert density_of([work]) == pytest.approx(6.0 / reads(8))


def test_bounds_where_nothing_is_left_of_a_kind() -> None:
    work = WorkLeft(planned(8.0))
    work.did(0.0, 1e6)
    assert density_of([work]) == 1e6
    work.did(1e6, 0.0)
    assert density_of([work]) == 1e-6


def test_after_all_requests_have_ended_nothing_is_left() -> None:
    work = WorkLeft(planned(8.0))
    lengths = [2, 30, 8, 1]
    for leaf, steps in enumerate(lengths):
        work.ended(request(leaf, steps))
    compute_s = sum(3 + steps for steps in lengths) * 0.25
    work.did(compute_s - 1.0, sum(map(reads_of_an_answer, lengths)) * 0.5 - 1.0)
    assert density_of([work]) == pytest.approx(1.0)


def test_one_that_outlives_its_estimate_is_counted_once() -> None:
    work = WorkLeft(planned(8.0))
    online = request(-1, 8, est_decode_steps=500)
    work.apply_estimates([request(0, 8, est_decode_steps=28), online])
    work.apply_estimates([request(0, 28, est_decode_steps=58)])
    work.ended(request(0, 40))
    for leaf in (1, 2, 3):
        work.ended(request(leaf, 0))
    work.did((12 + 40) * 0.25 - 2.0, reads_of_an_answer(40) * 0.5 - 1.0)
    assert density_of([work]) == pytest.approx(2.0)


@pytest.mark.parametrize("later", [8.0, 100.0])
def test_a_new_plan_does_not_bring_back_what_has_ended(later: float) -> None:
    """It may have been made before those answers were there."""
    work = WorkLeft(planned(8.0))
    work.ended(request(0, 2))
    work.ended(request(1, 20))
    work.replan(planned(later))
    work.ended(request(2, 5))
    work.ended(request(3, 5))
    lengths = [2, 20, 5, 5]
    compute_s = sum(3 + steps for steps in lengths) * 0.25
    work.did(compute_s - 3.0, sum(map(reads_of_an_answer, lengths)) * 0.5 - 1.0)
    assert density_of([work]) == pytest.approx(3.0)


def test_requests_that_no_plan_knows_leave_the_rest_as_it_is() -> None:
    work = WorkLeft(planned(8.0))
    before = density_of([work])
    work.ended(request(-1, 10))
    work.did((3 + 10) * 0.25, reads_of_an_answer(10) * 0.5)
    assert density_of([work]) == pytest.approx(before)
