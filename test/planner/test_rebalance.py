"""Requests that move between the shards of a running job."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_jobs import mixed_job

from sglang_batch.errors import ConfigError, InputError
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.costs.tree_work import LeafWork, leaf_work
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.sharding.rebalance import LeafState, rebalance
from sglang_batch.planner.sharding.speeds import ShardSpeeds

# A token takes a second, and the law adds up compute and memory.
COST = CostModel(token_time_s=1.0, kv_read_time_s=1.0, interference_exponent=1.0)


def tree_of(prompts: Sequence[Sequence[int]]) -> PrefixTree:
    tokens = np.array([t for prompt in prompts for t in prompt], np.int32)
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    return build_prefix_tree(tokens, offsets)


def family(number: int, size: int, shared: int) -> list[list[int]]:
    """Prompts with a prefix of so many tokens, and one token of their own."""
    return [[1000 + number] * shared + [i] for i in range(size)]


def moved(
    tree: PrefixTree,
    work: Sequence[float],
    shard: Sequence[int],
    *,
    num_shards: int = 2,
    sent: Sequence[int] = (),
    left: Sequence[float] | None = None,
    speed: Sequence[float] | None = None,
) -> list[int]:
    """The shard of each leaf afterwards. ``work``: of each leaf, in seconds."""
    n = tree.num_requests
    may_move = np.ones(n, np.bool_)
    may_move[list(sent)] = False
    state = LeafState(
        np.array(shard, np.int32),
        may_move,
        np.ones(n) if left is None else np.array(left, np.float64),
        np.arange(n, dtype=np.float64),
    )
    decode = LeafWork(np.array(work, np.float64), np.zeros(n))
    speeds = None
    if speed is not None:
        speeds = ShardSpeeds(np.array(speed, np.float64), np.array(speed, np.float64))
    found: list[int] = rebalance(tree, COST, decode, state, num_shards, speeds).tolist()
    return found


def test_the_far_half_moves_to_an_empty_shard() -> None:
    tree = tree_of([[i] for i in range(10)])
    assert moved(tree, [5.0] * 10, [0] * 10) == [0] * 5 + [1] * 5


def test_shards_with_the_same_work_are_left_alone() -> None:
    tree = tree_of([[i] for i in range(10)])
    shard = [i % 2 for i in range(10)]
    assert moved(tree, [5.0] * 10, shard) == shard


def test_lengths_count_and_not_the_number_of_requests() -> None:
    tree = tree_of([[i] for i in range(11)])
    found = moved(tree, [100.0] + [9.0] * 10, [0] * 11)
    assert found == [0] + [1] * 10


@pytest.mark.parametrize("num_shards", [2, 3, 5])
def test_every_shard_gets_as_much(num_shards: int) -> None:
    n = 60
    tree = tree_of([[i] for i in range(n)])
    found = moved(tree, [7.0] * n, [0] * n, num_shards=num_shards)
    counts = np.bincount(found, minlength=num_shards)
    assert counts.max() - counts.min() <= 1


def test_families_stay_together() -> None:
    prompts = [each for i in range(6) for each in family(i, 4, 20)]
    tree = tree_of(prompts)
    found = np.array(moved(tree, [9.0] * 24, [0] * 24)).reshape(6, 4)
    assert (found == found[:, :1]).all()
    assert found[:, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_family_is_divided_if_that_saves_more_than_its_prefix_takes() -> None:
    tree = tree_of(family(0, 8, 20))
    # Half of the work is 4 * 41 s, and the prefix takes 20 s.
    found = moved(tree, [40.0] * 8, [0] * 8)
    assert sorted(found) == [0] * 4 + [1] * 4
    # Half of the work is 4 * 3 s.
    assert moved(tree, [2.0] * 8, [0] * 8) == [0] * 8


def test_a_dear_family_does_not_keep_others_from_moving() -> None:
    dear, cheap = family(0, 4, 500), [[5 + i] for i in range(20)]
    tree = tree_of([*cheap, *dear])
    last = tree.order >= 20
    assert last[-4:].all()
    # The dear family has begun.
    found = np.array(moved(tree, [10.0] * 24, [0] * 24, sent=[23]))
    assert not found[last].any()
    assert found[~last].sum() > 10


def test_whole_families_move_before_parts_of_those_that_run() -> None:
    tree = tree_of([*family(0, 4, 20), *family(1, 4, 20)])
    # The last family has begun, and the first has not.
    found = moved(tree, [30.0] * 8, [0] * 8, sent=[7])
    assert found == [1] * 4 + [0] * 4


def test_a_prefix_that_the_other_shard_has_costs_nothing_there() -> None:
    prompts = family(0, 9, 1000)
    tree = tree_of(prompts)
    # One of the family runs on the other shard, and the rest has not begun.
    found = moved(tree, [10.0] * 9, [1] + [0] * 8, sent=[0])
    assert sum(found) == 9, "one prefix is computed instead of two"


def test_what_was_sent_stays_and_what_ended_does_not_count() -> None:
    tree = tree_of([[i] for i in range(12)])
    left = [0.0] * 6 + [1.0] * 6
    found = moved(tree, [5.0] * 12, [0] * 12, sent=range(8), left=left)
    # Two that were sent and four that were not are left.
    assert found == [0] * 9 + [1] * 3


def test_the_prompts_of_running_requests_are_computed() -> None:
    tree = tree_of([[0] * 100, *([i] for i in range(1, 5))])
    assert moved(tree, [1.0] + [5.0] * 4, [0] * 5, sent=[0]) == [0, 0, 0, 1, 1]


def test_an_engine_of_half_the_speed_keeps_half_as_much() -> None:
    tree = tree_of([[i] for i in range(12)])
    found = moved(tree, [5.0] * 12, [0] * 12, speed=[0.5, 1.0])
    assert found == [0] * 4 + [1] * 8


def test_a_slow_engine_is_worth_no_prefix_that_takes_it_longer_than_it_helps() -> None:
    tree = tree_of(family(0, 8, 20))
    # Both end together with 3 requests there: after 143 s instead of 348 s.
    slow = moved(tree, [40.0] * 8, [0] * 8, speed=[1.0, 0.9])
    assert slow.count(1) in (3, 4)
    # The prefix alone takes it 400 s.
    assert moved(tree, [40.0] * 8, [0] * 8, speed=[1.0, 0.05]) == [0] * 8


def test_what_is_computed_again_counts_at_the_speed_of_both() -> None:
    tree = tree_of(family(0, 8, 80))
    # One runs on the slow engine. The others take it 770 s, and the fast one 157 s.
    found = moved(tree, [10.0] * 8, [0] * 8, sent=[0], speed=[0.1, 1.0])
    assert found == [0] + [1] * 7


def test_the_engine_that_can_do_most_in_the_time_left_takes() -> None:
    # The second engine has nothing to do, but would take 400 s for the prefix. The third has
    # 100 s to do.
    tree = tree_of([*family(0, 8, 20), [5]])
    alone = int(np.flatnonzero(tree.order == 8)[0])
    work = [100.0 if leaf == alone else 40.0 for leaf in range(9)]
    shard = [2 if leaf == alone else 0 for leaf in range(9)]
    found = moved(tree, work, shard, num_shards=3, sent=[alone], speed=[1.0, 0.05, 1.0])
    assert found[alone] == 2
    assert sorted(np.bincount(found).tolist()) == [0, 4, 5]


def test_all_that_was_not_sent_leaves_an_engine_that_is_gone() -> None:
    tree = tree_of([[i] for i in range(12)])
    shard = [i % 3 for i in range(12)]
    found = moved(
        tree, [5.0] * 12, shard, num_shards=3, sent=[0], speed=[0.0, 1.0, 1.0]
    )
    assert found[0] == 0, "nobody can move what was sent"
    others = np.bincount(found, minlength=3)
    assert others[0] == 1 and abs(others[1] - others[2]) <= 1


def test_families_of_an_engine_that_is_gone_stay_together() -> None:
    tree = tree_of([each for i in range(6) for each in family(i, 4, 20)])
    shard = np.repeat([0, 0, 1, 1, 2, 2], 4).tolist()
    found = moved(tree, [9.0] * 24, shard, num_shards=3, speed=[1.0, 1.0, 0.0])
    homes = np.array(found).reshape(6, 4)
    assert (homes == homes[:, :1]).all()
    assert sorted(homes[:, 0].tolist()) == [0, 0, 0, 1, 1, 1]


def test_what_an_engine_that_is_gone_had_computed_is_computed_again() -> None:
    # One of the family was answered there, and its prefix is lost. The others go together.
    tree = tree_of(family(0, 5, 100))
    found = moved(
        tree, [30.0] * 5, [1] * 5, num_shards=3, sent=[0], left=[0.0, 1.0, 1.0, 1.0, 1.0],
        speed=[1.0, 0.0, 1.0],
    )  # fmt: skip
    assert found == [1, 0, 0, 0, 0], "half of it is worth less than the prefix"


def test_without_engines_nothing_moves() -> None:
    tree = tree_of([[i] for i in range(4)])
    assert moved(tree, [5.0] * 4, [0, 0, 0, 1], speed=[0.0, 0.0]) == [0, 0, 0, 1]


@pytest.mark.parametrize("num_shards", [4, 100])
def test_a_new_engine_gets_whole_families_from_the_far_ends(num_shards: int) -> None:
    each = 100  # families of a shard
    prompts = [p for i in range(num_shards * each) for p in family(i, 2, 30)]
    tree = tree_of(prompts)
    shard = np.repeat(np.arange(num_shards), 2 * each)
    speed = np.append(np.linspace(0.9, 1.1, num_shards), 1.0)
    work = np.full(len(prompts), 10.0)
    before = seconds(tree, work, shard.tolist(), [], num_shards + 1) / speed
    found = np.array(
        moved(tree, work.tolist(), shard.tolist(), num_shards=num_shards + 1, speed=speed.tolist())
    )  # fmt: skip
    after = seconds(tree, work, found.tolist(), [], num_shards + 1) / speed
    assert after.max() < before.max()
    assert after.max() <= 1.02 * after.mean()
    new = found.reshape(-1, 2)
    assert (new[:, 0] == new[:, 1]).all()
    taken = np.flatnonzero(new[:, 0] == num_shards) % each
    assert taken.min() > each / 2, "from the far ends"


def test_an_engine_with_nothing_to_give_does_not_keep_others_from_it() -> None:
    tree = tree_of([[i] for i in range(20)])
    # The first engine is slow and has sent everything. The third is new.
    shard = [0] * 4 + [1] * 16
    found = moved(
        tree, [5.0] * 20, shard, num_shards=3, sent=range(4), speed=[0.01, 1.0, 1.0]
    )
    assert np.bincount(found).tolist() == [4, 8, 8]


def test_many_engines_end_together() -> None:
    # A fifth has half the speed that the partition assumed.
    k, n = 200, 40_000
    rng = np.random.default_rng(0)
    tree = tree_of([[i // 4] * 3 + [i] for i in range(n)])
    work = rng.lognormal(3.0, 0.7, n)
    shard = rng.integers(0, k, n // 4).repeat(4)
    speed = np.where(rng.permutation(k) < k // 5, 0.5, 1.0)
    found = moved(
        tree, work.tolist(), shard.tolist(), num_shards=k, speed=speed.tolist()
    )
    ends = seconds(tree, work.tolist(), found, [], k) / speed
    before = seconds(tree, work.tolist(), shard.tolist(), [], k) / speed
    assert before.max() > 2 * before.mean()
    assert ends.max() <= 1.01 * ends.mean()


def test_shards_keep_their_numbers() -> None:
    tree = tree_of([[i] for i in range(3)])
    with pytest.raises(InputError, match="shard 2 of 2"):
        moved(tree, [5.0] * 3, [0, 1, 2])
    with pytest.raises(ConfigError, match="speeds of 3 engines for 2 shards"):
        moved(tree, [5.0] * 3, [0, 1, 1], speed=[1.0, 1.0, 1.0])


@pytest.mark.parametrize("speed", [None, 1.0, 0.3])
def test_equal_engines_move_what_they_always_moved(speed: float | None) -> None:
    digest = hashlib.sha256()
    for seed in range(8):
        prompts, output_len = mixed_job(seed)
        tree, n = tree_of(prompts), len(prompts)
        lengths = np.array(output_len, np.float64)
        chance = random.Random(seed)
        for k in (2, 3, 8, 64):
            for exponent in (1.0, 1.47):
                cost = CostModel(
                    token_time_s=2.0,
                    kv_read_time_s=2**-6,
                    interference_exponent=exponent,
                )
                sent = np.array([chance.random() < 0.3 for _ in range(n)])
                places = [
                    chance.randrange(k) if chance.random() < 0.5 else 0
                    for _ in range(n)
                ]
                far = [chance.randrange(40) for _ in range(n)]
                state = LeafState(
                    np.array(places, np.int32),
                    ~sent,
                    np.where(sent, 0.5, 1.0),
                    np.array(far, np.float64),
                )
                work = leaf_work(tree, cost, lengths, lengths**2)
                same = None if speed is None else np.full(k, speed)
                speeds = None if same is None else ShardSpeeds(same, same)
                found = rebalance(tree, cost, work, state, k, speeds)
                digest.update(found.tobytes())
    assert digest.hexdigest() == (
        "998be0f3479778c65b3be1821bfba91a8c3ca266c08e52fbdaf4b1d40fe4214f"
    )


def test_work_is_not_saved_at_the_price_of_a_later_end() -> None:
    tree = tree_of(list(family(0, 3, 2)))
    shard = [0, 0, 1]  # in one shard, they would compute their prefix once
    found = moved(tree, [0.0] * 3, shard, num_shards=2, sent=[], speed=[0.1, 0.1])
    old, new = (seconds(tree, [0.0] * 3, each, [], 2) for each in (shard, found))
    assert max(new) <= max(old)


@settings(deadline=None, max_examples=examples(300))
@given(st.data())
def test_engines_of_any_speed(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=10))
    prompts = [
        each
        for i, size in enumerate(sizes)
        for each in family(i, size, data.draw(st.integers(0, 30)))
    ]
    tree, n = tree_of(prompts), len(prompts)
    # The job had ``before`` engines. Some have left, and others have joined.
    before = data.draw(st.integers(1, 5) | st.integers(65, 80))
    k = before + data.draw(st.integers(0, 3))
    one = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])
    speed = np.array(data.draw(st.lists(one, min_size=k, max_size=k)))
    ints = st.lists(st.integers(0, 500), min_size=n, max_size=n)
    work = [float(each) for each in data.draw(ints)]
    shard = [each % before for each in data.draw(ints)]
    sent = sorted(data.draw(st.sets(st.integers(0, n - 1))))
    found = moved(tree, work, shard, num_shards=k, sent=sent, speed=speed.tolist())
    assert len(found) == n and all(0 <= each < k for each in found)
    assert all(found[leaf] == shard[leaf] for leaf in sent)
    if not speed.any():
        assert found == shard
        return
    there = speed > 0
    assert all(there[found[leaf]] for leaf in set(range(n)) - set(sent))
    if all(there[shard]):
        old, new = (
            seconds(tree, work, each, sent, k)[there] / speed[there]
            for each in (shard, found)
        )
        assert new.max() <= old.max() * (1 + 1e-9)


@settings(deadline=None, max_examples=examples(150))
@given(st.data())
def test_moves_only_help(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    prompts = [
        each
        for i, size in enumerate(sizes)
        for each in family(i, size, data.draw(st.integers(0, 30)))
    ]
    n, k = len(prompts), data.draw(st.integers(2, 4))
    tree = tree_of(prompts)
    ints = st.lists(st.integers(0, 50), min_size=n, max_size=n)
    work = [float(each) for each in data.draw(ints)]
    shard = [each % k for each in data.draw(ints)]
    sent = sorted(data.draw(st.sets(st.integers(0, n - 1))))
    found = moved(tree, work, shard, num_shards=k, sent=sent)
    assert all(found[leaf] == shard[leaf] for leaf in sent)
    before, after = (seconds(tree, work, each, sent, k) for each in (shard, found))
    assert after.max() <= before.max() * (1 + 1e-9)
    # What is computed again takes no longer than what that saves.
    gain = before.max() - after.max()
    assert after.sum() - before.sum() <= k * gain + 1e-6


def seconds(
    tree: PrefixTree, work: Sequence[float] | np.ndarray, shard: Sequence[int], sent: Sequence[int],
    k: int,
) -> np.ndarray:  # fmt: skip
    """The time of each shard, counted leaf by leaf."""
    total = np.zeros(k)
    computed: list[set[int]] = [set() for _ in range(k)]
    for leaf in sent:
        computed[shard[leaf]] |= set(path(tree, leaf))
    for leaf in range(tree.num_requests):
        s = shard[leaf]
        total[s] += work[leaf]
        if leaf not in sent:
            own = tree.input_len[leaf] - tree.depth[tree.leaf_parent[leaf]]
            new = [node for node in path(tree, leaf) if node not in computed[s]]
            computed[s] |= set(new)
            total[s] += own + sum(
                tree.depth[node] - tree.depth[tree.parent[node]] for node in new
            )
    return total


def path(tree: PrefixTree, leaf: int) -> list[int]:
    nodes, node = [], int(tree.leaf_parent[leaf])
    while node > 0:
        nodes.append(node)
        node = int(tree.parent[node])
    return nodes
