"""AlignedServe's Algorithm 1: a batch of requests with KV of similar length.

The search begins at the root of the quad-tree. A node whose requests fit is the batch. If
they do not fit, the search continues in the child with most requests: that is the densest
range. If they fit but are too few, nearest requests of the nodes beside it are added,
first those to the left, then those to the right.
"""

from __future__ import annotations

from typing import NamedTuple

from ..compiled import jit_in_place
from .length_tree import (
    COUNT,
    LEAVES,
    NONE,
    TOKENS,
    LengthTree,
    longest_up_to,
    shortest_from,
)


class LengthRange(NamedTuple):
    """Requests of a range of lengths.

    shortest, longest: both ends of the range, 0 if it is empty.
    at_shortest, at_longest: requests of these two lengths that belong to it, the first
        ones. Of lengths in between all do.
    rows: their number, and ``tokens`` of KV in all.
    """

    shortest: int
    longest: int
    at_shortest: int
    at_longest: int
    rows: int
    tokens: int


@jit_in_place
def _first_that_fit(
    tree: LengthTree, length: int, most_rows: int, most_tokens: int
) -> tuple[int, int]:
    """How many of the first requests of a length fit, and their tokens."""
    rows, tokens = 0, 0
    i = tree.first[length - 1]
    while i != NONE and rows < most_rows:
        if tokens + tree.tokens[i] > most_tokens:
            break
        tokens += tree.tokens[i]
        rows += 1
        i = tree.after[i]
    return rows, tokens


@jit_in_place
def densest_node(tree: LengthTree, max_tokens: int) -> tuple[int, int]:
    """The node at which the way down ends, and its level.

    It fits, or it is a leaf.
    """
    nodes = tree.nodes
    node, level = 0, 0
    while nodes[node, TOKENS] > max_tokens and node < LEAVES:
        best = 4 * node + 1
        for child in range(4 * node + 2, 4 * node + 5):
            if nodes[child, COUNT] > nodes[best, COUNT]:
                best = child
        node, level = best, level + 1
    return node, level


@jit_in_place
def first_length(node: int, level: int) -> int:
    """The shortest length of a node."""
    begin = (4**level - 1) // 3
    return int((node - begin) * 4 ** (8 - level) + 1)


@jit_in_place
def density_first_search(
    tree: LengthTree, max_tokens: int, min_rows: int
) -> LengthRange:
    """A batch of at most ``max_tokens`` of KV, with ``min_rows`` requests if they fit.

    If nothing fits, it has one request. Algorithm 1 of AlignedServe, section 3.3.
    """
    nodes = tree.nodes
    if nodes[0, COUNT] == 0:
        return LengthRange(0, 0, 0, 0, 0, 0)
    node, level = densest_node(tree, max_tokens)
    begin = first_length(node, level)
    width = 4 ** (8 - level)
    low = shortest_from(tree, begin)
    if nodes[node, TOKENS] > max_tokens:  # a leaf, of which some fit
        rows, tokens = _first_that_fit(tree, low, nodes[node, COUNT], max_tokens)
        if rows == 0:
            rows, tokens = 1, tree.tokens[tree.first[low - 1]]
        return LengthRange(low, low, rows, rows, rows, tokens)
    high = longest_up_to(tree, begin + width - 1)
    at_low = nodes[LEAVES + low - 1, COUNT]
    at_high = nodes[LEAVES + high - 1, COUNT]
    rows, tokens = nodes[node, COUNT], nodes[node, TOKENS]
    if rows >= min_rows or level == 0:
        return LengthRange(low, high, at_low, at_high, rows, tokens)
    first = first_length((node - 1) // 4, level - 1)
    last = first + 4 * width - 1
    length = longest_up_to(tree, begin - 1)
    while length >= first and rows < min_rows:
        some, more = _first_that_fit(tree, length, min_rows - rows, max_tokens - tokens)
        if some == 0:
            break
        low, at_low = length, some
        rows, tokens = rows + some, tokens + more
        if some < nodes[LEAVES + length - 1, COUNT]:
            break
        length = longest_up_to(tree, length - 1)
    length = shortest_from(tree, begin + width)
    while 0 < length <= last and rows < min_rows:
        some, more = _first_that_fit(tree, length, min_rows - rows, max_tokens - tokens)
        if some == 0:
            break
        high, at_high = length, some
        rows, tokens = rows + some, tokens + more
        if some < nodes[LEAVES + length - 1, COUNT]:
            break
        length = shortest_from(tree, length + 1)
    return LengthRange(low, high, at_low, at_high, rows, tokens)
