"""Units dealt to the engines of a fleet, against sets of prefixes and simple bounds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_jobs import ATTENTIVE, COST, PROMPTS, Prompt, make_requests, prefixes, tree_of

from sglang_batch.errors import ConfigError
from sglang_batch.planner.buckets.bucket_units import Units, join_units, plan_bucket
from sglang_batch.planner.buckets.unit_dealing import (
    UnitDeal,
    deal_units,
    even_time_s,
    shared_on_engines,
)
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.requests import Floats
from sglang_batch.planner.sharding.speeds import ShardSpeeds

SPEEDS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=6)


def deal(units: Units, speed: list[float], cost: CostModel = COST) -> UnitDeal:
    speeds = np.array(speed, np.float64)
    return deal_units(units, cost, ShardSpeeds(speeds, 1.5 * speeds))


def synthetic(compute: Floats, memory: Floats, shared: int = 10) -> Units:
    """Units of 100 prompts of 20 tokens, all of which share some."""
    u = len(compute)
    tokens = np.full(u, 2000)
    return Units(
        bucket=np.zeros(u, np.int32),
        first=np.arange(u) * 100,
        num_requests=np.full(u, 100),
        prompt_tokens=tokens,
        unique_tokens=tokens - 99 * shared,
        shared_tokens=np.where(np.arange(u) > 0, shared, 0).astype(np.int32),
        common_tokens=np.full(u, shared, np.int32),
        compute_s=compute,
        memory_s=memory,
    )


@settings(deadline=None, max_examples=300)
@given(PROMPTS, SPEEDS, st.integers(1, 3), st.integers(0, 3))
def test_times_and_lost_tokens_are_those_of_the_engines_prefixes(
    prompts: list[Prompt], speed: list[float], unit_requests: int, output_len: int
) -> None:
    speed[0] = speed[0] or 1.0
    requests = make_requests(prompts, known_output_len=output_len)
    plan = plan_bucket(
        requests, np.arange(len(prompts)), 0, ATTENTIVE, unit_requests, max_repeated=1.0
    )
    units = join_units([plan.summary])
    found = deal(units, speed, ATTENTIVE)
    again = deal(units, speed, ATTENTIVE)
    assert found.engine.dtype == np.int32 and len(found.engine) == len(units.first)
    assert np.array_equal(found.engine, again.engine)
    computed = 0
    for engine, each in enumerate(speed):
        mine = [
            prompts[i]
            for unit in np.flatnonzero(found.engine == engine)
            for i in plan.order[units.first[unit] :][: units.num_requests[unit]]
        ]
        own = prefixes(mine)
        computed += len(own)
        if each == 0:
            assert not mine and found.seconds[engine] == 0
            continue
        prefill = sum(2.0 + 0.25 * (2 * len(prefix) - 1) for prefix in own)
        reads = sum(len(x) * output_len + output_len**2 / 2 for x in mine)
        seconds = ATTENTIVE.step_time_s(
            (prefill + 2.0 * output_len * len(mine)) / each, 0.5 * reads / (1.5 * each)
        )
        assert found.seconds[engine] == pytest.approx(seconds)
    assert found.lost_tokens == computed - len(prefixes(prompts))


@settings(deadline=None, max_examples=300)
@given(PROMPTS, st.sets(st.integers(1, 19)), st.integers(1, 3), st.integers(0, 99))
def test_what_a_unit_shares_with_the_one_before_it_on_its_engine(
    prompts: list[Prompt], cuts: set[int], num_engines: int, seed: int
) -> None:
    tree, n = tree_of(prompts), len(prompts)
    begin = sorted({0, n, *(cut for cut in cuts if cut < n)})
    units = [[prompts[i] for i in tree.order[a:b]] for a, b in pairwise(begin)]
    common = [set.intersection(*(prefixes([x]) for x in unit)) for unit in units]
    rng = np.random.default_rng(seed)
    engine = rng.integers(num_engines, size=len(units)).astype(np.int32)
    shared = shared_on_engines(
        tree.lcp[begin[:-1]],
        np.array([*map(len, common)], np.int32),
        engine,
        num_engines,
    )
    before = [set[Prompt]() for _ in range(num_engines)]
    for unit, own in enumerate(units):
        on_engine = before[engine[unit]]
        assert shared[unit] == len(prefixes(own) & on_engine)
        on_engine |= prefixes(own)


@pytest.mark.parametrize("speeds", [[1.0] * 40, [1.0, 0.5, 0.0, 3.0] * 10])
def test_engines_end_together_with_one_run_each(speeds: list[float]) -> None:
    rng = np.random.default_rng(0)
    units = synthetic(rng.uniform(50, 150, 20_000), rng.uniform(50, 150, 20_000))
    found = deal(units, speeds)
    there = found.seconds[np.array(speeds) > 0]
    assert there.max() <= 1.005 * there.mean()
    assert not found.seconds[np.array(speeds) == 0].any()
    # The common prefix once for each engine but the first.
    assert found.lost_tokens == 10 * (len(there) - 1)
    # Runs, and few units that moved.
    assert np.count_nonzero(np.diff(found.engine)) < 4 * len(speeds)


def test_engines_have_the_jobs_mix_where_its_parts_differ() -> None:
    u, speeds = 20_000, ShardSpeeds.equal(40)
    heavy = np.repeat([950.0, 50.0], u // 2)
    units = synthetic(heavy, heavy[::-1].copy())
    found = deal_units(units, COST, speeds)
    even_s = even_time_s(units, COST, speeds)
    assert found.seconds.max() <= 1.01 * even_s
    # Runs of one kind alone would take as long as one engine's compute.
    assert 950.0 * u / 40 > 1.2 * even_s
    assert found.lost_tokens == 10 * 39


def test_a_unit_longer_than_a_fair_share_leaves_the_rest_to_others() -> None:
    compute = np.ones(1000)
    compute[500] = 1000.0
    found = deal(synthetic(compute, np.zeros(1000), shared=0), [1.0] * 10)
    slow = found.engine[500]
    assert found.seconds[slow] <= 1001.0
    assert np.count_nonzero(found.engine == slow) <= 2


def test_the_slowest_engine_gives_units_away() -> None:
    # One run each would leave the last engine with the 20 long units at the end.
    compute = np.concatenate([np.full(400, 1.0), np.full(20, 45.0)])
    units = synthetic(compute, np.zeros(420), shared=0)
    found = deal(units, [1.0] * 10)
    assert found.seconds.max() <= 1.02 * compute.sum() / 10


def test_the_time_of_an_even_mix() -> None:
    units = synthetic(np.full(10, 8.0), np.zeros(10), shared=0)
    each = np.array([1.0, 3.0, 0.0])
    speeds = ShardSpeeds(each, each)
    assert even_time_s(units, COST, speeds) == pytest.approx(20.0)


def test_no_units_and_units_without_work() -> None:
    nothing = CostModel(token_time_s=0.0, kv_read_time_s=0.0)
    none = synthetic(np.zeros(0), np.zeros(0))
    assert deal(none, [1.0, 1.0]).seconds.tolist() == [0.0, 0.0]
    found = deal(synthetic(np.zeros(5), np.zeros(5)), [0.0, 1.0, 1.0], nothing)
    assert found.engine.tolist() == [1] * 5
    assert found.lost_tokens == 0


def test_more_engines_than_units() -> None:
    found = deal(synthetic(np.full(3, 100.0), np.full(3, 1.0)), [1.0] * 8)
    assert len(set(found.engine.tolist())) == 3


def test_a_fleet_without_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match="None of 2 engines is there"):
        deal(synthetic(np.ones(2), np.ones(2), shared=0), [0.0, 0.0])
