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
from .longest_first import longest_first

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
    leaves = tree.input_len + est_output_len[tree.order]
    return longest_first(_without_short_nodes(tree), leaves)


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
