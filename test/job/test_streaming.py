"""A job that runs while it is being rendered."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import Answers, make_request, run
from dispatcher_jobs import (
    DUAL,
    Engine,
    everything,
    make_job,
    number_of,
    planner_of,
    settle,
    two_kinds,
    unknown,
    until_planned,
)

from sglang_batch.config import POLICIES
from sglang_batch.job import live_plan, rendering
from sglang_batch.job.engine import PreparedRequest
from sglang_batch.request import BatchRequestInput, RequestOutput

pytestmark = pytest.mark.usefixtures("compiled", "eager", "short_stretches")
PLANNED = [policy for policy in POLICIES if policy != "fcfs"]
FIRST = 16


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_plan, "FIRST_REQUESTS", FIRST)


class Gated(Engine):
    """Renders the first ``allowed`` requests and waits."""

    def __init__(self, allowed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.allowed = allowed
        self.opening = asyncio.Event()

    def allow(self, allowed: int) -> None:
        self.allowed = allowed
        self.opening.set()
        self.opening = asyncio.Event()

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest | RequestOutput:
        while request.index >= self.allowed:
            await self.opening.wait()
        return await super().prepare(request, rid, tokenize=tokenize)


def numbers_of(engine: Engine) -> list[list[int]]:
    """The numbers that each plan has, of all replicas."""
    return [
        sorted(int(n) for plan in plans for n in plan.number)
        for plans in engine.openings
    ]


@pytest.mark.parametrize("policy", PLANNED)
def test_the_first_stretch_runs_while_the_rest_is_rendered(policy: str) -> None:
    requests = unknown(100)
    engine = Gated(20)
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy, max_inflight=4)
        work = asyncio.ensure_future(job.run())
        await engine.until(lambda: len(answers) == FIRST)
        await settle()
        assert not work.done()
        engine.allow(50)
        await engine.until(lambda: len(answers) >= 2 * FIRST)
        engine.allow(100)
        await work

    run(scenario())
    assert len(answers) == engine.num_prepared == 100
    sizes = [len(numbers) for numbers in numbers_of(engine)]
    assert sizes == sorted(sizes)
    assert sizes[0] == FIRST and sizes[-1] == 100
    assert any(2 * FIRST <= size <= 50 for size in sizes)
    for numbers in numbers_of(engine):
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("policy", PLANNED)
@pytest.mark.parametrize("known", [False, True])
def test_the_last_plan_is_that_of_the_whole_job(policy: str, known: bool) -> None:
    """What is not sent yet is sent as if the job had been planned at once."""
    requests = two_kinds(200) if known else unknown(200)
    engine = Gated(FIRST)
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy=policy, max_inflight=6)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 6)
        engine.allow(200)
        await engine.until(lambda: numbers_of(engine)[-1:] == [list(range(200))])
        await settle()
        progress = job._dispatcher.progress(whole=True)
        (whole,) = planner_of(requests, policy).plans(progress)
        sent = {number_of(each) for each in engine.executed}
        (replica,) = job._dispatcher._replicas
        for queue, side in zip(replica.sides, whole.sides, strict=True):
            assert queue.unsent.tolist() == [n for n in side if n not in sent]
        engine.release()
        await work

    run(scenario())


def test_a_job_of_one_stretch_is_planned_as_a_whole() -> None:
    engine = Gated(FIRST - 1)
    requests = two_kinds(FIRST)

    async def scenario() -> None:
        work = asyncio.ensure_future(make_job(engine, Answers(), requests).run())
        await settle()
        assert not engine.openings
        engine.allow(FIRST)
        await work

    run(scenario())
    assert numbers_of(engine) == [list(range(FIRST))]


def test_a_stretch_of_long_prompts_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_plan, "FIRST_TOKENS", 100)
    requests = [make_request(i, "x" * 50) for i in range(10)]
    engine = Gated(2)

    async def scenario() -> None:
        answers = Answers()
        job = make_job(engine, answers, requests, policy="dfs")
        work = asyncio.ensure_future(job.run())
        await engine.until(lambda: len(answers) == 2)
        engine.allow(10)
        await work

    run(scenario())
    assert numbers_of(engine)[0] == [0, 1]


@pytest.mark.parametrize("policy", [DUAL, "auto", "lpt"])
def test_answers_of_the_first_stretch_serve_the_whole_job(policy: str) -> None:
    requests = unknown(200)
    engine = Gated(FIRST)
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy, max_inflight=4)
        work = asyncio.ensure_future(job.run())
        # Its sample is answered, and a plan made from that.
        await until_planned(engine, 2)
        await engine.until(lambda: len(answers) == FIRST)
        engine.hold(everything(requests))
        engine.allow(200)
        await engine.until(lambda: numbers_of(engine)[-1:] == [list(range(200))])
        await settle()
        # Answers are some 30 tokens long, and the default estimate is 256.
        assert engine.openings[-1][0].est_decode_steps.mean() < 100
        assert (engine.openings[-1][0].density is not None) == (policy == DUAL)
        engine.release()
        await work

    run(scenario())
    assert len(answers) == 200


@pytest.mark.parametrize("policy", ["dfs", DUAL, "auto"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_what_was_sent_stays_with_its_replica(policy: str, replicas: int) -> None:
    requests = unknown(150)
    engine = Gated(2 * FIRST, num_replicas=replicas)
    engine.hold(everything(requests))
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy, max_inflight=12)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 12)
        engine.allow(150)
        await engine.until(lambda: numbers_of(engine)[-1:] == [list(range(150))])
        await settle()
        plans = engine.openings[-1]
        for each in engine.running:
            replica = engine.routed[each]
            assert replica is not None
            assert number_of(each) in plans[replica].number
        engine.release()
        await work

    run(scenario())
    assert len(answers) == 150


def test_requests_that_cannot_be_rendered_or_are_too_large_in_any_stretch() -> None:
    requests = unknown(100)
    large = [3, 60, 61]
    for number in large:
        requests[number] = make_request(number, "x" * 100_001)
    bad = ["r0", "r15", "r16", "r99"]
    engine = Gated(100, rejected=bad)
    answers = Answers()
    run(make_job(engine, answers, requests, policy="dfs", max_inflight=4).run())
    assert len(answers) == 100
    assert {i for i in answers if not answers[i].ok} == set(bad)
    assert sorted(engine.executed) == sorted(set(everything(requests)) - set(bad))
    assert not set(large) & set(numbers_of(engine)[-1])


@pytest.mark.parametrize("at", [FIRST - 1, FIRST + 3, 90])
def test_an_error_of_rendering_ends_the_job_whenever_it_comes(at: int) -> None:
    requests = unknown(100)
    requests[at] = BatchRequestInput(at, f"r{at}", requests[0].url, b"no JSON")
    engine = Gated(100)
    engine.hold(everything(requests))
    with pytest.raises(ValueError):
        run(make_job(engine, Answers(), requests, policy="dfs").run())
    assert engine.running == set()


def test_stopping_while_it_is_rendered(tmp_path: Any) -> None:
    requests = unknown(100)
    engine = Gated(30)
    engine.hold(everything(requests))
    answers = Answers()

    async def scenario() -> None:
        stop = asyncio.Event()
        job = make_job(engine, answers, requests, policy="dfs", max_inflight=4)
        job._options = replace(job._options, directory=tmp_path)
        work = asyncio.ensure_future(job.run(stop))
        await engine.until_stalled(0, 4)
        assert list(tmp_path.iterdir())
        stop.set()
        await work

    run(scenario())
    assert engine.running == set() and not answers
    assert engine.closed == ["batch_1"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["dfs", DUAL])
def test_all_but_the_first_requests_wait_on_disk(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "KEPT_REQUESTS", 5)
    requests = unknown(120)
    engine = Gated(120)
    answers = Answers()
    job = make_job(engine, answers, requests, policy=policy, max_inflight=3)
    run(job.run())
    assert engine.num_prepared == len(answers) == 120
    assert all(answer.ok for answer in answers.values())
    assert np.all(np.bincount([number_of(each) for each in engine.executed]) == 1)
