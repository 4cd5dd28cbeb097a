"""What waits of a job: followers, new plans, and requests that no plan knows."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from scheduling_jobs import (
    Req,
    arrive,
    arrive_all,
    job_of,
    plan_of,
    random_prompts,
    waiting_of,
)

from sglang_batch.scheduling.job_state import DEFAULT_EST_DECODE_STEPS, JobState
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

PAIRS = [(1, 1, 0), (1, 1, 1), (2, 2, 0), (2, 2, 1)]


def drain(job: JobState) -> list[str]:
    """Ids of the requests in the backlog, by position. Empties the backlog."""
    rids = []
    while (request := job.backlog.first()) is not None:
        job.backlog.remove(request)
        rids.append(request.req.rid)
    return rids


def check_counts(job: JobState, waiting: list[ScheduledRequest]) -> None:
    assert job.num_waiting == len(waiting)
    assert job.waiting_tokens == sum(request.input_len for request in waiting)
    assert set(waiting_of(job)) == set(waiting)


def test_an_arrival_knows_its_plan() -> None:
    job = job_of(
        plan_of([(1, 2, 3), (1, 2, 4), (9,)], position=[2, 0, 1], est_decode_steps=6.4)
    )
    first = arrive(job, 0)
    assert (first.position, first.input_len, first.own) == (2, 3, 1)
    assert first.est_decode_steps == 6
    assert arrive(job, 1, max_decode_steps=4).est_decode_steps == 4
    assert drain(job) == ["r1", "r0"]


@pytest.mark.parametrize("number", [-1, 4, 10**9])
def test_what_the_plan_does_not_know_comes_last(number: int) -> None:
    job = job_of(plan_of(PAIRS))
    stray = job.add(Req("stray"), number, 3, 1000)
    arrive_all(job)
    assert (stray.leaf, stray.node, stray.own) == (-1, 0, 3)
    assert stray.est_decode_steps == DEFAULT_EST_DECODE_STEPS
    assert drain(job) == ["r0", "r1", "r2", "r3", "stray"]


def test_an_unplanned_job_goes_as_it_comes() -> None:
    job = job_of(plan_of([]))
    requests = [job.add(Req(f"{i}"), i, 5, 10) for i in range(3)]
    job.backlog.remove(requests[0])
    job.backlog.add(requests[0])
    assert drain(job) == ["0", "1", "2"]


def test_another_prompt_than_planned_shares_nothing_and_is_not_waited_for() -> None:
    job = job_of(plan_of(PAIRS))
    first, _, third = (arrive(job, number) for number in (0, 2, 3))
    other = job.add(Req("other"), 1, 99, 1000)
    assert (other.leaf, other.own) == (-1, 99)
    job.uses.start(first, 0)
    assert job.uses.computing == {}  # nobody else needs its prefix any more
    job.uses.start(third, 0)
    assert len(job.uses.computing) == 1


def test_an_end_is_forgotten() -> None:
    job = job_of(plan_of(PAIRS))
    requests = arrive_all(job)
    assert len(job) == 4
    for request in requests:
        job.take(request)
        job.forget(request)
        job.forget(request)
    assert len(job) == 0
    check_counts(job, [])


def test_followers_wait_until_their_node_is_released() -> None:
    job = job_of(plan_of(PAIRS))
    requests = arrive_all(job)
    node = requests[1].node
    job.follow(requests[1], node)
    check_counts(job, requests)
    assert job.backlog.first() is requests[0]
    job.backlog.remove(requests[0])
    assert job.backlog.first() is requests[2]
    job.release_followers([node + 1])
    assert job.backlog.first() is requests[2]
    job.release_followers([node, node])
    assert job.backlog.first() is requests[1]
    check_counts(job, requests[1:])


def test_a_follower_is_taken_out() -> None:
    job = job_of(plan_of([(1, 1, i) for i in range(4)]))
    requests = arrive_all(job)
    for request in requests[1:]:
        job.follow(request, request.node)
    job.take(requests[2])
    check_counts(job, [requests[0], requests[1], requests[3]])
    job.release_followers([requests[0].node])
    job.take(requests[1])
    assert drain(job) == ["r0", "r3"]


def test_taking_what_does_not_wait_changes_nothing() -> None:
    job = job_of(plan_of(PAIRS))
    requests = arrive_all(job)
    job.take(requests[0])
    job.take(requests[0])
    check_counts(job, requests[1:])


@pytest.mark.parametrize("dual", [False, True])
def test_a_new_plan_orders_what_waits(dual: bool) -> None:
    job = job_of(plan_of(PAIRS, position=[0, 1, 2, 3]))
    requests = arrive_all(job)
    density = [1.0] * 4 if dual else None
    job.replan(plan_of(PAIRS, position=[3, 2, 1, 0], density=density, num_left=1))
    assert job.backlog.last() is (requests[0] if dual else None)
    assert drain(job) == ["r3", "r2", "r1", "r0"]


def test_a_new_plan_reaches_followers_and_not_those_that_run() -> None:
    job = job_of(plan_of(PAIRS, est_decode_steps=8.0))
    running, follower, *_ = requests = arrive_all(job)
    job.backlog.remove(running)
    running.running = True
    job.follow(follower, follower.node)
    job.replan(plan_of(PAIRS, position=[3, 2, 1, 0], est_decode_steps=20.0))
    assert running.est_decode_steps == 8
    assert [request.est_decode_steps for request in requests[1:]] == [20] * 3
    assert drain(job) == ["r3", "r2"]
    job.release_followers([follower.node])
    assert drain(job) == ["r1"]
    running.running = False  # retracted: its new position holds
    job.backlog.add(running)
    job.backlog.add(requests[3])
    assert drain(job) == ["r3", "r0"]


def test_a_new_plan_of_what_no_plan_knows() -> None:
    job = job_of(plan_of(PAIRS))
    stray = job.add(Req("stray"), -1, 3, 1000)
    arrive_all(job)
    job.replan(plan_of(PAIRS, position=[3, 2, 1, 0], density=[1.0] * 4))
    assert stray.est_decode_steps == DEFAULT_EST_DECODE_STEPS
    assert job.density_at(stray) == 1.0
    last = job.backlog.last()
    assert last is not None
    assert last.req.rid == "r0"
    assert drain(job)[-1] == "stray"


def test_density_by_turn() -> None:
    job = job_of(plan_of(PAIRS, position=[3, 0, 1, 2], density=[8.0, 4.0, 2.0, 1.0]))
    requests = arrive_all(job)
    assert [job.density_at(request) for request in requests] == [1.0, 8.0, 4.0, 2.0]
    assert job.density_at(None) == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_doubled(seed: int) -> None:
    random = Random(seed)
    prompts = [(i % 3, i % 3, i) for i in range(12)]
    job = job_of(plan_of(prompts, density=[1.0] * 12))
    waiting = arrive_all(job)
    away: list[ScheduledRequest] = []
    for _ in range(200):
        what = random.randrange(6)
        request = random.choice(waiting) if waiting else None
        if what == 0 and request is not None and request.waiting:
            job.follow(request, request.node)
        elif what == 1 and request is not None:
            job.take(request)
            waiting.remove(request)
            away.append(request)
        elif what == 2 and away:
            back = away.pop(random.randrange(len(away)))
            job.backlog.add(back)
            waiting.append(back)
        elif what == 3:
            job.release_followers([random.randint(1, 3)])
        elif what == 4:
            position = random.sample(range(12), 12)
            job.replan(plan_of(prompts, position=position, density=[1.0] * 12))
        in_backlog = [request for request in waiting if request.waiting]
        first = min(in_backlog, key=lambda request: request.position, default=None)
        assert job.backlog.first() is first
        check_counts(job, waiting)


@pytest.mark.parametrize("page_size", [1, 4])
def test_requests_that_were_taken_back_come_again(page_size: int) -> None:
    plan = plan_of(random_prompts(Random(3), 60, step=6))
    job, other = job_of(plan, page_size), job_of(plan, page_size)
    requests = arrive_all(job)
    arrive_all(other)
    for request in requests[::3]:  # as the registry does with one that never ran
        job.take(request)
        job.uses.skip(request.leaf, request.node)
        job.work.ended(request)
        job.forget(request)
    assert job.uses.started.sum() == len(requests[::3])
    for number in range(0, len(requests), 3):
        arrive(job, number)
    for name in ("uses_left", "running", "started", "rank"):
        assert np.array_equal(getattr(job.uses, name), getattr(other.uses, name))
    assert job.work.compute_s == pytest.approx(other.work.compute_s)
    assert job.work.kv_read_s == pytest.approx(other.work.kv_read_s)
    assert len(job) == len(other) and job.num_waiting == other.num_waiting
