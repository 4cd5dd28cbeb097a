"""Requests that move between the shards of a running job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.costs.tree_work import LeafWork
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.sharding.rebalance import LeafState, rebalance

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
    found: list[int] = rebalance(tree, COST, decode, state, num_shards).tolist()
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


@settings(deadline=None, max_examples=150)
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
    tree: PrefixTree, work: Sequence[float], shard: Sequence[int], sent: Sequence[int],
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
