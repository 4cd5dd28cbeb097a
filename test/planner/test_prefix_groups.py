"""Prefix groups: the paper's example, closed forms, and all groupings of small trees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.planner.prefixes.prefix_groups import (
    PrefixGroups,
    group_order,
    prefix_groups,
)
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9)


def tree_of(prompts: Sequence[Sequence[int]]) -> PrefixTree:
    tokens = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
    return build_prefix_tree(tokens, np.cumsum([0, *map(len, prompts)], dtype=np.int64))


def saved_tokens(groups: PrefixGroups) -> int:
    return int(((groups.sizes - 1) * groups.prefix_len).sum())


def as_lists(tree: PrefixTree, groups: PrefixGroups) -> list[tuple[int, list[int]]]:
    """Prefix length and requests of each group."""
    return [
        (int(length), sorted(tree.order[groups.group_of == group].tolist()))
        for group, length in enumerate(groups.prefix_len)
    ]


def most_tokens_saved(tree: PrefixTree) -> int:
    """The best of all choices of nodes. A leaf takes the deepest chosen one above."""
    num_nodes = len(tree.parent)
    best = 0
    for choice in product([False, True], repeat=num_nodes - 1):
        chosen = (False, *choice)
        takes = [0] * num_nodes
        for node in range(1, num_nodes):
            takes[node] = node if chosen[node] else takes[tree.parent[node]]
        of_leaf = [int(tree.depth[takes[node]]) for node in tree.leaf_parent]
        computed = sum(
            int(tree.depth[node]) for node in range(num_nodes) if chosen[node]
        )
        best = max(best, sum(of_leaf) - computed)
    return best


def test_the_papers_example() -> None:
    # BatchLLM, Fig. 4. The text says: b, one token, is shared by prompts 2 to 6, prompts
    # 4 and 5 share their first 8 tokens, the inner node below b is forked first, then b.
    # The figure's other node sizes are not in the text. 1 + 2 + 5 tokens make the 8.
    b = [1]
    inner = [*b, 10, 11]
    eight = [*inner, 20, 21, 22, 23, 24]
    prompts = [
        [0, 0, 0],
        [*b, 30, 31],
        [*inner, 40],
        [*eight, 50],
        [*eight, 51, 52],
        [*b, 60],
    ]
    tree = tree_of(prompts)
    groups = prefix_groups(tree)
    assert sorted(as_lists(tree, groups)) == [(0, [0]), (1, [1, 2, 5]), (8, [3, 4])]
    # 4 tokens for b alone, 8 for the pair, and b still saves 2 for the other three.
    assert saved_tokens(groups) == 10 == most_tokens_saved(tree)


@pytest.mark.parametrize(
    ("prefix", "distinct", "degree", "saving"),
    [(2000, 200, 16, 0.852), (16_000, 200, 16, 0.926), (2000, 1000, 4, 0.5)],
)
def test_saving_of_equal_groups_is_the_closed_form(
    prefix: int, distinct: int, degree: int, saving: float
) -> None:
    # The savings that the paper reports (section 6.3.1) for the first two.
    n = 4 * degree
    rng = np.random.default_rng(0)
    shared = rng.integers(1000, 30_000, (n // degree, prefix), dtype=np.int32)
    own = rng.integers(1000, 30_000, (n, distinct), dtype=np.int32)
    shared[:, 0] = np.arange(n // degree)
    own[:, 0] = np.arange(n)
    prompts = np.concatenate((np.repeat(shared, degree, axis=0), own), axis=1)
    prompts = prompts[rng.permutation(n)]
    offsets = np.arange(n + 1, dtype=np.int64) * (prefix + distinct)
    tree = build_prefix_tree(prompts.ravel(), offsets)
    groups = prefix_groups(tree)
    computed = n * distinct + n / degree * prefix
    exact = 1 - computed / (n * (prefix + distinct))
    assert saved_tokens(groups) / tree.num_tokens == pytest.approx(exact)
    assert exact == pytest.approx(saving, abs=5e-4)
    assert groups.sizes.tolist() == [degree] * (n // degree)


def test_a_short_system_prompt_gives_way_to_the_documents() -> None:
    # The shape of the paper's industry workload: one instruction, then documents.
    document = {d: [1, 2, 3, *range(100 * d, 100 * d + 40)] for d in (1, 2)}
    prompts = [[*document[d], 900 + i] for d in (1, 2) for i in range(3)]
    tree = tree_of([*prompts, [1, 2, 3, 999]])
    assert as_lists(tree, prefix_groups(tree)) == [
        (43, [0, 1, 2]),
        (43, [3, 4, 5]),
        (0, [6]),
    ]


@pytest.mark.parametrize("short_one", [0, 3])
def test_a_child_that_keeps_no_leaf_costs_nothing(short_one: int) -> None:
    # A token more for the short pair is not worth the 3 above it, until the long pair
    # has left and nobody else would use those 3, whichever pair is looked at first.
    above = [1, 1, 1]
    long_pair = [[*above, 2, 2, 2, 2, i] for i in (5, 6)]
    short_pair = [[*above, short_one, i] for i in (7, 8)]
    tree = tree_of([*long_pair, *short_pair])
    found = as_lists(tree, prefix_groups(tree))
    assert sorted(found) == [(4, [2, 3]), (7, [0, 1])]


@settings(deadline=None, max_examples=examples(300))
@given(PROMPTS)
def test_groups_are_a_partition_by_shared_prefix(prompts: list[list[int]]) -> None:
    tree = tree_of(prompts)
    groups = prefix_groups(tree)
    assert groups.group_of.dtype == groups.prefix_len.dtype == np.int32
    assert groups.sizes.dtype == np.int64
    assert (
        groups.sizes.tolist() == np.bincount(groups.group_of).tolist()[: len(prompts)]
    )
    # Numbered by their first leaf.
    seen = list(dict.fromkeys(groups.group_of.tolist()))
    assert seen == list(range(len(groups.sizes)))
    for length, requests in as_lists(tree, groups):
        prefixes = {tuple(prompts[i][:length]) for i in requests}
        assert len(prefixes) == 1
        assert len(prefixes.pop()) == length
        assert length == 0 or len(requests) > 1


@settings(deadline=None, max_examples=examples(300))
@given(PROMPTS)
def test_saving_is_between_the_first_level_and_the_best(
    prompts: list[list[int]],
) -> None:
    tree = tree_of(prompts)
    first_level = [node for node, up in enumerate(tree.parent) if up == 0]
    plain = sum(
        int((tree.leaf_end[node] - tree.leaf_begin[node] - 1) * tree.depth[node])
        for node in first_level
    )
    saved = saved_tokens(prefix_groups(tree))
    assert plain <= saved <= most_tokens_saved(tree)
    assert saved <= int(tree.lcp.sum())


def test_order_by_output_per_prefill() -> None:
    # Prefills: 4 + 1 + 1, 3, and 2 tokens.
    tree = tree_of([[1, 1, 1, 1, 2], [3, 3, 3], [1, 1, 1, 1, 3], [9, 9]])
    groups = prefix_groups(tree)
    # R: 60 / 6, 6 / 3, 10 / 2.
    output_len = np.array([50.0, 6.0, 10.0, 10.0])
    assert group_order(tree, groups, output_len).tolist() == [0, 2, 3, 1]


def test_equal_groups_go_by_first_leaf() -> None:
    tree = tree_of([[5], [3], [4]])
    assert group_order(tree, prefix_groups(tree), np.ones(3)).tolist() == [1, 2, 0]


@settings(deadline=None)
@given(PROMPTS)
def test_order_keeps_groups_together_in_leaf_order(prompts: list[list[int]]) -> None:
    tree = tree_of(prompts)
    groups = prefix_groups(tree)
    position = {int(request): i for i, request in enumerate(tree.order)}
    order = group_order(tree, groups, np.ones(len(prompts)))
    leaves = [position[int(request)] for request in order]
    assert sorted(leaves) == list(range(len(prompts)))
    runs = [groups.group_of[leaf] for leaf in leaves]
    starts = [g for i, g in enumerate(runs) if i == 0 or runs[i - 1] != g]
    assert len(starts) == len(set(starts))
    for before, after in pairwise(leaves):
        same_group = groups.group_of[before] == groups.group_of[after]
        assert before < after or not same_group


@pytest.mark.parametrize("prompts", [[], [[]], [[], []], [[1]]])
def test_nothing_to_share(prompts: list[list[int]]) -> None:
    tree = tree_of(prompts)
    groups = prefix_groups(tree)
    assert saved_tokens(groups) == 0
    assert groups.prefix_len.tolist() == [0] * len(prompts)
    order = group_order(tree, groups, np.ones(len(prompts)))
    assert sorted(order.tolist()) == list(range(len(prompts)))
