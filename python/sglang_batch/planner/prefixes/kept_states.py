"""Where recurrent states are best kept, if few fit: an exact choice on the prefix tree.

In an order that finishes each subtree before the next, the states in use lie on the path
from the root to the running request. So if ``k`` states fit besides those of running
requests, at most ``k`` nodes of each path keep one. All but the first of the ``n`` requests
below a node with a state need not compute what lies between it and the state above, so the
tokens saved are the sum of ``(end - end of the state above) * (n - 1)`` over these nodes.

The choice below a node depends only on the state above it and on how many are left, so the
best one is found from the leaves up, in time proportional to nodes x levels x ``k``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compiled import jit
from ..requests import Bools, Int64s
from .prefix_tree import PrefixTree


class StateChoice(NamedTuple):
    """The best nodes for states.

    keeps: bool ``[m]``.
    saved_tokens: prompt tokens that need not be computed.
    """

    keeps: Bools
    saved_tokens: int


def choose_states(tree: PrefixTree, most: int) -> StateChoice:
    """The nodes whose states save most tokens, at most ``most`` on each path.

    Of equal choices that with fewer states.
    """
    parent = tree.parent.astype(np.int64)
    followers = (tree.leaf_end - tree.leaf_begin - 1).astype(np.int64)
    level = _levels(parent)
    most = min(most, int(level.max()))
    begin = np.zeros(tree.num_nodes + 1, np.int64)
    np.cumsum((level + 1) * (most + 1), out=begin[1:])
    below = np.zeros(begin[-1], np.int64)
    ends = state_ends(tree)
    _fill(parent, level, ends, followers, begin, most, below)
    keeps = _follow(parent, level, ends, followers, begin, most, below)
    return StateChoice(keeps, int(below[most]))


def state_ends(tree: PrefixTree) -> Int64s:
    """Tokens behind which each node's state is kept, int64 ``[m]``.

    A request computes at least its last token, so that where a prompt ends it is the state
    before that.
    """
    ends = tree.depth.astype(np.int64)
    is_end = np.zeros(tree.num_nodes, np.bool_)
    is_end[tree.leaf_parent[tree.input_len <= tree.depth[tree.leaf_parent]]] = True
    is_end[0] = False
    return ends - is_end


@jit
def _levels(parent: Int64s) -> Int64s:
    level = np.zeros(len(parent), np.int64)
    for node in range(1, len(parent)):
        level[node] = level[parent[node]] + 1
    return level


# ``below[begin[v] + t * (most + 1) + r]``: the most tokens saved below ``v`` if the state
# above is that of its ancestor at level ``t``, itself included, and ``r`` more may be kept.


@jit
def _fill(
    parent: Int64s, level: Int64s, ends: Int64s, followers: Int64s, begin: Int64s,
    most: int, below: Int64s,
) -> None:  # fmt: skip
    width = most + 1
    for node in range(len(parent) - 1, 0, -1):
        at, up = begin[node], begin[parent[node]]
        own = at + level[node] * width
        above = parent[node]
        for t in range(level[node] - 1, -1, -1):
            gain = (ends[node] - ends[above]) * followers[node]
            for r in range(width):
                best = below[at + t * width + r]
                if r > 0:
                    best = max(best, gain + below[own + r - 1])
                below[up + t * width + r] += best
            above = parent[above]


@jit
def _follow(
    parent: Int64s, level: Int64s, ends: Int64s, followers: Int64s, begin: Int64s,
    most: int, below: Int64s,
) -> Bools:  # fmt: skip
    """The choices that lead to the best sum."""
    width = most + 1
    keeps = np.zeros(len(parent), np.bool_)
    last = np.zeros(len(parent), np.int64)  # the deepest node with a state, by node
    left = np.full(len(parent), most)
    for node in range(1, len(parent)):
        above, r = last[parent[node]], left[parent[node]]
        last[node], left[node] = above, r
        if r == 0:
            continue
        at = begin[node]
        gain = (ends[node] - ends[above]) * followers[node]
        kept = gain + below[at + level[node] * width + r - 1]
        if kept > below[at + level[above] * width + r]:
            keeps[node] = True
            last[node], left[node] = node, r - 1
    return keeps
