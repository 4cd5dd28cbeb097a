"""To which replica a job's requests are sent."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from builders import Answers, make_machine, run
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
            leaves = [int(padded(plan.leaf, 120)[number_of(each)]) for plan in plans]
            assert [leaf >= 0 for leaf in leaves].index(True) == engine.routed[each]
        routed = [engine.routed[each] for each in engine.executed]
        assert [routed.count(replica) for replica in range(3)] == [10, 10, 10]
        engine.release()
        await work
        whole = planner_of(requests).tree.prefix_sharing_ratio
        assert job.prefix_sharing_ratio == whole

    run(scenario())
    assert len(answers) == 120
    for plans in engine.openings:
        planned = sum(padded(plan.leaf, 120) >= 0 for plan in plans)
        assert planned.tolist() == [1] * 120
        for plan, first in zip(plans, engine.openings[0], strict=True):
            assert plan.same_requests(first)


def padded(leaf: Any, length: int) -> Any:
    return np.concatenate([leaf, np.full(length - len(leaf), -1)])


@pytest.mark.parametrize("policy", ["dfs", DUAL])
def test_a_replica_without_work_takes_the_far_end_of_anothers(policy: str) -> None:
    requests = two_kinds(80)
    engine = Engine(num_replicas=2)
    shards = [
        {f"r{i}" for i in np.flatnonzero(shard.for_scheduler(make_machine()).leaf >= 0)}
        for shard in planner_of(requests, policy, 2).plans()
    ]
    engine.hold(shards[0])
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy, max_inflight=8)
        work = asyncio.ensure_future(job.run())
        await engine.until(lambda: len(engine.running) == 8)
        await settle()
        assert shards[1] <= set(engine.answered)
        assert all(engine.routed[each] == 1 for each in shards[1])
        stolen = [each for each in engine.executed if engine.routed[each] == 1]
        stolen = stolen[len(shards[1]) :]
        assert len(stolen) == 4 and set(stolen) <= shards[0]
        # In one piece, the last of a side.
        plan = engine.openings[0][0]
        positions = sorted(
            int(plan.position[plan.leaf[number_of(each)]]) for each in stolen
        )
        assert positions == list(range(positions[0], positions[0] + 4))
        middle = plan.num_left if policy == DUAL else plan.num_requests
        assert middle in (positions[0], positions[-1] + 1)
        # The replica that is stuck has its share and no more.
        held = [each for each in engine.running if engine.routed[each] == 0]
        assert len(held) == 4
        engine.release(stolen)
        await engine.until(lambda: set(stolen) <= set(engine.answered))
        engine.release()
        await work

    run(scenario())
    assert len(answers) == 80
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
