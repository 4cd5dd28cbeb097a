"""Compute density over the prefix tree, and the tree sorted by it.

Density is compute time over memory time: above 1 compute-intensive, below 1
memory-intensive. A shared prefix is computed once, so below a node compute is that of
the *unique* tokens (BlendServe 5.1: ``rho(R) = (1 - s) T_comp / T_mem``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .cost_model import CostModel, compute_density
from .jit import jit
from .prefix_tree import PrefixTree
from .requests import Floats, Int32s, Int64s


class LeafWork(NamedTuple):
    """Expected work of the requests at a tree's leaves, each float64 ``[n]``.

    decode_s: compute time of the tokens to be generated.
    memory_s: memory time of all their decode steps.
    """

    decode_s: Floats
    memory_s: Floats

    def take(self, leaves: Int64s) -> LeafWork:
        """The work at some of the leaves."""
        return LeafWork(self.decode_s[leaves], self.memory_s[leaves])


def leaf_work(
    tree: PrefixTree, cost: CostModel, estimate: Floats, estimate_sq: Floats
) -> LeafWork:
    """Expected work at the leaves from estimates by request, both float64 ``[n]``."""
    lengths = estimate[tree.order]
    memory = cost.memory_time_s(read_len(tree, cost), lengths, estimate_sq[tree.order])
    return LeafWork(lengths * cost.token_time_s, memory)


def read_len(tree: PrefixTree, cost: CostModel) -> Floats:
    """Prompt tokens that each request reads in a decode step, float64 ``[n]``.

    All of its prompt; with ``shared_kv_read_once`` (BlendServe 6.2) its part of it: a
    prefix is read once for all requests below it, here spread evenly as if they ran
    together.
    """
    if cost.shared_kv_read_once:
        return _spread(tree, 1)
    return tree.input_len.astype(np.float64)


def node_work(
    tree: PrefixTree, cost: CostModel, work: LeafWork
) -> tuple[Floats, Floats]:
    """Compute and memory time below each node, float64 ``[m]`` each, in seconds.

    A node's whole prefix counts once, as if nothing outside shared it.
    """
    prefill = tree.unique_tokens_below() * float(cost.token_time_s)
    if cost.attention_time_s:
        prefill += cost.attention_time_s * _attended(tree)
    return prefill + tree.subtree_sums(work.decode_s), tree.subtree_sums(work.memory_s)


def _attended(tree: PrefixTree) -> Floats:
    """Sum of p^2 below each node, shared prefixes once, float64 ``[m]``."""
    squares = tree.input_len.astype(np.float64) ** 2
    shared = tree.lcp.astype(np.float64) ** 2
    first = shared[tree.leaf_begin] if len(shared) else np.zeros(tree.num_nodes)
    return tree.subtree_sums(squares - shared) + first


def root_density(tree: PrefixTree, cost: CostModel, work: LeafWork) -> float:
    """Density of the whole job: what every step should have."""
    compute = tree.num_unique_tokens * cost.token_time_s + work.decode_s.sum()
    if cost.attention_time_s:
        squares = tree.input_len.astype(np.float64) ** 2
        shared = tree.lcp.astype(np.float64) ** 2
        compute += (squares - shared).sum() * cost.attention_time_s
    return float(compute_density(compute, work.memory_s.sum()))


def leaf_compute(tree: PrefixTree, cost: CostModel, work: LeafWork) -> Floats:
    """Compute time of each request where its neighbours share the cost of prefixes.

    float64 ``[n]`` in seconds. A prefix is spread evenly over the requests below it: a
    request whose prompt is mostly shared costs little more than what is its own.
    """
    compute: Floats = _spread(tree, 1) * cost.token_time_s + work.decode_s
    if cost.attention_time_s:
        compute += _spread(tree, 2) * cost.attention_time_s
    return compute


def _spread(tree: PrefixTree, power: int) -> Floats:
    """Each leaf's part of the sum of ``p ** power``, prefixes spread, float64 ``[n]``."""
    reached = tree.depth.astype(np.float64) ** power
    gained = reached - np.where(tree.parent >= 0, reached[tree.parent], 0.0)
    per_leaf = gained / np.maximum(tree.leaf_end - tree.leaf_begin, 1)
    above = _sum_over_path(tree.parent, per_leaf)
    own = tree.input_len.astype(np.float64) ** power - reached[tree.leaf_parent]
    spread: Floats = own + above[tree.leaf_parent]
    return spread


def leaf_densities(tree: PrefixTree, cost: CostModel, work: LeafWork) -> Floats:
    """Density of each request, shared prefixes spread; float64 ``[n]``."""
    return compute_density(leaf_compute(tree, cost, work), work.memory_s)


@jit
def _sum_over_path(parent: Int32s, values: Floats) -> Floats:
    """Sum of ``values`` over each node and those above it; parents come first."""
    sums = values.copy()
    for node in range(1, len(parent)):
        sums[node] += sums[parent[node]]
    return sums


def layer_sort(tree: PrefixTree, cost: CostModel, work: LeafWork) -> Int64s:
    """Leaf positions with every node's children in order of falling density.

    int64 ``[n]``. Children of one node are its nodes and the leaves that hang from it;
    the tree's structure, and with it the sharing, stays (BlendServe, Algorithm 1).
    """
    compute, memory = node_work(tree, cost, work)
    nodes = compute_density(compute, memory)
    own_tokens = tree.input_len.astype(np.float64)
    leaves = compute_density(
        own_tokens * cost.token_time_s
        + own_tokens**2 * cost.attention_time_s
        + work.decode_s,
        work.memory_s,
    )
    return depth_first(*sort_children(tree, nodes[1:], leaves), tree.num_nodes)


def sort_children(
    tree: PrefixTree, nodes: Floats, leaves: Floats
) -> tuple[Int64s, Int64s]:
    """Every node's children in order of falling value, ties in depth-first order.

    Args:
        nodes: float64 ``[m - 1]``, values of the nodes below the root.
        leaves: float64 ``[n]``.

    Returns:
        Children, int64 ``[m - 1 + n]``: 0..m-2 are the nodes below the root, then come
        the leaves; and where each node's children begin, int64 ``[m + 1]``.
    """
    return _sort_children(tree.parent, tree.leaf_parent, tree.leaf_begin, nodes, leaves)


# Fewer children than this are sorted by insertion.
_FEW = 32


@jit
def _sort_children(
    parent: Int32s, leaf_parent: Int32s, leaf_begin: Int64s, nodes: Floats,
    leaves: Floats,
) -> tuple[Int64s, Int64s]:  # fmt: skip
    m, n = len(parent), len(leaf_parent)
    begin = np.zeros(m + 1, np.int64)
    for node in range(1, m):
        begin[parent[node] + 1] += 1
    for leaf in range(n):
        begin[leaf_parent[leaf] + 1] += 1
    for node in range(m):
        begin[node + 1] += begin[node]
    # Nodes and leaves are met in depth-first order: a node before its first leaf.
    children = np.empty(m - 1 + n, np.int64)
    values = np.empty(m - 1 + n)
    free = begin[:-1].copy()
    node = 1
    for leaf in range(n):
        while node < m and leaf_begin[node] == leaf:
            at = free[parent[node]]
            children[at], values[at] = node - 1, -nodes[node - 1]
            free[parent[node]] += 1
            node += 1
        at = free[leaf_parent[leaf]]
        children[at], values[at] = m - 1 + leaf, -leaves[leaf]
        free[leaf_parent[leaf]] += 1
    for node in range(m):
        first, last = begin[node], begin[node + 1]
        if last - first >= _FEW:
            by_value = np.argsort(values[first:last], kind="mergesort")
            children[first:last] = children[first:last][by_value]
            continue
        for i in range(first + 1, last):
            value, child = values[i], children[i]
            j = i
            while j > first and values[j - 1] > value:
                values[j], children[j] = values[j - 1], children[j - 1]
                j -= 1
            values[j], children[j] = value, child
    return children, begin


@jit
def depth_first(children: Int64s, begin: Int64s, num_nodes: int) -> Int64s:
    """Leaves in the order of a walk that takes children as they are sorted."""
    num_leaves = len(children) - (num_nodes - 1)
    order = np.empty(num_leaves, np.int64)
    path = np.empty(num_nodes, np.int64)
    following = begin[:-1].copy()
    path[0] = 0
    depth, found = 1, 0
    while depth > 0:
        node = path[depth - 1]
        if following[node] == begin[node + 1]:
            depth -= 1
            continue
        child = children[following[node]]
        following[node] += 1
        if child < num_nodes - 1:
            path[depth] = child + 1
            depth += 1
        else:
            order[found] = child - (num_nodes - 1)
            found += 1
    return order


def smooth_density(compute_s: Floats, memory_s: Floats, num_units: int = 512) -> Floats:
    """Density of the neighbourhood of each place in an order, float64 ``[n]``.

    Small subtrees that follow one another are taken together until each unit has a
    ``num_units``-th of the job's compute or memory time, so that the dual scanner's
    budgets move smoothly (BlendServe section 4 merges nodes for the same reason; here
    the order, and with it the sharing, is not touched).
    """
    if compute_s.sum() + memory_s.sum() == 0.0:
        return np.ones(len(compute_s))
    shares = compute_s / max(compute_s.sum(), 1e-300)
    shares = np.maximum(shares, memory_s / max(memory_s.sum(), 1e-300))
    reached = np.cumsum(shares)
    unit = np.floor((reached - shares) * (num_units / reached[-1])).astype(np.int64)
    count = int(unit[-1]) + 1
    compute = np.bincount(unit, compute_s, count)
    memory = np.bincount(unit, memory_s, count)
    density: Floats = compute_density(compute, memory)[unit]
    return density
