"""To which replica a job's requests are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
    run_job,
    settle,
    two_kinds,
    unknown,
)
from plan_leaves import leaves_of

from sglang_batch.job.replicas import MIN_AHEAD
from sglang_batch.request import BatchRequestInput, RequestOutput
from sglang_batch.scheduling.job_plan import JobPlan

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("policy", ["dfs", DUAL, "lpt", "auto"])
def test_each_replica_is_given_a_shard_and_sent_that(policy: str) -> None:
    requests = unknown(120)
    engine = Engine(num_replicas=3)
    engine.hold(everything(requests))
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy, max_inflight=30)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 30)
        plans = engine.openings[0]
        assert len(plans) == 3
        for each in engine.executed:
            leaves = [
                int(padded(leaves_of(plan), 120)[number_of(each)]) for plan in plans
            ]
            assert [leaf >= 0 for leaf in leaves].index(True) == engine.routed[each]
        routed = [engine.routed[each] for each in engine.executed]
        assert [routed.count(replica) for replica in range(3)] == [10, 10, 10]
        engine.release()
        await work
        whole = planner_of(requests).tree.prefix_sharing_ratio
        assert job.prefix_sharing_ratio == whole

    run(scenario())
    assert len(answers) == 120
    planned = sum(padded(leaves_of(plan), 120) >= 0 for plan in engine.openings[0])
    assert planned.tolist() == [1] * 120


def padded(leaf: Any, length: int) -> Any:
    return np.concatenate([leaf, np.full(length - len(leaf), -1)])


class Rows(Engine):
    """Runs so many requests at a time in each replica. The others wait there."""

    def __init__(self, rows: int, num_replicas: int) -> None:
        super().__init__(num_replicas=num_replicas, default_max_inflight=1000)
        self.waiting = [0] * num_replicas
        self.most_waiting = [0] * num_replicas
        self._rows = [asyncio.Semaphore(rows) for _ in range(num_replicas)]
        self._here: list[set[int]] = [set() for _ in range(num_replicas)]

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        # What a replica has stays planned there.
        for here, plan in zip(self._here, plans, strict=True):
            assert here <= set(plan.number.tolist())
        await super().open_job(job_id, plans)

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        assert replica is not None
        number = number_of(prepared.custom_id)
        # Every request is sent to the replica that has a plan for it.
        assert number in self.openings[-1][replica].number
        self._here[replica].add(number)
        self.waiting[replica] += 1
        self.most_waiting[replica] = max(
            self.most_waiting[replica], self.waiting[replica]
        )
        async with self._rows[replica]:
            self.waiting[replica] -= 1
            answer = await super().execute(prepared, replica)
        self._here[replica].remove(number)
        return answer

    def ran_on(self, replica: int) -> set[str]:
        return {each for each, at in self.routed.items() if at == replica}


def families(count: int, *, known: bool = False) -> list[BatchRequestInput]:
    """Requests in families of eight. Answers are as long as prompts, or 99 tokens."""
    fields = {"max_tokens": 99, "ignore_eos": True} if known else {}
    return [
        make_request(i, f"{i // 8:03d} " + "shared " * 20 + str(i), **fields)
        for i in range(count)
    ]


def shards_of(requests: list[BatchRequestInput], policy: str) -> list[set[str]]:
    """The first plan's shards."""
    plans = planner_of(requests, policy, 2).plans()
    return [{f"r{i}" for i in plan.numbers} for plan in plans]


@pytest.mark.parametrize("policy", ["dfs", DUAL, "auto"])
@pytest.mark.parametrize("known", [False, True])
def test_a_replica_that_runs_dry_gets_what_the_other_was_not_sent(
    policy: str, known: bool
) -> None:
    requests = families(160, known=known)
    first, _ = shards_of(requests, policy)
    engine = Rows(4, 2)
    engine.hold(first)
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy)
        work = asyncio.ensure_future(job.run())
        await engine.until(lambda: len(engine.running & first) == 8)
        held = set(engine.running)
        moved = held - engine.ran_on(0)
        assert len(moved) == 4 and moved <= first
        plans = engine.openings[-1]
        assert {number_of(each) for each in moved} <= set(plans[1].number.tolist())
        # A prefix is not needed any more where all of its requests have left.
        assert not {number_of(each) for each in moved} & set(plans[0].number.tolist())
        engine.release(moved)
        await engine.until(lambda: moved <= set(engine.answered))
        engine.release()
        await work

    run(scenario())
    assert sorted(engine.executed) == sorted(everything(requests))


@pytest.mark.parametrize("policy", ["dfs", DUAL])
def test_a_replica_is_sent_few_more_requests_than_it_runs(policy: str) -> None:
    requests = two_kinds(400)
    engine = Rows(5, 2)
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy=policy)
        work = asyncio.ensure_future(job.run())
        sides = 2 if policy == DUAL else 1
        for _ in range(30):
            await engine.until(lambda: len(engine.running) == 10)
            await settle()
            # What joined a step lately is not more than the replica runs.
            assert max(engine.waiting) <= sides * max(MIN_AHEAD, 2 * 5)
            # A plan that is being made in a thread may hold some back.
            await engine.until(lambda: min(engine.waiting) >= MIN_AHEAD)
            engine.release(sorted(engine.running)[:3])
            await settle()
        engine.release()
        await work

    run(scenario())


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("policy", ["dfs", DUAL, "lpt", "auto"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_requests_run_where_the_last_plan_has_them(policy: str, replicas: int) -> None:
    """While plans are made and announced, requests are sent and answered."""
    rng = np.random.default_rng(replicas)
    requests = families(240)
    engine = Rows(3, replicas)
    engine.hold(everything(requests))
    engine.slow = {nth: asyncio.Event() for nth in range(1, 100)}
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy)
        work = asyncio.ensure_future(job.run())
        while len(answers) < 240:
            await asyncio.sleep(0)
            if engine.running:
                one = rng.choice(sorted(engine.running))
                engine.release([str(one)])
            if rng.random() < 0.05 and len(engine.openings) > 1:
                engine.slow[len(engine.openings) - 1].set()
        await work

    run(scenario())
    assert len(engine.openings) > 2
    assert sorted(engine.executed) == sorted(everything(requests))


def test_families_move_as_a_whole() -> None:
    requests = families(320)
    first, _ = shards_of(requests, "dfs")
    engine = Rows(2, 2)
    engine.hold(first)

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy="dfs")
        work = asyncio.ensure_future(job.run())
        await engine.until(lambda: len(engine.running & first) == 4)
        # The first gift: the plan in which the second replica has more than at first.
        counts = [plans[0].num_requests for plans in engine.openings]
        gift = next(i for i, n in enumerate(counts) if n != counts[0])
        moved = set(engine.openings[gift][1].number.tolist()) & {
            number_of(each) for each in first
        }
        sizes = np.bincount([number // 8 for number in moved])
        assert len(moved) >= 16 and sum(sizes % 8 != 0) <= 1
        engine.release()
        await work

    run(scenario())


def test_a_scheduler_that_does_not_tell_what_it_runs_is_sent_a_window() -> None:
    class Stock(Engine):
        def watch_job(self, job_id: str, on_joined: Any) -> bool:
            return False

    requests = families(160)
    first, _ = shards_of(requests, "dfs")
    engine = Stock(num_replicas=2)
    engine.hold(first)

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy="dfs", max_inflight=40)
        work = asyncio.ensure_future(job.run())
        await engine.until(lambda: len(engine.running & first) == 40)
        routed = [engine.routed[each] for each in engine.running & first]
        assert sorted(routed) == [0] * 20 + [1] * 20
        engine.release()
        await work

    run(scenario())
    assert sorted(engine.executed) == sorted(everything(requests))


def test_the_input_order_leaves_the_replica_to_the_engine() -> None:
    engine = Engine(num_replicas=3)
    run_job(engine, unknown(30), policy="fcfs", max_inflight=7, render_lookahead=8)
    assert set(engine.routed.values()) == {None}
    assert engine.max_running == 7
    assert engine.executed == [f"r{i}" for i in range(30)]


def test_a_window_smaller_than_the_replicas_is_not_passed() -> None:
    requests = unknown(60)
    engine = Engine(num_replicas=4)
    run_job(engine, requests, policy="dfs", max_inflight=2)
    assert engine.max_running == 2


def test_fewer_requests_than_replicas() -> None:
    engine = Engine(num_replicas=4)
    run_job(engine, unknown(2), policy="dfs")
    assert len(engine.openings[0]) == 4
