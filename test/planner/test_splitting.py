"""Subtrees taken apart, against all ways to do so on small trees."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from order_parts.algorithm_2 import split_by_threshold
from plan_jobs import PROMPTS, Bools, Prompt, prefixes, repeated, tree_of

from sglang_batch.planner.ordering.dual_scan_order import split_in_two
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree

SMALL = st.lists(
    st.lists(st.integers(0, 1), max_size=6).map(tuple), min_size=1, max_size=8
)
SEEDS = st.integers(0, 99)


def leaf_prompts(tree: PrefixTree, prompts: list[Prompt]) -> list[Prompt]:
    return [prompts[i] for i in tree.order]


def tokens_twice(leaves: list[Prompt], right: Bools) -> int:
    sides = [[p for p, r in zip(leaves, right, strict=True) if r == s] for s in (0, 1)]
    return repeated(sides)


def kinds(n: int, seed: int, most: int = 20) -> tuple[Bools, np.ndarray]:
    """Which leaves are right, and whole-numbered weights."""
    rng = np.random.default_rng(seed)
    return rng.random(n) < rng.random(), rng.integers(1, most, n).astype(np.float64)


def hull(points: set[tuple[int, float]]) -> list[tuple[int, float]]:
    """Corners of the lower left convex hull, from the left."""
    corners: list[tuple[int, float]] = []
    for x, y in sorted(points):
        if corners and y >= corners[-1][1]:
            continue
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y0 - y1) * (x - x1) > (y1 - y) * (x1 - x0):
                break
            corners.pop()
        corners.append((x, y))
    return corners


# --- In two.


@settings(deadline=None, max_examples=examples(120))
@given(SMALL, SEEDS, st.integers(0, 25))
def test_the_split_is_the_best_of_all_for_its_price(
    prompts: list[Prompt], seed: int, budget: int
) -> None:
    tree = tree_of(prompts)
    is_right, weight = kinds(len(prompts), seed)
    right, extra = split_in_two(tree, is_right, weight, budget)
    leaves = leaf_prompts(tree, prompts)
    assert extra == tokens_twice(leaves, right) <= budget

    def harm(sides: Bools) -> float:
        return float(weight[sides != is_right].sum())

    choices = [np.array(sides) for sides in product([False, True], repeat=len(leaves))]
    points = {(tokens_twice(leaves, sides), harm(sides)) for sides in choices}
    # What is best for some price of harm is a corner of the hull of all choices.
    affordable = [corner for corner in hull(points) if corner[0] <= budget]
    assert (extra, harm(right)) == affordable[-1]


@settings(deadline=None)
@given(PROMPTS, SEEDS)
def test_without_a_budget_every_subtree_is_on_one_side(
    prompts: list[Prompt], seed: int
) -> None:
    tree = tree_of(prompts)
    is_right, weight = kinds(len(prompts), seed)
    right, extra = split_in_two(tree, is_right, weight, 0)
    assert extra == 0
    for node in range(1, tree.num_nodes):
        below = slice(tree.leaf_begin[node], tree.leaf_end[node])
        assert len(set(right[below].tolist())) == 1
        # At least as much of it belongs there as does not.
        if tree.parent[node] == 0:
            wrong = right[below] != is_right[below]
            assert weight[below][wrong].sum() <= weight[below][~wrong].sum()
    # What hangs from the root shares nothing, or it is a prompt of no token.
    alone = tree.leaf_parent == 0
    if len(set(right.tolist())) == 2:
        assert np.array_equal(right[alone], is_right[alone])


@settings(deadline=None)
@given(PROMPTS, SEEDS)
def test_with_budget_enough_every_request_is_on_its_own_side(
    prompts: list[Prompt], seed: int
) -> None:
    tree = tree_of(prompts)
    is_right, weight = kinds(len(prompts), seed)
    right, extra = split_in_two(tree, is_right, weight * 1e-9, 10**6)
    assert np.array_equal(right, is_right)
    assert extra == tokens_twice(leaf_prompts(tree, prompts), is_right)


@settings(deadline=None)
@given(PROMPTS, SEEDS, st.sampled_from([1e-12, 1e-6, 1e6]), st.integers(0, 20))
def test_the_unit_of_harm_does_not_matter(
    prompts: list[Prompt], seed: int, unit: float, budget: int
) -> None:
    tree = tree_of(prompts)
    is_right, weight = kinds(len(prompts), seed)
    weight = weight + np.sqrt(np.arange(len(prompts)) + 2.0)  # no ties
    right, extra = split_in_two(tree, is_right, weight, budget)
    scaled, extra_scaled = split_in_two(tree, is_right, weight * unit, budget)
    assert np.array_equal(right, scaled)
    assert extra == extra_scaled


def test_the_dearest_outliers_are_taken_out_first() -> None:
    # Ten tokens to take out either. The budget is for one.
    prompts = [
        *[(1,) * 10 + (i,) for i in range(20, 24)],
        *[(2,) * 10 + (i,) for i in range(20, 24)],
    ]
    is_right = np.array([False] * 3 + [True] + [False] * 3 + [True])
    weight = np.array([5.0, 5, 5, 3, 5, 5, 5, 4])
    tree = tree_of(prompts)
    for budget, expected, extra in [(9, [], 0), (19, [7], 10), (20, [3, 7], 20)]:
        right, found = split_in_two(tree, is_right, weight, budget)
        assert (np.flatnonzero(right).tolist(), found) == (expected, extra)


@pytest.mark.parametrize("kind", [False, True])
@pytest.mark.parametrize("budget", [0, 100])
def test_one_kind_only_stays_whole(kind: bool, budget: int) -> None:
    tree = tree_of([(1, 1, i) for i in range(9)])
    right, extra = split_in_two(tree, np.full(9, kind), np.ones(9), budget)
    assert (right.tolist(), extra) == ([kind] * 9, 0)


def test_nothing_to_split() -> None:
    nothing = np.zeros(0)
    right, extra = split_in_two(tree_of([]), nothing.astype(bool), nothing, 0)
    assert (right.tolist(), right.dtype, extra) == ([], np.bool_, 0)


# --- By the paper's threshold.


def units_of(unit: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(np.flatnonzero(unit == u).tolist()) for u in unit}


def algorithm_2(tree: PrefixTree, threshold: float) -> set[tuple[int, ...]]:
    """The units of one threshold, by the paper's recursion."""
    units: set[tuple[int, ...]] = set()

    def visit(node: int, threshold: float) -> None:
        nodes = np.flatnonzero(tree.parent == node).tolist()
        leaves = np.flatnonzero(tree.leaf_parent == node).tolist()
        if tree.depth[node] * (len(nodes) + len(leaves)) > threshold:
            units.add(tuple(range(tree.leaf_begin[node], tree.leaf_end[node])))
            return
        units.update((leaf,) for leaf in leaves)
        for child in nodes:
            visit(child, threshold / (len(nodes) + len(leaves)))

    visit(0, threshold)
    return units


def breakpoints(tree: PrefixTree) -> list[float]:
    """All thresholds at which a node comes to be opened, and 0."""
    children = [
        int((tree.parent == node).sum() + (tree.leaf_parent == node).sum())
        for node in range(tree.num_nodes)
    ]
    factor, least = [1], [0]
    for node in range(1, tree.num_nodes):
        above = int(tree.parent[node])
        factor.append(factor[above] * children[above])
        needed = int(tree.depth[node]) * children[node] * factor[node]
        least.append(max(least[above], needed))
    return [each + 1e-6 for each in sorted(set(least))]


@settings(deadline=None, max_examples=examples(120))
@given(PROMPTS, st.sampled_from([1.0, 0.99, 0.9, 0.7, 0.5, 0.2, 0.0]))
def test_units_are_those_of_the_largest_threshold_that_keeps_enough(
    prompts: list[Prompt], kept: float
) -> None:
    tree = tree_of(prompts)
    leaves = leaf_prompts(tree, prompts)
    unit, extra = split_by_threshold(tree, kept)
    found = units_of(unit)

    def extra_of(units: set[tuple[int, ...]]) -> int:
        return repeated([[leaves[leaf] for leaf in each] for each in units])

    assert unit.shape == (len(prompts),)
    assert extra == extra_of(found)
    shared = sum(map(len, prompts)) - len(prefixes(prompts))
    allowed = (1.0 - kept) * shared
    splits = [algorithm_2(tree, threshold) for threshold in breakpoints(tree)]
    assert found == [split for split in splits if extra_of(split) <= allowed][-1]


@settings(deadline=None)
@given(PROMPTS)
def test_keeping_less_makes_finer_units(prompts: list[Prompt]) -> None:
    tree = tree_of(prompts)
    before, extra_before = split_by_threshold(tree, 1.0)
    assert extra_before == 0
    for kept in (0.95, 0.8, 0.5, 0.0):
        unit, extra = split_by_threshold(tree, kept)
        assert extra >= extra_before
        together = {(int(u), int(b)) for u, b in zip(unit, before, strict=True)}
        assert len(together) == len(set(unit.tolist()))  # within one earlier unit each
        before, extra_before = unit, extra


def test_costly_nodes_stay_whole() -> None:
    cheap = [(1, i) for i in range(5, 8)]
    costly = [(2,) * 100 + (i,) for i in range(5, 8)]
    tree = tree_of([*cheap, *costly])
    # Of 2 * 1 + 2 * 100 shared tokens, opening the first costs 2.
    for kept, sizes, extra in [
        (1.0, [3, 3], 0),
        (0.985, [1, 1, 1, 3], 2),
        (0.5, [1, 1, 1, 3], 2),
        (0.0, [1] * 6, 202),
    ]:
        unit, found = split_by_threshold(tree, kept)
        assert sorted(map(len, units_of(unit))) == sizes
        assert found == extra


def test_nothing_to_take_apart() -> None:
    unit, extra = split_by_threshold(tree_of([]))
    assert (unit.tolist(), extra) == ([], 0)
