"""The sample of a job, from which the lengths of its answers are learnt."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from builders import Answers, run
from dispatcher_jobs import (
    DUAL,
    Engine,
    everything,
    make_job,
    number_of,
    planner_of,
    run_job,
    sent_order,
    settle,
    two_kinds,
    unknown,
    until_planned,
)
from plan_leaves import leaves_of

from sglang_batch.config import POLICIES
from sglang_batch.job import rendering
from sglang_batch.job.engine import PreparedRequest
from sglang_batch.planner.requests import LEFT
from sglang_batch.request import BatchRequestInput, RequestOutput

pytestmark = pytest.mark.usefixtures("compiled", "one_stretch")


@pytest.mark.parametrize("policy", [DUAL, "lpt", "prefix-groups", "auto"])
def test_the_sample_is_sent_first_and_the_rest_does_not_wait_for_it(
    policy: str,
) -> None:
    requests = unknown(100)
    sample = {f"r{i}" for i in planner_of(requests, policy).sample}
    assert 5 <= len(sample) <= 10
    engine = Engine()
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy=policy, max_inflight=40)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 40)
        first = [each for each in engine.executed if engine.side(each) == LEFT]
        assert set(first[: len(sample)]) == sample
        engine.release(list(sample)[1:])
        await engine.until_stalled(len(sample) - 1, 40)
        await settle()
        assert len(engine.openings) == 1
        engine.release(list(sample)[:1])
        await until_planned(engine, 2)
        engine.release()
        await work

    run(scenario())
    first, second = engine.openings[0][0], engine.openings[1][0]
    assert first.same_requests(second)
    # Answers are as long as prompts here, some 30 tokens, and not the default 256.
    assert first.est_decode_steps.mean() > 200
    assert second.est_decode_steps.mean() < 60
    if policy == "auto":
        assert first.policy == "dfs"
        assert {each[0].policy for each in engine.openings[1:]} == {second.policy}
    else:
        assert first.policy == second.policy == policy


@pytest.mark.parametrize("policy", ["dfs", "dfs-weight", "lof", "random"])
def test_orders_that_do_not_look_at_lengths_have_no_sample(policy: str) -> None:
    requests = unknown(100)
    engine = Engine()
    run_job(engine, requests, policy=policy, max_inflight=1)
    assert planner_of(requests, policy).sample.tolist() == []
    expected = sent_order(requests, engine.machine, policy).tolist()
    assert [number_of(each) for each in engine.executed] == expected


def test_unsent_requests_follow_the_new_plan() -> None:
    requests = unknown(300)
    engine = Engine()
    sample = [f"r{i}" for i in planner_of(requests, "lpt").sample]
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy="lpt", max_inflight=40)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 40)
        engine.release(sample)
        await until_planned(engine, 2)
        await engine.until_stalled(len(sample), 40)
        num_sent = len(engine.executed)
        # Requests sent before the new plan keep their position.
        before, after = engine.openings[0][0], engine.openings[1][0]
        for each in engine.executed[num_sent - 40 :]:
            engine.release([each])
        await engine.until_stalled(len(sample) + 40, 40)
        fresh = engine.executed[num_sent : num_sent + 40]
        for plan, sorted_by_it in ((before, False), (after, True)):
            positions = [
                int(plan.position[leaves_of(plan)[number_of(each)]]) for each in fresh
            ]
            assert (positions == sorted(positions)) is sorted_by_it
        engine.release()
        await work

    run(scenario())


@pytest.mark.parametrize("policy", [DUAL, "lpt", "auto"])
def test_a_sample_that_fails_teaches_nothing_and_is_not_waited_for(policy: str) -> None:
    requests = unknown(100)
    sample = [f"r{i}" for i in planner_of(requests, policy).sample]
    engine = Engine(failing=dict.fromkeys(sample, 400))
    engine.hold(set(everything(requests)) - set(sample))
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy, max_inflight=10)
        work = asyncio.ensure_future(job.run())
        await until_planned(engine, 2)
        engine.release()
        await work

    run(scenario())
    assert {i for i in answers if not answers[i].ok} == set(sample)
    assert np.all(engine.openings[1][0].est_decode_steps > 200)
    if policy == "auto":
        assert engine.openings[0][0].policy == "dfs"


def test_a_sample_that_cannot_be_rendered_a_second_time_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendering, "KEPT_REQUESTS", 0)
    requests = unknown(100)
    sample = [f"r{i}" for i in planner_of(requests).sample]

    class Forgetful(Engine):
        def stored(self, prepared: Any) -> bytes | None:
            return None

        async def prepare(
            self, request: BatchRequestInput, rid: str, *, tokenize: bool
        ) -> PreparedRequest | RequestOutput:
            if not tokenize:
                self._rejected = set(sample)
            return await super().prepare(request, rid, tokenize=tokenize)

    engine = Forgetful()
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, max_inflight=4)
        work = asyncio.ensure_future(job.run())
        await until_planned(engine, 2)
        engine.release()
        await work

    run(scenario())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_of_known_lengths_is_planned_once(policy: str) -> None:
    engine = Engine()
    run_job(engine, two_kinds(200), policy=policy, max_inflight=10)
    assert len(engine.openings) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_job_is_planned_once(policy: str) -> None:
    engine = Engine()
    run_job(engine, unknown(63), policy=policy, max_inflight=10)
    assert len(engine.openings) == 1
    assert engine.openings[0][0].policy != "auto"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_of_one_request(policy: str) -> None:
    engine = Engine(num_replicas=2)
    run_job(engine, unknown(1), policy=policy)
    assert engine.closed == ["batch_1"]
