"""Where recurrent states are best kept, if few fit: an exact choice on the prefix tree.

Requests start in the order of the tree, so the states in use lie on the path from the root
to the one that starts. A state is in use from the first request below its node until the
last one that takes it up. All but the first of the ``n`` requests below a node with a state
need not compute what lies between it and the state above, so the tokens saved are the sum
of ``(end - end of the state above) * (n - 1)`` over these nodes.

The choice below a node depends only on the state above it, on whether that one is needed
after the node, and on how many more may be kept. So the best choice is found from the leaves
up, in time proportional to nodes x levels x states.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglang_batch.planner.compiled import jit
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree
from sglang_batch.planner.requests import Bools, Int64s


class StateChoice(NamedTuple):
    """The best nodes for states.

    keeps: bool ``[m]``.
    saved_tokens: prompt tokens that need not be computed.
    """

    keeps: Bools
    saved_tokens: int


def choose_states(tree: PrefixTree, most: int) -> StateChoice:
    """The nodes whose states save most tokens, at most ``most`` in use at a time.

    Of equal choices that with fewer states.
    """
    parent = tree.parent.astype(np.int64)
    followers = (tree.leaf_end - tree.leaf_begin - 1).astype(np.int64)
    level = _levels(parent)
    most = min(most, int(level.max()))
    begin = np.zeros(tree.num_nodes + 1, np.int64)
    np.cumsum((level + 1) * 2 * (most + 1), out=begin[1:])
    below = np.zeros(begin[-1], np.int64)
    ends = state_ends(tree)
    is_last = tree.leaf_end == tree.leaf_end[tree.parent]
    choice = np.zeros(begin[-1], np.bool_)
    _fill(parent, level, ends, followers, is_last, begin, most, below, choice)
    keeps = _follow(parent, level, is_last, begin, most, choice)
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


# ``below[begin[v] + (2 * t + over) * (most + 1) + r]``: the most tokens saved below ``v`` if
# the state above is that of its ancestor at level ``t``, itself included, and ``r`` more may
# be in use. ``over``: nobody takes that state up after ``v``, so that its place is free as
# soon as the first request below ``v`` has another one. The root has none.


@jit
def _fill(
    parent: Int64s, level: Int64s, ends: Int64s, followers: Int64s, is_last: Bools,
    begin: Int64s, most: int, below: Int64s, choice: Bools,
) -> None:  # fmt: skip
    width = most + 1
    for node in range(len(parent) - 1, 0, -1):
        at, up = begin[node], begin[parent[node]]
        own = at + 2 * level[node] * width
        above = parent[node]
        for t in range(level[node] - 1, -1, -1):
            gain = (ends[node] - ends[above]) * followers[node]
            for over in range(2):
                row = at + (2 * t + over) * width
                for r in range(width):
                    left = r if over and t > 0 else r - 1
                    if left >= 0 and gain + below[own + left] > below[row + r]:
                        below[row + r] = gain + below[own + left]
                        choice[row + r] = True
            nearest = above == parent[node]
            for over in range(1 if nearest else 2):
                of_node = is_last[node] and (over or nearest)
                for r in range(width):
                    best = below[at + (2 * t + of_node) * width + r]
                    below[up + (2 * t + over) * width + r] += best
            above = parent[above]


@jit
def _follow(
    parent: Int64s, level: Int64s, is_last: Bools, begin: Int64s, most: int,
    choice: Bools,
) -> Bools:  # fmt: skip
    """The choices that lead to the best sum."""
    width = most + 1
    keeps = np.zeros(len(parent), np.bool_)
    last = np.zeros(len(parent), np.int64)  # the deepest node with a state, by node
    is_over = np.ones(len(parent), np.bool_)  # whether nobody needs it afterwards
    free = np.full(len(parent), most)
    for node in range(1, len(parent)):
        up = parent[node]
        above, r, over = last[up], free[up], is_last[node] and is_over[up]
        last[node], free[node], is_over[node] = above, r, over
        left = r if over and above > 0 else r - 1
        if left < 0:
            continue
        if choice[begin[node] + (2 * level[above] + over) * width + r]:
            keeps[node] = True
            last[node], free[node], is_over[node] = node, left, True
    return keeps
