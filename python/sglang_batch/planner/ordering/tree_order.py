"""The prefix tree's leaves in an order that keeps every subtree together.

At each node the children are sorted by a value, such as their compute density. Leaves
stay in depth-first order, so the order keeps all of the prefix sharing.
"""

from __future__ import annotations

import numpy as np

from ..compiled import jit
from ..costs.cost_model import CostModel, compute_density
from ..costs.tree_work import LeafWork, node_work
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Floats, Int32s, Int64s

# Fewer children than this are sorted by insertion.
_FEW = 32


def layer_sort(tree: PrefixTree, cost: CostModel, work: LeafWork) -> Int64s:
    """Leaf positions, int64 ``[n]``, with every node's children (nodes, and leaves directly below
    it) in order of falling density, which keeps the sharing (BlendServe, Algorithm 1)."""
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
        nodes, leaves: float64 ``[m - 1]`` and ``[n]``, values of the nodes below the root and
            of the leaves.

    Returns:
        The children of all nodes, int64 ``[m - 1 + n]``, where 0..m-2 are the nodes
        below the root and the following numbers the leaves, and the index at which each
        node's children begin, int64 ``[m + 1]``.
    """
    return _sort_children(tree.parent, tree.leaf_parent, tree.leaf_begin, nodes, leaves)


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
    # Visit nodes and leaves in depth-first order, a node before its first leaf.
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
            unsorted = children[first:last].copy()
            for i in range(last - first):  # a slice would take longer to compile
                children[first + i] = unsorted[by_value[i]]
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
    """Leaf positions in a depth-first walk over sorted children, int64 ``[n]``."""
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


def longest_first(tree: PrefixTree, leaves: Floats) -> Int64s:
    """The requests depth-first, int64 ``[n]``, at each node the child with the longest leaf first.

    Args:
        leaves: float64 ``[n]``, the length of each leaf in the tree's order.
    """
    if not tree.num_requests:
        return tree.order
    children, begin = sort_children(tree, tree.longest_below(leaves)[1:], leaves)
    return tree.order[depth_first(children, begin, tree.num_nodes)]
