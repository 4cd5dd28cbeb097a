"""The plan as it travels: every request finds its own part of it."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest
from plan_leaves import leaves_of
from scheduling_jobs import MACHINE, plan_of, random_prompts

from sglang_batch.config import ORDERS, OfflineBatchConfig
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.requests import PlanRequests
from sglang_batch.scheduling.job_plan import JobPlan, unplanned

Prompts = list[tuple[int, ...]]


def requests_of(prompts: Prompts, known: list[int]) -> PlanRequests:
    return PlanRequests(
        tokens=np.array([t for prompt in prompts for t in prompt], np.int32),
        offsets=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        max_new_tokens=np.full(len(prompts), 64, np.int32),
        known_output_len=np.array(known, np.int32),
    )


def planned(
    prompts: Prompts, policy: str, numbers: list[int], machine: Machine = MACHINE
) -> tuple[JobPlan, list[int]]:
    """The job's plan, and its requests in the order in which they are taken."""
    known = [3 + i for i in range(len(prompts))]
    requests, config = requests_of(prompts, known), OfflineBatchConfig(policy=policy)
    (shard,) = JobPlanner(
        requests, np.array(numbers, np.int64), machine, config
    ).plans()
    order = shard.numbers[shard.plan.scan.requests].tolist()
    return shard.for_scheduler(machine), [numbers.index(number) for number in order]


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_finds_its_part(policy: str, seed: int) -> None:
    random = Random(seed)
    prompts = random_prompts(random, 30)
    numbers = sorted(random.sample(range(100), 30))
    random.shuffle(numbers)
    plan, order = planned(prompts, policy, numbers)
    assert plan.policy == policy
    assert sorted(plan.position.tolist()) == list(range(30))
    for index, number in enumerate(numbers):
        leaf = int(leaves_of(plan)[number])
        assert plan.input_len[leaf] == len(prompts[index])
        assert order[int(plan.position[leaf])] == index
        assert plan.est_decode_steps[leaf] == 2 + index
        assert plan.est_decode_steps_sq[leaf] == pytest.approx((2 + index) ** 2)
        node = int(plan.node[leaf])
        assert plan.leaf_begin[node] <= leaf < plan.leaf_end[node]
        assert plan.depth[node] <= len(prompts[index])
    others = set(range(len(leaves_of(plan)))) - set(numbers)
    assert all(leaves_of(plan)[number] == -1 for number in others)


def test_what_is_below_a_node_shares_its_prefix() -> None:
    prompts = random_prompts(Random(5), 40)
    plan, _ = planned(prompts, "dfs-weight", list(range(40)))
    number_at = {int(leaves_of(plan)[number]): number for number in range(40)}
    for node in range(1, len(plan.parent)):
        leaves = range(int(plan.leaf_begin[node]), int(plan.leaf_end[node]))
        depth = int(plan.depth[node])
        assert len({prompts[number_at[leaf]][:depth] for leaf in leaves}) == 1
        assert depth > plan.depth[plan.parent[node]]


def test_requests_that_are_too_large_are_not_planned() -> None:
    limits = EngineLimits(kv_capacity_tokens=50, step_tokens=32, max_running=4)
    machine = Machine(MACHINE.cost, limits)
    prompts = [tuple(range(i, i + 5)) for i in range(3)]
    prompts.insert(1, tuple(range(200)))
    plan, order = planned(prompts, "fcfs", [4, 5, 6, 7], machine)
    assert plan.num_requests == 3
    assert leaves_of(plan)[5] == -1
    assert [order[int(plan.position[leaves_of(plan)[n]])] for n in (4, 6, 7)] == [
        0,
        2,
        3,
    ]
    assert plan.min_step_tokens == 32


def test_dual_scan_has_densities_by_turn() -> None:
    prompts = random_prompts(Random(2), 30)
    plan, _ = planned(prompts, "dual-scan", list(range(30)))
    assert plan.density is not None
    assert plan.density.shape == (30,)
    assert 0 <= plan.num_left <= 30
    assert plan.compute_s > 0
    assert plan.kv_read_s > 0
    followed, _ = planned(prompts, "fcfs", list(range(30)))
    assert followed.density is None


def test_travels_unchanged() -> None:
    plan, _ = planned(random_prompts(Random(3), 20), "dual-scan", list(range(20)))
    copy = JobPlan.from_bytes(plan.to_bytes())
    for field in fields(JobPlan):
        np.testing.assert_equal(getattr(copy, field.name), getattr(plan, field.name))
    assert plan.same_requests(copy)


@pytest.mark.parametrize("policy", ["dfs", "dual-scan"])
def test_a_new_plan_of_the_same_requests_travels_as_its_changes(policy: str) -> None:
    prompts, numbers = random_prompts(Random(3), 200), list(range(200))
    first, _ = planned(prompts, "fcfs", numbers)
    second, _ = planned(prompts, policy, numbers)
    few = second.est_decode_steps.copy()
    few[::7] += 1
    third = replace(second, est_decode_steps=few, num_left=1)
    plan = JobPlan.from_bytes(first.to_bytes())
    for last, new in ((first, second), (second, third), (third, third)):
        changes = new.changes_from(last)
        plan = plan.changed(changes)
        for field in fields(JobPlan):
            np.testing.assert_equal(getattr(plan, field.name), getattr(new, field.name))
        assert len(changes) < len(new.to_bytes())
    assert len(third.changes_from(third)) < 100
    # The plan that was changed is as before.
    assert np.array_equal(second.est_decode_steps[1:7], few[1:7])
    assert not np.array_equal(second.est_decode_steps, few)


def test_of_no_request() -> None:
    plan, _ = planned([], "fcfs", [])
    assert plan.num_requests == 0
    assert len(leaves_of(plan)) == 0
    empty = unplanned(MACHINE)
    assert empty.num_requests == 0
    assert empty.same_requests(JobPlan.from_bytes(empty.to_bytes()))


def test_the_same_requests_in_another_order_are_one_job() -> None:
    prompts = [(1, 1, 0), (1, 1, 1), (2, 2, 0), (2, 2, 1)]
    plan = plan_of(prompts)
    assert plan.same_requests(
        plan_of(prompts, position=[3, 1, 0, 2], est_decode_steps=99.0)
    )
    assert not plan.same_requests(plan_of(prompts[:3]))
    assert not plan.same_requests(plan_of([(i, 0, 0) for i in range(4)]))
    assert not plan.same_requests(replace(plan, number=plan.number[::-1]))


def test_a_plan_without_prefixes_has_the_same_order_and_no_followers() -> None:
    plan, _ = planned(random_prompts(Random(5), 30), "dfs", list(range(30)))
    alone = plan.without_prefixes()
    assert np.array_equal(alone.position, plan.position)
    assert not alone.node.any()
    assert len(alone.parent) == len(alone.depth) == 1
