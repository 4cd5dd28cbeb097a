"""In which order and how many at a time a job's requests are sent."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from builders import Answers, make_request, run
from dispatcher_jobs import (
    DUAL,
    Engine,
    everything,
    make_job,
    number_of,
    run_job,
    sent_order,
    settle,
    two_kinds,
    unknown,
)
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_leaves import leaves_of

from sglang_batch.config import POLICIES
from sglang_batch.job.replicas import SendQueue, divide_window
from sglang_batch.planner.requests import LEFT, RIGHT

pytestmark = pytest.mark.usefixtures("compiled")


# Two windows --------------------------------------------------------------------


@pytest.mark.parametrize(("max_inflight", "left", "right"), [(6, 3, 3), (7, 4, 3)])
def test_an_order_with_two_ends_has_both_sides_in_the_engine(
    max_inflight: int, left: int, right: int
) -> None:
    requests = two_kinds(30)
    engine = Engine()
    engine.hold(everything(requests))
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, max_inflight=max_inflight)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, max_inflight)
        for num_answered in range(1, 8):
            assert len(engine.running_on(LEFT)) == left
            assert len(engine.running_on(RIGHT)) == right
            # Whichever side an answer is of, the next one is of the same.
            side = num_answered % 2
            engine.release([min(engine.running_on(side), key=number_of)])
            await engine.until_stalled(num_answered, max_inflight)
        engine.release()
        await work

    run(scenario())
    assert len(answers) == 30
    assert engine.max_running == max_inflight


def test_each_side_is_sent_from_its_end_of_the_order() -> None:
    engine = Engine()
    run_job(engine, two_kinds(30), max_inflight=2)
    plan = engine.openings[0][0]
    positions = [
        int(plan.position[leaves_of(plan)[number_of(each)]]) for each in engine.executed
    ]
    assert [t for t in positions if t < plan.num_left] == list(range(plan.num_left))
    right = [t for t in positions if t >= plan.num_left]
    assert right == list(range(29, plan.num_left - 1, -1))
    assert 0 < plan.num_left < 30


def test_a_side_that_is_exhausted_leaves_its_window_to_the_other() -> None:
    requests = two_kinds(30)
    engine = Engine()
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, max_inflight=6)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 6)
        num_answered = 0
        while engine.running_on(RIGHT):
            engine.release(engine.running_on(RIGHT)[:1])
            num_answered += 1
            await engine.until_stalled(num_answered, 6)
        assert len(engine.running_on(LEFT)) == 6
        engine.release()
        await work

    run(scenario())


def test_by_default_each_side_has_the_engines_window() -> None:
    engine = Engine(default_max_inflight=4)
    run_job(engine, two_kinds(30), render_lookahead=8)
    assert engine.max_running == 8
    engine = Engine(default_max_inflight=4)
    run_job(engine, two_kinds(30), policy="dfs", render_lookahead=8)
    assert engine.max_running == 4


@pytest.mark.parametrize("policy", [DUAL, "dfs", "auto"])
def test_requests_that_are_too_large_come_last(policy: str) -> None:
    requests = two_kinds(20)
    requests[3] = make_request(3, "x" * 200, max_tokens=99_990, ignore_eos=True)
    requests[4] = make_request(4, "x" * 100_001)
    engine = Engine()
    run_job(engine, requests, policy=policy, max_inflight=2)
    assert engine.executed[-2:] == ["r3", "r4"]
    assert leaves_of(engine.openings[0][0])[[3, 4]].tolist() == [-1, -1]


@pytest.mark.parametrize("lookahead", [1, 2, 9])
def test_no_more_is_rendered_ahead_than_allowed(lookahead: int) -> None:
    requests = two_kinds(40)
    engine = Engine()
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(
            engine, Answers(), requests, max_inflight=4, render_lookahead=lookahead
        )
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 4)
        await settle()
        ahead = engine.num_prepared - len(requests) - 4
        assert ahead <= max(2, lookahead)  # one for each side at least
        engine.release()
        await work

    run(scenario())


def test_the_stock_scheduler_gets_the_order_of_a_simulated_run() -> None:
    requests = two_kinds(30)
    engine = Engine()
    run_job(engine, requests, scheduler="stock", max_inflight=4)
    assert engine.openings[0][0].density is None
    expected = sent_order(requests, engine.machine, DUAL).tolist()
    assert [number_of(each) for each in engine.executed] == expected


# Whatever happens ---------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_every_request_is_answered_once_whatever_happens() -> None:
    @settings(deadline=None, max_examples=examples(80))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        count = data.draw(st.integers(2, 30))
        known = data.draw(st.booleans())
        requests = data.draw(
            st.sampled_from([unknown(count), two_kinds(count, known=known)])
        )
        ids = everything(requests)
        window = data.draw(st.integers(1, 9))
        rejected = data.draw(st.sets(st.sampled_from(ids), max_size=3))
        failing = dict.fromkeys(data.draw(st.sets(st.sampled_from(ids))), 400)
        replicas = data.draw(st.integers(1, 3))
        policy = data.draw(st.sampled_from(POLICIES))
        lookahead = data.draw(st.integers(1, 5))
        # What runs depends on when plans are ready, so nothing is drawn from it.
        rng = random.Random(data.draw(st.integers(0, 2**32)))
        engine = Engine(rejected=rejected, failing=failing, num_replicas=replicas)
        engine.hold(ids)
        answers = Answers()

        async def scenario() -> None:
            job = make_job(
                engine,
                answers,
                requests,
                policy=policy,
                max_inflight=window,
                render_lookahead=lookahead,
            )
            work = asyncio.ensure_future(job.run())
            num_sent = count - len(rejected)
            for num_answered in range(num_sent):
                expected = min(window, num_sent - num_answered)
                if replicas == 1:
                    await engine.until_stalled(num_answered, expected)
                else:  # what pays to move depends on the estimates
                    await engine.until(
                        lambda count=num_answered: (
                            len(engine.answered) == count and bool(engine.running)
                        )
                    )
                engine.release([rng.choice(sorted(engine.running))])
            await work

        run(scenario())
        assert set(answers) == set(ids)
        assert engine.max_running <= window
        assert engine.closed == ["batch_1"]

    check()


# Windows ------------------------------------------------------------------------


def test_a_queue_keeps_its_far_half_while_a_plan_is_made() -> None:
    queue = SendQueue(np.arange(7))
    queue.pop()
    assert queue.hold().tolist() == [1, 2, 3]
    assert queue.peek(9) == [1, 2, 3] and len(queue) == 6
    queue.pop()
    assert queue.peek(1) == [2]
    assert queue.unsent.tolist() == [2, 3, 4, 5, 6]


def test_a_window_is_divided_fairly() -> None:
    assert divide_window(7, 3) == [3, 2, 2]
    assert divide_window(1, 2) == [1, 1]
