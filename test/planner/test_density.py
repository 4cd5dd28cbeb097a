"""Compute density over the tree, against sets of prefixes and nested sorting."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_jobs import (
    ATTENTIVE,
    COST,
    PROMPTS,
    Prompt,
    outputs_of,
    prefixes,
    tree_of,
    work_of,
)
from prefix_tree_check import shared_with_previous

from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.costs.tree_work import (
    LeafWork,
    leaf_compute,
    leaf_densities,
    leaf_work,
    node_work,
    read_len,
    root_density,
)
from sglang_batch.planner.ordering.dual_scan_order import smooth_density
from sglang_batch.planner.ordering.tree_order import (
    depth_first,
    layer_sort,
    sort_children,
)
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree

SEEDS = st.integers(0, 99)
COSTS = st.sampled_from([COST, ATTENTIVE])


def prefill_s(prompts: list[Prompt], cost: CostModel) -> float:
    # Attention over a prompt costs the square: 2 d - 1 more for its d-th token.
    return sum(
        cost.token_time_s + cost.attention_time_s * (2 * len(prefix) - 1)
        for prefix in prefixes(prompts)
    )


# --- Work at leaves and nodes.


def test_leaf_work_by_hand_is_in_tree_order() -> None:
    tree = tree_of([(2, 2), (1,)])  # leaf 0 is request 1
    est_output_len, est_output_len_sq = np.array([10.0, 4.0]), np.array([300.0, 16.0])
    work = leaf_work(tree, COST, est_output_len, est_output_len_sq)
    assert work.decode_s.tolist() == [4 * 2.0, 10 * 2.0]
    assert work.memory_s.tolist() == [(1 * 4 + 8) * 0.5, (2 * 10 + 150) * 0.5]
    taken = work.take(np.array([1]))
    assert (taken.decode_s.tolist(), taken.memory_s.tolist()) == ([20.0], [85.0])


@settings(deadline=None, max_examples=examples(150))
@given(PROMPTS, SEEDS, COSTS)
def test_node_work_counts_each_prefix_below_once(
    prompts: list[Prompt], seed: int, cost: CostModel
) -> None:
    tree = tree_of(prompts)
    output_len = outputs_of(len(prompts), seed)
    compute, memory = node_work(tree, cost, work_of(tree, output_len, cost))
    assert compute.shape == memory.shape == (tree.num_nodes,)
    for node in range(tree.num_nodes):
        below = tree.order[tree.leaf_begin[node] : tree.leaf_end[node]]
        decode = 2.0 * output_len[below].sum()
        reads = sum(
            len(prompts[i]) * output_len[i] + output_len[i] ** 2 / 2 for i in below
        )
        assert compute[node] == prefill_s([prompts[i] for i in below], cost) + decode
        assert memory[node] == 0.5 * reads


@settings(deadline=None)
@given(PROMPTS.filter(any), SEEDS)
def test_root_density_is_the_papers_formula(prompts: list[Prompt], seed: int) -> None:
    # rho = (1 - s) T_comp / T_mem, s the shared ones of all tokens (BlendServe 5.1).
    tree = tree_of(prompts)
    output_len = outputs_of(len(prompts), seed)
    input_len = np.array([len(prompt) for prompt in prompts])
    compute = COST.compute_time_s(input_len, output_len).sum()
    memory = COST.memory_time_s(input_len, output_len).sum()
    num_tokens = input_len.sum() + output_len.sum()
    shared = (input_len.sum() - len(prefixes(prompts))) / num_tokens
    found = root_density(tree, COST, work_of(tree, output_len))
    assert found == pytest.approx((1 - shared) * compute / memory)


@settings(deadline=None)
@given(PROMPTS, SEEDS, COSTS)
def test_leaves_share_out_all_of_the_jobs_compute(
    prompts: list[Prompt], seed: int, cost: CostModel
) -> None:
    tree = tree_of(prompts)
    work = work_of(tree, outputs_of(len(prompts), seed), cost)
    compute = leaf_compute(tree, cost, work)
    total, _ = node_work(tree, cost, work)
    assert compute.shape == (len(prompts),)
    assert compute.sum() == pytest.approx(total[0])
    assert np.all(compute >= work.decode_s)
    densities = leaf_densities(tree, cost, work)
    assert (densities * work.memory_s).sum() == pytest.approx(total[0])


def test_a_prefix_is_shared_out_evenly() -> None:
    # 4 tokens for three requests, 2 more for two of these.
    prompts = [(1, 1, 1, 1, 2, 2, 3), (1, 1, 1, 1, 2, 2), (1, 1, 1, 1), (5, 5)]
    tree = tree_of(prompts)
    compute = leaf_compute(tree, COST, work_of(tree, [0.0] * 4))
    by_request = dict(zip(tree.order.tolist(), compute.tolist(), strict=True))
    tokens = {0: 4 / 3 + 2 / 2 + 1, 1: 4 / 3 + 2 / 2, 2: 4 / 3, 3: 2.0}
    assert by_request == pytest.approx({i: 2.0 * t for i, t in tokens.items()})


@pytest.mark.parametrize("cost", [COST, ATTENTIVE], ids=["tokens", "attention"])
def test_equal_requests_have_the_density_of_the_job(cost: CostModel) -> None:
    tree = tree_of([(*range(10), i) for i in range(50, 58)])
    work = work_of(tree, [7.0] * 8, cost)
    densities = leaf_densities(tree, cost, work)
    assert densities == pytest.approx(root_density(tree, cost, work))


def test_density_without_reads_is_infinite_and_without_work_one() -> None:
    tree = tree_of([(), (1,)])
    work = work_of(tree, [0.0, 0.0])
    assert leaf_densities(tree, COST, work).tolist() == [1.0, math.inf]
    assert root_density(tree, COST, work) == math.inf
    nothing = tree_of([])
    assert root_density(nothing, COST, work_of(nothing, [])) == 1.0


def test_a_cost_may_be_a_whole_number() -> None:
    tree = tree_of([(1, 2), (1, 3)])
    whole = CostModel(token_time_s=2, kv_read_time_s=1)
    same = CostModel(token_time_s=2.0, kv_read_time_s=1.0)
    expected = root_density(tree, same, work_of(tree, [1.0, 2.0], same))
    assert root_density(tree, whole, work_of(tree, [1.0, 2.0], whole)) == expected


# --- The sorted tree.


def nested_sort(tree: PrefixTree, prompts: list[Prompt], output_len: np.ndarray,
                cost: CostModel) -> list[int]:  # fmt: skip
    """Leaf positions: children by falling density, ties in the tree's order."""

    def density(leaves: range) -> float:
        below = [tree.order[leaf] for leaf in leaves]
        compute = prefill_s([prompts[i] for i in below], cost)
        compute += sum(cost.token_time_s * output_len[i] for i in below)
        reads = sum(
            len(prompts[i]) * output_len[i] + output_len[i] ** 2 / 2 for i in below
        )
        memory = cost.kv_read_time_s * reads
        return compute / memory if memory else (math.inf if compute else 1.0)

    def walk(node: int) -> list[int]:
        children: list[tuple[float, int, list[int]]] = []
        for child in np.flatnonzero(tree.parent == node).tolist():
            leaves = range(tree.leaf_begin[child], tree.leaf_end[child])
            children.append((-density(leaves), leaves[0], walk(child)))
        for leaf in np.flatnonzero(tree.leaf_parent == node).tolist():
            children.append((-density(range(leaf, leaf + 1)), leaf, [leaf]))
        return [leaf for *_, leaves in sorted(children) for leaf in leaves]

    return walk(0)


@settings(deadline=None, max_examples=examples(200))
@given(PROMPTS, SEEDS, COSTS, st.sampled_from([0, 1, 30]))
def test_layer_sort_sorts_the_children_of_every_node(
    prompts: list[Prompt], seed: int, cost: CostModel, most: int
) -> None:
    tree = tree_of(prompts)
    output_len = outputs_of(len(prompts), seed, max(most, 1)) * (most > 0)
    leaves = layer_sort(tree, cost, work_of(tree, output_len, cost))
    assert leaves.dtype == np.int64
    assert leaves.tolist() == nested_sort(tree, prompts, output_len, cost)
    assert sorted(leaves.tolist()) == list(range(len(prompts)))
    # The structure stays, and with it all sharing.
    assert sum(shared_with_previous(tree, leaves.tolist())) == tree.lcp.sum()


def test_depth_first_with_equal_children_is_the_trees_order() -> None:
    tree = tree_of([(1, 1), (1, 2), (3,), (1, 1, 5), (), (1, 1)])
    children, begin = sort_children(tree, np.zeros(tree.num_nodes - 1), np.zeros(6))
    assert sorted(children.tolist()) == list(range(tree.num_nodes - 1 + 6))
    assert (begin[0], begin[-1]) == (0, len(children))
    assert depth_first(children, begin, tree.num_nodes).tolist() == list(range(6))


def test_sorting_a_chain_of_nested_prompts() -> None:
    n = 2_000
    tree = tree_of([(7,) * k for k in range(n)])
    work = LeafWork(np.ones(n), np.ones(n))
    leaves = layer_sort(tree, COST, work)
    assert sorted(leaves.tolist()) == list(range(n))
    assert sum(shared_with_previous(tree, leaves.tolist())) == tree.lcp.sum()


# --- Smoothing.


@settings(deadline=None)
@given(st.integers(1, 300), SEEDS, st.sampled_from([1, 3, 512]))
def test_smoothing_keeps_sums_and_makes_no_more_than_so_many_units(
    n: int, seed: int, num_units: int
) -> None:
    rng = np.random.default_rng(seed)
    compute, memory = rng.exponential(1.0, n) ** 3, rng.exponential(1.0, n) ** 3
    density = smooth_density(compute, memory, num_units)
    assert density.shape == (n,)
    assert (density * memory).sum() == pytest.approx(compute.sum())
    assert np.count_nonzero(np.diff(density)) < num_units


@settings(deadline=None)
@given(st.integers(1, 300), SEEDS, st.sampled_from([1, 3, 512]))
def test_smoothing_keeps_what_falls_falling(n: int, seed: int, num_units: int) -> None:
    rng = np.random.default_rng(seed)
    memory = rng.exponential(1.0, n)
    compute = np.sort(rng.exponential(1.0, n))[::-1] * memory
    density = smooth_density(compute, memory, num_units)
    assert np.all(density[1:] <= density[:-1] * (1 + 1e-9))


def test_smoothing_of_equal_densities_is_constant() -> None:
    memory = np.random.default_rng(0).exponential(1.0, 5_000)
    assert smooth_density(1.5 * memory, memory) == pytest.approx(1.5)


def test_smoothing_joins_small_neighbours_only() -> None:
    compute = np.array([4.0, 0.0, 0.0, 4.0, 1e-9, 1e-9])
    memory = np.array([1.0, 1e-9, 1e-9, 1.0, 2e-9, 2e-9])
    density = smooth_density(compute, memory, num_units=4)
    assert density[[0, 3]] == pytest.approx(4.0, rel=1e-6)
    assert smooth_density(compute, memory, 1) == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize("n", [0, 1, 7])
def test_smoothing_without_reads_or_work(n: int) -> None:
    nothing, something = np.zeros(n), np.ones(n)
    assert smooth_density(something, nothing).tolist() == [math.inf] * n
    assert smooth_density(nothing, something).tolist() == [0.0] * n
    assert smooth_density(nothing, nothing).tolist() == [1.0] * n


def test_a_prefix_that_is_read_once_is_shared_out() -> None:
    tree = tree_of([(1, 1, 1, 1, 8), (1, 1, 1, 1, 9), (2, 2)])
    each = CostModel(token_time_s=1.0, kv_read_time_s=1.0)
    once = replace(each, shared_kv_read_once=True)
    assert read_len(tree, each).tolist() == [5, 5, 2]
    assert read_len(tree, once).tolist() == [3, 3, 2]
    lengths = np.array([2.0, 2.0, 4.0])
    work = leaf_work(tree, once, lengths, lengths**2)
    assert work.memory_s.tolist() == [3 * 2 + 2, 3 * 2 + 2, 2 * 4 + 8]
