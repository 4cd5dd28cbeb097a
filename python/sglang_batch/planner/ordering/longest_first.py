"""Depth-first orders in which the longest come first, so that few are left for the end.

Siblings may come in any order without a loss of cached tokens. With the longest subtree first, the
last requests of a job are short ones, and they keep the engine full for longer.
"""

from __future__ import annotations

import numpy as np

from ..compiled import jit
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Floats, Int32s, Int64s
from .layer_sort import depth_first, sort_children


def longest_first(tree: PrefixTree, leaves: Floats) -> Int64s:
    """The requests depth-first, at each node the child with the longest leaf first.

    Args:
        leaves: float64 ``[n]``, the length of each leaf in the tree's order.

    Returns:
        int64 ``[n]``, the requests.
    """
    if not tree.num_requests:
        return tree.order
    nodes = _longest_below(tree.parent, tree.leaf_parent, leaves)
    children, begin = sort_children(tree, nodes[1:], leaves)
    return tree.order[depth_first(children, begin, tree.num_nodes)]


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
