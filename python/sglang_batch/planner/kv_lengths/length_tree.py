"""Waiting requests by the length of their KV, in the quad-tree of AlignedServe (section 3.3).

The root has the lengths 1 to 65,536, each node a quarter of those of the node above, and a
leaf one length. Longer requests are in the last leaf. The requests of a leaf are in the order
in which they came.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compiled import jit_in_place
from ..requests import Int32s, Int64s

NONE = -1
MAX_LENGTH = 65_536
NUM_LEVELS = 9
LEAVES = (4 ** (NUM_LEVELS - 1) - 1) // 3
"""The first leaf among all nodes. Node ``j`` of level ``k`` is at ``(4^k - 1) / 3 + j``."""
NEVER = 1 << 62

COUNT, TOKENS, OLDEST = 0, 1, 2


class LengthTree(NamedTuple):
    """The tree, and for each request its place in it.

    nodes: int64 ``[nodes, 3]``: the requests below, their tokens, and the tick since
        when the first of them waits (section 3.5).
    first, last: int32 ``[MAX_LENGTH]``, requests of each leaf.
    before, after: int32 ``[n]``, neighbours in a leaf.
    length: int32 ``[n]``, the length by which a request is in the tree, 0 if it is not.
    tokens: int64 ``[n]``, tokens of KV that it takes.
    since: int64 ``[n]``, the tick since when it waits.
    """

    nodes: Int64s
    first: Int32s
    last: Int32s
    before: Int32s
    after: Int32s
    length: Int32s
    tokens: Int64s
    since: Int64s


def make_tree(num_requests: int) -> LengthTree:
    """An empty tree for requests ``0`` to ``num_requests - 1``."""
    nodes = np.zeros((LEAVES + MAX_LENGTH, 3), np.int64)
    nodes[:, OLDEST] = NEVER
    return LengthTree(
        nodes=nodes,
        first=np.full(MAX_LENGTH, NONE, np.int32),
        last=np.full(MAX_LENGTH, NONE, np.int32),
        before=np.full(num_requests, NONE, np.int32),
        after=np.full(num_requests, NONE, np.int32),
        length=np.zeros(num_requests, np.int32),
        tokens=np.zeros(num_requests, np.int64),
        since=np.zeros(num_requests, np.int64),
    )


@jit_in_place
def _above(node: int) -> int:
    return (node - 1) // 4


@jit_in_place
def _count(tree: LengthTree, leaf: int, number: int, tokens: int) -> None:
    """Change the sums of a leaf, and of all nodes above it."""
    nodes = tree.nodes
    first = tree.first[leaf]
    node = LEAVES + leaf
    nodes[node, OLDEST] = NEVER if first == NONE else tree.since[first]
    while True:
        nodes[node, COUNT] += number
        nodes[node, TOKENS] += tokens
        if node < LEAVES:
            oldest = NEVER
            for child in range(4 * node + 1, 4 * node + 5):
                oldest = min(oldest, nodes[child, OLDEST])
            nodes[node, OLDEST] = oldest
        if node == 0:
            return
        node = _above(node)


@jit_in_place
def insert(tree: LengthTree, i: int, length: int, tokens: int, now: int) -> None:
    """Add a request, behind others of its length.

    Args:
        length: of its KV when it joins, or of the requests that it is to join with.
        tokens: of KV that it takes.
        now: the tick, no earlier than those of requests that were added before.
    """
    leaf = min(max(length, 1), MAX_LENGTH) - 1
    tree.length[i] = leaf + 1
    tree.tokens[i] = tokens
    tree.since[i] = now
    last = tree.last[leaf]
    tree.before[i] = last
    tree.after[i] = NONE
    tree.last[leaf] = i
    if last == NONE:
        tree.first[leaf] = i
    else:
        tree.after[last] = i
    _count(tree, leaf, 1, tokens)


@jit_in_place
def take_out(tree: LengthTree, i: int) -> None:
    leaf = tree.length[i] - 1
    before, after = tree.before[i], tree.after[i]
    if before == NONE:
        tree.first[leaf] = after
    else:
        tree.after[before] = after
    if after == NONE:
        tree.last[leaf] = before
    else:
        tree.before[after] = before
    tree.length[i] = 0
    _count(tree, leaf, -1, -tree.tokens[i])


@jit_in_place
def take_out_first(tree: LengthTree, length: int, number: int) -> None:
    """Remove the first requests of a length, which has as many. They keep ``length``."""
    leaf = length - 1
    tokens = 0
    i = tree.first[leaf]
    for _ in range(number):
        tokens += tree.tokens[i]
        i = tree.after[i]
    tree.first[leaf] = i
    if i == NONE:
        tree.last[leaf] = NONE
    else:
        tree.before[i] = NONE
    _count(tree, leaf, -number, -tokens)


@jit_in_place
def longest_up_to(tree: LengthTree, length: int) -> int:
    """The longest length of a request that is at most ``length``, 0 if there is none."""
    return 0 if length < 1 else _nearest(tree, min(length, MAX_LENGTH), -1)


@jit_in_place
def shortest_from(tree: LengthTree, length: int) -> int:
    """The shortest length of a request that is at least ``length``, 0 if there is none."""
    return 0 if length > MAX_LENGTH else _nearest(tree, max(length, 1), 1)


@jit_in_place
def _nearest(tree: LengthTree, length: int, step: int) -> int:
    """The first length with a request from ``length`` on, upwards (1) or downwards (-1)."""
    nodes = tree.nodes
    node = LEAVES + length - 1
    while nodes[node, COUNT] == 0:
        # To the next sibling, or else the next sibling of the node above.
        while node > 0 and (node - 1) % 4 == (3 if step > 0 else 0):
            node = _above(node)
        if node == 0:
            return 0
        node += step
    while node < LEAVES:
        node = 4 * node + (1 if step > 0 else 4)
        while nodes[node, COUNT] == 0:
            node += step
    return int(node - LEAVES + 1)


@jit_in_place
def count_up_to(tree: LengthTree, length: int) -> int:
    nodes = tree.nodes
    if length >= MAX_LENGTH:
        return int(nodes[0, COUNT])
    if length < 1:
        return 0
    node = LEAVES + length - 1
    number = nodes[node, COUNT]
    while node > 0:
        above = _above(node)
        for each in range(4 * above + 1, node):
            number += nodes[each, COUNT]
        node = above
    return int(number)


@jit_in_place
def longest_waiting(tree: LengthTree) -> int:
    """The request that has waited longest, NONE if the tree is empty."""
    nodes = tree.nodes
    if nodes[0, COUNT] == 0:
        return NONE
    node = 0
    while node < LEAVES:
        best = 4 * node + 1
        for child in range(4 * node + 2, 4 * node + 5):
            if nodes[child, OLDEST] < nodes[best, OLDEST]:
                best = child
        node = best
    return int(tree.first[node - LEAVES])
