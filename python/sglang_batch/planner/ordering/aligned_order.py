"""An order for dense batches, where every row costs as much as the longest of them.

Rows that run at the same time should end at about the same length, and the longest
should begin first, so that few rows are left for the last steps. Requests with a common
prefix stay together, since its keys and values are kept for the next of them only.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..compiled import jit
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Floats, Int32s, Int64s
from .layer_sort import depth_first, sort_children

# A common prefix of fewer tokens is computed again: computing it costs less than rows of
# other lengths.
SHORTEST_KEPT = 16


def aligned_order(tree: PrefixTree, est_output_len: Floats) -> Int64s:
    """The requests by falling length, those with a common prefix together.

    Args:
        est_output_len: float64 ``[n]`` by request.

    Returns:
        int64 ``[n]``, the requests. A group has the place of its longest request.
    """
    if not tree.num_requests:
        return tree.order
    kept = _without_short_nodes(tree)
    leaves = tree.input_len + est_output_len[tree.order]
    nodes = _longest_below(kept.parent, kept.leaf_parent, leaves)
    children, begin = sort_children(kept, nodes[1:], leaves)
    return tree.order[depth_first(children, begin, kept.num_nodes)]


def _without_short_nodes(tree: PrefixTree) -> PrefixTree:
    """The tree in which nodes with few tokens of their own are part of those above."""
    above = _kept_above(tree.parent, tree.depth, SHORTEST_KEPT)
    is_kept = above == np.arange(tree.num_nodes)
    place = np.cumsum(is_kept).astype(np.int32) - 1
    parent = place[above[np.maximum(tree.parent, 0)]]
    parent[0] = -1
    return replace(
        tree,
        leaf_parent=place[above[tree.leaf_parent]].astype(np.int32),
        parent=parent[is_kept].astype(np.int32),
        depth=tree.depth[is_kept],
        leaf_begin=tree.leaf_begin[is_kept],
        leaf_end=tree.leaf_end[is_kept],
    )


@jit
def _kept_above(parent: Int32s, depth: Int32s, least: int) -> Int64s:
    """Of each node, itself or the nearest node above that is kept, int64 ``[m]``."""
    above = np.arange(len(parent))
    for node in range(1, len(parent)):
        over = above[parent[node]]
        if depth[node] - depth[over] < least:
            above[node] = over
    return above


@jit
def _longest_below(parent: Int32s, leaf_parent: Int32s, leaves: Floats) -> Floats:
    """The largest value of the leaves below each node, float64 ``[m]``."""
    longest = np.zeros(len(parent))
    for leaf in range(len(leaves)):
        node = leaf_parent[leaf]
        longest[node] = max(longest[node], leaves[leaf])
    for node in range(len(parent) - 1, 0, -1):
        longest[parent[node]] = max(longest[parent[node]], longest[node])
    return longest
