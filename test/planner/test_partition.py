"""Shards of a job, against sets of prefixes and the bounds of their method."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from unittest.mock import patch

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_tree_check import check_prefix_tree, shared_with_previous
from sharding_jobs import mixed_job

from sglang_batch.errors import ConfigError
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.costs.tree_work import LeafWork, leaf_work
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.planner.sharding import partition as partition_module
from sglang_batch.planner.sharding.partition import (
    Partition,
    partition,
    shard_jobs,
    shared_within_shards,
)
from sglang_batch.planner.sharding.speeds import ShardSpeeds

Prompt = tuple[int, ...]

COST = CostModel(token_time_s=2.0, kv_read_time_s=0.5, attention_time_s=0.25)
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=7).map(tuple), max_size=20)
NUM_SHARDS = st.integers(1, 6)
GRANULARITIES = st.sampled_from([1, 4, 256])


def job(prompts: Sequence[Prompt]) -> PlanRequests:
    lengths = [len(prompt) for prompt in prompts]
    n = len(prompts)
    return PlanRequests(
        tokens=np.array([t for prompt in prompts for t in prompt], dtype=np.int32),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        max_new_tokens=np.arange(100, 100 + n, dtype=np.int32),
        known_output_len=np.full(n, UNKNOWN, dtype=np.int32),
    )


def planned(
    prompts: Sequence[Prompt], output_len: Iterable[float], cost: CostModel = COST
) -> tuple[PrefixTree, LeafWork]:
    requests = job(prompts)
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    est_output_len = np.array(list(output_len), dtype=np.float64)
    return tree, leaf_work(tree, cost, est_output_len, est_output_len**2)


def split(
    prompts: Sequence[Prompt],
    output_len: Iterable[float],
    num_shards: int,
    *,
    speeds: ShardSpeeds | None = None,
    cost: CostModel = COST,
    granularity: int = 256,
) -> Partition:
    tree, work = planned(prompts, output_len, cost)
    with patch.object(partition_module, "GRANULARITY", granularity):
        return partition(tree, cost, work, num_shards, speeds)


def outputs_of(num_prompts: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30, num_prompts).tolist()


def prefixes(prompts: Iterable[Prompt]) -> set[Prompt]:
    return {prompt[:d] for prompt in prompts for d in range(1, len(prompt) + 1)}


def shares(found: Partition) -> np.ndarray:
    """Compute and memory share of each shard, [2, k]."""
    sums = np.stack([found.compute_s, found.memory_s])
    return sums / sums.sum(axis=1, keepdims=True)


@st.composite
def mixed_speeds(draw: st.DrawFn, num_shards: int) -> ShardSpeeds:
    """Of engines of which at least one is there."""
    speed = st.sampled_from([0.25, 1.0, 1.5, 4.0])
    both = st.tuples(speed, speed) | st.just((0.0, 0.0))
    each = draw(st.lists(both, min_size=num_shards - 1, max_size=num_shards - 1))
    each.insert(draw(st.integers(0, num_shards - 1)), draw(st.tuples(speed, speed)))
    compute, memory = np.array(each).T
    return ShardSpeeds(compute.copy(), memory.copy())


# More than are cut at once.
MANY_SHARDS = st.integers(65, 300)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(300))
@given(PROMPTS, NUM_SHARDS | MANY_SHARDS, GRANULARITIES, st.integers(0, 99), st.data())
def test_sums_and_lost_tokens_are_those_of_the_shards_prefixes(
    prompts: list[Prompt],
    num_shards: int,
    granularity: int,
    seed: int,
    data: st.DataObject,
) -> None:
    output_len = outputs_of(len(prompts), seed)
    speeds = data.draw(st.none() | mixed_speeds(num_shards))
    found = split(
        prompts, output_len, num_shards, speeds=speeds, granularity=granularity
    )
    if speeds is not None:
        assert speeds.there[found.shard].all()

    assert len(found.compute_s) == num_shards
    assert found.shard.dtype == np.int32
    assert found.compute_s.dtype == found.memory_s.dtype == np.float64
    assert found.compute_s.shape == found.memory_s.shape == (num_shards,)
    members = [found.requests_of(s).tolist() for s in range(num_shards)]
    assert sorted(i for shard in members for i in shard) == list(range(len(prompts)))
    unique = [prefixes(prompts[i] for i in shard) for shard in members]
    assert found.lost_tokens == sum(map(len, unique)) - len(prefixes(prompts))
    for s, shard in enumerate(members):
        # Attention over a prompt costs the square: 2 d - 1 more for its d-th token.
        prefill = sum(2.0 + 0.25 * (2 * len(prefix) - 1) for prefix in unique[s])
        decode = sum(2.0 * output_len[i] for i in shard)
        reads = sum(
            len(prompts[i]) * output_len[i] + output_len[i] ** 2 / 2 for i in shard
        )
        assert found.compute_s[s] == pytest.approx(prefill + decode)
        assert found.memory_s[s] == pytest.approx(0.5 * reads)


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=30
    ),
    st.integers(2, 5),
)
def test_requests_without_shared_prefixes_are_dealt_within_the_bound(
    lengths: list[tuple[int, int]], num_shards: int
) -> None:
    # The first tokens differ, so every request is a unit by itself.
    prompts = [(i,) * p for i, (p, _) in enumerate(lengths)]
    output_len = [1 + d for _, d in lengths]
    tree, work = planned(prompts, output_len)
    found = split(prompts, output_len, num_shards, granularity=10_000)

    units = np.empty((2, len(prompts)))
    units[0, tree.order] = COST.compute_time_s(tree.input_len, 0) + work.decode_s
    units[1, tree.order] = work.memory_s
    total = units.sum(axis=1)
    largest = (units / total[:, None]).max()
    assert found.lost_tokens == 0
    loads = np.stack([found.compute_s, found.memory_s])
    seconds = COST.step_time_s(*loads)
    fair_and_one = 1 / num_shards + largest
    assert seconds.max() <= 1.2072 * fair_and_one * COST.step_time_s(*total)
    # And the slowest shard can hand no request to another that then takes less.
    slowest = int(np.argmax(seconds))
    for i in found.requests_of(slowest):
        left = COST.step_time_s(*(loads[:, slowest] - units[:, i]).clip(0.0))
        there = COST.step_time_s(*(loads + units[:, i : i + 1]))
        assert max(left, np.delete(there, slowest).min()) >= seconds.max() * (1 - 1e-6)


@settings(deadline=None, max_examples=examples(100))
@given(PROMPTS, NUM_SHARDS, st.integers(0, 99))
def test_no_more_sharing_is_lost_than_every_split_path_once_per_shard(
    prompts: list[Prompt], num_shards: int, seed: int
) -> None:
    tree, work = planned(prompts, outputs_of(len(prompts), seed))
    found = partition(tree, COST, work, num_shards)
    node_tokens = tree.depth[1:] - tree.depth[tree.parent[1:]]
    assert 0 <= found.lost_tokens <= (num_shards - 1) * node_tokens.sum()


@settings(deadline=None, max_examples=examples(50))
@given(PROMPTS, NUM_SHARDS, GRANULARITIES, st.integers(0, 99))
def test_the_same_job_gives_the_same_shards(
    prompts: list[Prompt], num_shards: int, granularity: int, seed: int
) -> None:
    output_len = outputs_of(len(prompts), seed)
    first = split(prompts, output_len, num_shards, granularity=granularity)
    again = split(prompts, output_len, num_shards, granularity=granularity)
    np.testing.assert_array_equal(first.shard, again.shard)


@settings(deadline=None, max_examples=examples(50))
@given(PROMPTS, NUM_SHARDS)
def test_jobs_without_output_have_finite_sums(
    prompts: list[Prompt], num_shards: int
) -> None:
    found = split(prompts, [0] * len(prompts), num_shards)
    assert np.isfinite(found.compute_s).all()
    assert not found.memory_s.any()


@settings(deadline=None, max_examples=examples(100))
@given(PROMPTS, NUM_SHARDS, st.integers(0, 99))
def test_a_shards_job_is_what_its_own_prompts_would_give(
    prompts: list[Prompt], num_shards: int, seed: int
) -> None:
    requests = job(prompts)
    tree, work = planned(prompts, outputs_of(len(prompts), seed))
    found = partition(tree, COST, work, num_shards)
    for s in range(num_shards):
        part = shard_jobs(tree, requests, [found.requests_of(s)])[0]
        index = found.requests_of(s)
        np.testing.assert_array_equal(part.index, index)
        expected = job([prompts[i] for i in index])
        np.testing.assert_array_equal(part.requests.tokens, expected.tokens)
        np.testing.assert_array_equal(part.requests.offsets, expected.offsets)
        np.testing.assert_array_equal(part.requests.max_new_tokens, 100 + index)
        check_prefix_tree(part.tree, part.requests.tokens, part.requests.offsets)


def test_equal_prompts_are_shared_out_and_their_prompt_is_paid_per_shard() -> None:
    found = split([tuple(range(10))] * 4000, [5] * 4000, 4)
    # Runs of at most 4000 / (4 * 256) requests are dealt, that is of 3.
    assert np.abs(np.bincount(found.shard) - 1000).max() <= 3
    assert found.lost_tokens == 30


def test_a_group_that_is_most_of_the_job_is_split_beyond_the_limit() -> None:
    # A long document with 40 questions: to keep it whole would leave 3 shards idle.
    document = tuple(range(30))
    prompts = [(*document, 100 + i, i) for i in range(40)]
    found = split(prompts, [20] * 40, 4)
    np.testing.assert_array_equal(np.bincount(found.shard), [10] * 4)
    assert found.lost_tokens == 90


def test_a_document_that_costs_more_than_its_questions_stays_whole() -> None:
    cost = CostModel(token_time_s=1.0, kv_read_time_s=0.0)
    prompts = [(*range(5000), 6000 + i) for i in range(4)]
    found = split(prompts, [1] * 4, 4, cost=cost)
    assert found.lost_tokens == 0
    assert len(set(found.shard.tolist())) == 1


def groups(num_groups: int, group_size: int, document_len: int) -> list[Prompt]:
    return [
        (*[1000 + g] * document_len, i)
        for g in range(num_groups)
        for i in range(group_size)
    ]


def test_groups_stay_whole_where_that_is_balanced() -> None:
    found = split(groups(40, 25, 50), [10] * 1000, 4)
    assert found.lost_tokens == 0
    np.testing.assert_array_equal(np.bincount(found.shard), [250] * 4)


@pytest.mark.parametrize("num_shards", [2, 4, 8])
def test_a_mixed_job_is_balanced_in_both_resources(num_shards: int) -> None:
    rng = np.random.default_rng(0)
    shared = [
        (5, g, *rng.integers(0, 9, 20).tolist()) for g in range(50) for _ in range(400)
    ]
    generations = [(7, i, 1, 2) for i in range(200)]
    lengths = rng.lognormal(5.0, 0.8, 200)
    cost = CostModel(token_time_s=1.0, kv_read_time_s=0.01)
    output_len = [2] * len(shared) + lengths.tolist()
    tree, work = planned([*shared, *generations], output_len, cost)
    found = partition(tree, cost, work, num_shards)
    assert shares(found).max() <= 1.005 / num_shards
    assert found.lost_tokens <= 0.005 * (tree.num_tokens - tree.num_unique_tokens)
    # Every shard has one of the longest.
    longest = np.argsort(-lengths)[:num_shards] + len(shared)
    assert len(set(found.shard[longest].tolist())) == num_shards


def test_a_request_above_a_fair_share_leaves_other_work_to_the_other_shards() -> None:
    # One generation has two fifths of the memory time. 4 shards have a quarter each.
    cost = CostModel(token_time_s=1.0, kv_read_time_s=0.01)
    prompts = [(i, 1, 2) for i in range(601)]
    output_len = [2000] + [100] * 600
    found = split(prompts, output_len, 4, cost=cost)
    seconds = cost.step_time_s(found.compute_s, found.memory_s)
    alone = cost.step_time_s(2003.0, 0.01 * (3 * 2000 + 2000**2 / 2))
    fair = cost.step_time_s(found.compute_s.sum(), found.memory_s.sum()) / 4
    assert alone > 0.85 * fair
    assert seconds.max() <= 1.04 * fair
    others = found.requests_of(int(found.shard[0]))
    assert 1 <= len(others) <= 0.5 * 601 / 4


@pytest.mark.parametrize("speed", [None, 1.0, 0.3, 7.0])
def test_equal_engines_get_the_shards_that_they_always_got(speed: float | None) -> None:
    found = hashlib.sha256()
    for seed in range(4):
        prompts, output_len = mixed_job(seed)
        for k in (1, 2, 3, 7, 16, 64):
            for exponent in (1.0, 1.47):
                # All sums are exact, so that they are the same on every machine.
                cost = CostModel(
                    token_time_s=2.0,
                    kv_read_time_s=2**-6,
                    attention_time_s=0.25,
                    interference_exponent=exponent,
                )
                same = None if speed is None else np.full(k, speed)
                speeds = None if same is None else ShardSpeeds(same, same)
                cut = split(prompts, output_len, k, cost=cost, speeds=speeds)
                for values in (cut.shard, cut.compute_s, cut.memory_s):
                    found.update(values.tobytes())
    assert found.hexdigest() == (
        "c2a64117a4022752c9aba336b87ba570ce508935fb510cb35cbcf56e3a96ff65"
    )


def end_s(found: Partition, speeds: ShardSpeeds, cost: CostModel) -> np.ndarray:
    """Seconds of the engines that are there."""
    there = speeds.there
    compute, memory = speeds.compute[there], speeds.memory[there]
    return cost.step_time_s(
        found.compute_s[there] / compute, found.memory_s[there] / memory
    )


def fleet_job(num_shards: int) -> tuple[list[Prompt], list[int]]:
    """Small families with 200 requests for each engine."""
    n = 200 * num_shards
    lengths = np.random.default_rng(num_shards).integers(1, 30, n)
    return [(i // 4, i // 4, i // 4, i) for i in range(n)], lengths.tolist()


def fleet_speed(num_shards: int) -> np.ndarray:
    rng = np.random.default_rng(num_shards)
    return np.append(1.0, rng.choice([0.0, 0.5, 1.0, 3.0], num_shards - 1))


@pytest.mark.parametrize("num_shards", [5, 40, 200])
def test_engines_get_work_of_both_kinds_by_their_speed(num_shards: int) -> None:
    speed = fleet_speed(num_shards)
    speeds = ShardSpeeds(speed, speed)
    found = split(*fleet_job(num_shards), num_shards, speeds=speeds)
    of_all = speed / speed.sum()
    assert shares(found) == pytest.approx(np.stack([of_all, of_all]), rel=0.05)


@pytest.mark.parametrize("num_shards", [5, 40, 200])
def test_engines_that_are_good_at_different_work_end_together(num_shards: int) -> None:
    speed = fleet_speed(num_shards)
    ratio = np.random.default_rng(1).uniform(0.5, 2.0, num_shards)
    speeds = ShardSpeeds(speed, speed * ratio)
    found = split(*fleet_job(num_shards), num_shards, speeds=speeds)
    ends = end_s(found, speeds, COST)
    assert ends.max() <= 1.02 * ends.mean()
    assert not found.compute_s[~speeds.there].any()


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=30
    ),
    st.integers(2, 5),
    st.data(),
)
def test_the_slowest_engine_can_hand_nothing_to_another(
    lengths: list[tuple[int, int]], num_shards: int, data: st.DataObject
) -> None:
    speeds = data.draw(mixed_speeds(num_shards))
    prompts = [(i,) * p for i, (p, _) in enumerate(lengths)]
    tree, work = planned(prompts, [1 + d for _, d in lengths])
    output_len = [1 + d for _, d in lengths]
    found = split(prompts, output_len, num_shards, speeds=speeds, granularity=10_000)
    units = np.empty((2, len(prompts)))
    units[0, tree.order] = COST.compute_time_s(tree.input_len, 0) + work.decode_s
    units[1, tree.order] = work.memory_s
    there = np.flatnonzero(speeds.there)
    speed = np.stack([speeds.compute, speeds.memory])[:, there]
    loads = np.stack([found.compute_s, found.memory_s])[:, there]
    seconds = COST.step_time_s(*(loads / speed))
    slowest = int(np.argmax(seconds))
    for i in found.requests_of(int(there[slowest])):
        left = (loads[:, slowest] - units[:, i]).clip(0.0) / speed[:, slowest]
        others = COST.step_time_s(*((loads + units[:, i : i + 1]) / speed))
        others = np.delete(others, slowest)
        best = max(COST.step_time_s(*left), others.min(initial=np.inf))
        assert best >= seconds.max() * (1 - 1e-6)


def test_the_largest_requests_go_to_the_fastest_engine() -> None:
    cost = CostModel(token_time_s=1.0, kv_read_time_s=0.0)
    speed = np.array([2.0, 1.0, 4.0])
    # Of 1, 1, 3 and 5 s on an engine of the speed of the second.
    found = split(
        [(i,) for i in range(4)],
        [0, 0, 2, 4],
        3,
        cost=cost,
        speeds=ShardSpeeds(speed, speed),
    )
    assert (found.compute_s / speed).max() == 1.5


def test_families_of_many_engines_stay_together() -> None:
    # A hundred engines for forty families, each of which has to be cut two or three times.
    families, size, shared, k = 40, 100, 50, 100
    found = split(groups(families, size, shared), [50] * families * size, k)
    ends = COST.step_time_s(found.compute_s, found.memory_s)
    assert ends.max() <= 1.05 * ends.mean()
    family = np.arange(families * size) // size
    homes = [len(set(found.shard[family == each].tolist())) for each in range(families)]
    assert np.mean(homes) <= 10
    assert found.lost_tokens == sum(shared * (each - 1) for each in homes)


@settings(deadline=None, max_examples=examples(200))
@given(PROMPTS, st.integers(1, 6), st.integers(0, 99))
def test_what_leaves_share_in_their_shards(
    prompts: list[Prompt], num_shards: int, seed: int
) -> None:
    tree, _ = planned(prompts, [1] * len(prompts))
    n = tree.num_requests
    shard = np.random.default_rng(seed).integers(0, num_shards, n).astype(np.int32)
    expected = np.zeros(n, np.int32)
    for s in range(num_shards):
        leaves = np.flatnonzero(shard == s)
        expected[leaves] = shared_with_previous(tree, leaves.tolist())
    found = shared_within_shards(tree.lcp, shard, num_shards)
    np.testing.assert_array_equal(found, expected)


def test_several_shards_are_made_as_each_alone() -> None:
    prompts, output_len = mixed_job(0)
    requests = job(prompts)
    tree, work = planned(prompts, output_len)
    found = partition(tree, COST, work, 3)
    parts = [found.requests_of(s) for s in range(3)]
    for part, together in zip(parts, shard_jobs(tree, requests, parts), strict=True):
        alone = shard_jobs(tree, requests, [part])[0]
        np.testing.assert_array_equal(together.index, part)
        np.testing.assert_array_equal(together.tree.order, alone.tree.order)
        np.testing.assert_array_equal(together.requests.tokens, alone.requests.tokens)


def test_without_engines_there_is_no_partition() -> None:
    nobody = ShardSpeeds(np.zeros(3), np.zeros(3))
    with pytest.raises(ConfigError, match="None of the 3 engines is there"):
        split([(1,)], [1], 3, speeds=nobody)


def test_there_is_a_speed_for_each_shard() -> None:
    with pytest.raises(ConfigError, match="speeds of 2 engines for 3 shards"):
        split([(1,)], [1], 3, speeds=ShardSpeeds.equal(2))


def test_more_shards_than_requests_leave_some_empty() -> None:
    found = split([(1, 2), (3, 4), (5, 6)], [10, 10, 10], 8)
    assert sorted(np.bincount(found.shard, minlength=8).tolist()) == [0] * 5 + [1] * 3
    assert sorted(found.compute_s.tolist())[:5] == [0.0] * 5


@pytest.mark.parametrize("prompts", [[], [()], [()] * 5])
def test_jobs_without_tokens_have_no_work(prompts: list[Prompt]) -> None:
    found = split(prompts, [0] * len(prompts), 3)
    assert found.shard.shape == (len(prompts),)
    assert found.lost_tokens == 0
    assert found.compute_s.tolist() == found.memory_s.tolist() == [0.0] * 3


def test_one_shard_is_the_whole_job() -> None:
    found = split([(1, 2), (1, 3)], [4, 5], 1)
    assert found.shard.tolist() == [0, 0]
    assert found.lost_tokens == 0


def test_no_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_shards=0"):
        split([(1,)], [1], 0)
