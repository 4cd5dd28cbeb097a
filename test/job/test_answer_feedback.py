"""New plans as answers come, and the answers that they use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from builders import Answers, run
from dispatcher_jobs import (
    DUAL,
    Engine,
    everything,
    make_job,
    planner_of,
    prompts_of,
    sent_order,
    unknown,
    until_planned,
)

from sglang_batch.job.answer_feedback import MAX_REPLANS, AnswerFeedback
from sglang_batch.request import BatchRequestInput

pytestmark = pytest.mark.usefixtures("compiled", "one_stretch")


# Later plans --------------------------------------------------------------------


async def run_answering_first(
    engine: Engine, requests: Sequence[BatchRequestInput], policy: str, ends: list[int]
) -> None:
    """Run a job that waits for a new plan after each of ``ends`` answers.

    The answers come in the order of the plan. The engine gives no more of them until
    the plan is there: plans are made in threads, which take their time.
    """
    sample = planner_of(requests, policy).sample
    order = sent_order(requests, engine.machine, policy)
    first = [*sample, *order[~np.isin(order, sample)]]
    engine.hold(everything(requests))
    job = make_job(engine, Answers(), requests, policy=policy, max_inflight=4)
    work = asyncio.ensure_future(job.run())
    for num_plans, end in enumerate(ends, 2):
        engine.release(f"r{number}" for number in first[:end])
        await until_planned(engine, num_plans)
    engine.release()
    await work


def test_estimates_follow_the_answers_at_doubling_distances() -> None:
    requests = unknown(1200)
    engine = Engine()
    ends = [64, 128, 256, 512, 1024]
    run(run_answering_first(engine, requests, "dfs", ends))
    assert len(engine.openings) - 1 == len(ends) <= MAX_REPLANS
    means = [plans[0].est_decode_steps.mean() for plans in engine.openings]
    true = np.mean([len(p) for p in prompts_of(requests)]) - 1
    assert abs(means[-1] - true) < abs(means[0] - true) / 10
    first = engine.openings[0][0]
    assert all(first.same_requests(plans[0]) for plans in engine.openings)


def test_a_line_that_does_not_end_holds_no_plan_up() -> None:
    requests = unknown(400)
    engine = Engine()
    sample = planner_of(requests).sample
    engine.hold([f"r{sample[0]}"])

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, max_inflight=8)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(399, 1)
        await engine.until(lambda: len(engine.openings) > 1)
        engine.release()
        await work

    run(scenario())


def test_one_plan_is_made_at_a_time() -> None:
    requests = unknown(600)
    engine = Engine()
    engine.slow[1] = asyncio.Event()
    order = sent_order(requests, engine.machine, "dfs")
    engine.hold(f"r{number}" for number in order[-4:])

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy="dfs", max_inflight=4)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(596, 4)
        await engine.until(lambda: len(engine.openings) == 2)
        await asyncio.sleep(0.2)  # plans are made in threads
        assert len(engine.openings) == 2
        engine.slow[1].set()
        engine.release()
        await work

    run(scenario())


def test_a_job_whose_last_answer_comes_does_not_wait_for_a_plan() -> None:
    requests = unknown(100)
    sample = [f"r{i}" for i in planner_of(requests).sample]
    engine = Engine()
    engine.slow[1] = asyncio.Event()
    engine.hold(set(everything(requests)) - set(sample))
    answers = Answers()

    async def scenario() -> None:
        work = asyncio.ensure_future(make_job(engine, answers, requests).run())
        await engine.until(lambda: len(engine.openings) == 2)
        engine.release()
        await work

    run(scenario())
    assert len(answers) == 100
    assert engine.closed == ["batch_1"]


def test_stopping_while_a_plan_is_made() -> None:
    requests = unknown(100)
    engine = Engine()
    engine.slow[1] = asyncio.Event()
    sample = [f"r{i}" for i in planner_of(requests).sample]
    engine.hold(set(everything(requests)) - set(sample))

    async def scenario() -> None:
        stop = asyncio.Event()
        work = asyncio.ensure_future(
            make_job(engine, Answers(), requests, max_inflight=20).run(stop)
        )
        await engine.until(
            lambda: len(engine.openings) == 2 and len(engine.running) == 20
        )
        stop.set()
        await work

    run(scenario())
    assert engine.running == set()
    assert engine.closed == ["batch_1"]
    assert len(engine.aborted) == 20


def test_stopping_while_the_job_is_opened_closes_it() -> None:
    engine = Engine()
    engine.slow[0] = asyncio.Event()

    async def scenario() -> None:
        stop = asyncio.Event()
        job = make_job(engine, Answers(), unknown(10))
        work = asyncio.ensure_future(job.run(stop))
        await engine.until(lambda: len(engine.openings) == 1)
        stop.set()
        await work

    run(scenario())
    assert engine.executed == []
    assert engine.closed == ["batch_1"]


@pytest.mark.parametrize("nth", [0, 1])
def test_an_error_of_opening_a_job_is_raised_as_it_is(nth: int) -> None:
    requests = unknown(100)
    engine = Engine()
    engine.broken[nth] = ConnectionError("the scheduler died")
    sample = [f"r{i}" for i in planner_of(requests).sample]
    engine.hold(set(everything(requests)) - set(sample))
    with pytest.raises(ConnectionError, match="the scheduler died"):
        run(make_job(engine, Answers(), requests, max_inflight=20).run())
    assert engine.running == set()
    assert bool(engine.executed) is bool(nth)


@pytest.mark.parametrize("policy", [DUAL, "auto", "dfs"])
def test_the_same_answers_make_the_same_plans(policy: str) -> None:
    runs = []
    for _ in range(2):
        engine, requests = Engine(), unknown(300)
        sample = planner_of(requests, policy).sample
        ends = [len(sample)] if len(sample) else [64, 128, 256]
        run(run_answering_first(engine, requests, policy, ends))
        runs.append(engine.openings[: len(ends) + 1])
    first, second = runs
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a, b, strict=True):
            assert np.array_equal(x.position, y.position)
            assert np.array_equal(x.est_decode_steps, y.est_decode_steps)
            assert x.policy == y.policy


# The answers of a plan -----------------------------------------------------------


def test_running_requests_have_the_tokens_of_later_ones(eager: None) -> None:
    feedback = AnswerFeedback(np.zeros(0, np.int64), 10)
    for number in range(4):
        feedback.add_started("left", number)
        feedback.add_started("right", 10 + number)
    feedback.add_answer(2, 5)
    assert not feedback.is_due
    feedback.add_answer(11, None)
    assert feedback.is_due
    numbers, lengths = feedback.pop_answers()
    # Those before the answered one run, with four tokens at least; of 3 and of the
    # right side nothing is known.
    seen = dict(zip(numbers.tolist(), lengths.tolist(), strict=True))
    assert seen == {2: 5, 0: -4, 1: -4}
    assert not feedback.is_due
    feedback.add_answer(0, 9)
    feedback.add_answer(13, 3)
    numbers, lengths = feedback.pop_answers()
    seen = dict(zip(numbers.tolist(), lengths.tolist(), strict=True))
    assert seen == {0: 9, 13: 3, 1: -4, 10: -2, 12: -2}


def test_a_request_that_starts_again_is_the_last_of_its_stream(eager: None) -> None:
    feedback = AnswerFeedback(np.zeros(0, np.int64), 10)
    for number in (0, 1, 2, 0):
        feedback.add_started(0, number)
    feedback.add_answer(2, 8)
    feedback.add_answer(9, 1)
    numbers, lengths = feedback.pop_answers()
    seen = dict(zip(numbers.tolist(), lengths.tolist(), strict=True))
    assert seen == {2: 8, 9: 1, 1: -7}


class Reordering(Engine):
    """Starts requests in another order than they are sent in, and tells so."""

    def start(self, number: int) -> None:
        self.watching["batch_1"]([number])
        self.release([f"r{number}"])

    def _joined(self, prepared: Any) -> None:
        pass


def test_requests_that_wait_in_the_engine_say_nothing() -> None:
    requests = unknown(300)
    engine = Reordering(default_max_inflight=300)
    engine.hold(everything(requests))
    order = sent_order(requests, engine.machine, "dfs")
    started = order[-64:]

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy="dfs")
        work = asyncio.ensure_future(job.run())
        await engine.until(lambda: len(engine.running) == 300)
        for number in started.tolist():
            engine.start(number)
        await until_planned(engine, 2)
        engine.release()
        await work

    run(scenario())
    lengths = np.array([len(prompt) for prompt in prompts_of(requests)])
    estimates = engine.openings[1][0].est_decode_steps
    assert estimates.max() <= lengths[started].max() - 1


def test_a_sample_is_waited_for_and_no_longer(eager: None) -> None:
    feedback = AnswerFeedback(np.array([3, 4, 5]), 100)
    for number in (3, 4, 6, 7, 8):
        feedback.add_started(0, number)
    for number in (3, 6, 7):
        feedback.add_answer(number, 1)
    feedback.skip(5)
    assert not feedback.is_due
    feedback.add_answer(4, None)
    assert feedback.is_due
    assert feedback.pop_answers()[0].tolist() == [3, 6, 7]


def test_a_sample_that_does_not_end_is_given_up(eager: None) -> None:
    feedback = AnswerFeedback(np.array([3, 4, 5]), 100)
    for number in range(3, 11):
        feedback.add_started(0, number)
    for number in range(4, 9):
        feedback.add_answer(number, 7)
    assert not feedback.is_due
    feedback.add_answer(9, 7)  # twice as many as the sample has
    numbers, lengths = feedback.pop_answers()
    assert numbers.tolist() == [4, 5, 6, 7, 8, 9, 3]
    assert lengths.tolist() == [7] * 6 + [-6]


def test_nothing_is_learnt_where_all_is_known(eager: None) -> None:
    feedback = AnswerFeedback(np.zeros(0, np.int64), 0)
    for number in range(100):
        feedback.add_started(0, number)
        feedback.add_answer(number, 1)
    assert not feedback.is_due
