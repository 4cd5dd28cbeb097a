"""BlendServe's Algorithm 2, which ``bench_order.py`` compares with our dual-scan order."""

from __future__ import annotations

import numpy as np

from sglang_batch.planner.compiled import jit
from sglang_batch.planner.costs.cost_model import CostModel, compute_density
from sglang_batch.planner.costs.tree_work import LeafWork, leaf_compute, root_density
from sglang_batch.planner.ordering.dual_scan_order import smooth_density
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.ordering.tree_order import layer_sort
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree
from sglang_batch.planner.requests import Int32s, Int64s

_BISECTIONS = 40


def algorithm_2_order(
    tree: PrefixTree, cost: CostModel, work: LeafWork, min_sharing_kept: float
) -> Order:
    """Units in falling density, each sorted layer by layer.

    One pass meets both stop conditions of the paper's loop: units below the root are in
    order (C1), and every further cut inside them costs more than the threshold (C2).
    """
    if tree.num_requests == 0:
        return Order(tree.order, density=np.zeros(0))
    unit, extra = split_by_threshold(tree, min_sharing_kept)
    compute = leaf_compute(tree, cost, work)
    n = tree.num_requests
    density = compute_density(
        np.bincount(unit, compute, n), np.bincount(unit, work.memory_s, n)
    )[unit]
    inside = np.empty(n, np.int64)
    inside[layer_sort(tree, cost, work)] = np.arange(n)
    leaves = np.lexsort((inside, -density))
    return Order(
        requests=tree.order[leaves],
        density=smooth_density(compute[leaves], work.memory_s[leaves]),
        num_left=int((density >= root_density(tree, cost, work)).sum()),
        repeated_tokens=extra,
    )


def split_by_threshold(
    tree: PrefixTree, min_sharing_kept: float = 0.99
) -> tuple[Int64s, int]:
    """The units that are sorted at the root.

    A node is opened if computing its prefix once per child is within the threshold. Its
    children become units or are opened in turn, with the threshold divided among them.
    (The paper's listing prints the test once with ``>`` for keeping a node whole, its
    text the other way round.) The threshold is the largest that keeps ``min_sharing_kept`` of
    the shared tokens.

    Returns:
        The number of each leaf's unit, int64 ``[n]``, and the tokens computed again if
        no two units of one node are adjacent in the order.
    """
    children = np.bincount(tree.parent[1:], minlength=tree.num_nodes) + np.bincount(
        tree.leaf_parent, minlength=tree.num_nodes
    )
    shared = tree.num_tokens - tree.num_unique_tokens
    allowed = (1.0 - min_sharing_kept) * shared

    def split(threshold: float) -> tuple[Int64s, int]:
        return _units_by_threshold(
            tree.parent, tree.depth, tree.leaf_parent, tree.leaf_begin,
            children, threshold,
        )  # fmt: skip

    low, high = 0.0, 1.0
    while split(high)[1] <= allowed and high < 1e18:
        high *= 16.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if split(middle)[1] <= allowed else (low, middle)
    return split(low)


@jit
def _units_by_threshold(
    parent: Int32s, depth: Int32s, leaf_parent: Int32s, leaf_begin: Int64s,
    children: Int64s, threshold: float,
) -> tuple[Int64s, int]:  # fmt: skip
    """Units and tokens as returned by :func:`split_by_threshold`."""
    m = len(parent)
    budget = np.zeros(m)
    unit_of_node = np.full(m, -1, np.int64)
    budget[0] = threshold
    for node in range(m):
        above = parent[node]
        if node > 0 and unit_of_node[above] >= 0:
            unit_of_node[node] = unit_of_node[above]
            continue
        if node > 0:
            budget[node] = budget[above] / children[above]
        if depth[node] * children[node] > budget[node]:
            unit_of_node[node] = leaf_begin[node]
    unit = np.empty(len(leaf_parent), np.int64)
    units_below = np.zeros(m, np.int64)
    for leaf in range(len(unit)):
        unit[leaf] = unit_of_node[leaf_parent[leaf]]
        if unit[leaf] < 0:
            unit[leaf] = leaf
            units_below[leaf_parent[leaf]] += 1
    # All units below an opened node compute the node's own tokens, not only one.
    extra = 0
    for node in range(m - 1, 0, -1):
        above = parent[node]
        if unit_of_node[node] < 0:
            extra += (depth[node] - depth[above]) * (units_below[node] - 1)
            units_below[above] += units_below[node]
        elif unit_of_node[above] < 0:
            units_below[above] += 1
    return unit, extra
