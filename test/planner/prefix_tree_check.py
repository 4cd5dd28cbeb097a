"""Whether a prefix tree is the tree of given prompts, checked rule by rule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sglang_batch.planner.compiled import jit
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree
from sglang_batch.planner.requests import Int32s, Int64s

# The compiled checks name a rule by its place in these lists.
_NODE_RULES = (
    "nodes are in preorder",
    "a node's leaves are among its parent's",
    "a node is deeper than its parent",
    "a node has two leaves or more, and fewer than a parent that is not the root",
)
_LEAF_RULES = (
    "lcp is the depth of the lowest node above a leaf and the leaf before it",
    "leaf_parent is the deepest node above a leaf",
)
_TEXT_RULES = (
    "lcp is 0 for the first leaf, and from 0 to the prompts' lengths for others",
    "a leaf has its lcp tokens in common with the leaf before",
    "children of a node differ in their first token and are sorted by it",
    "equal prompts are in input order",
)


def check_prefix_tree(tree: PrefixTree, tokens: Int32s, offsets: Int64s) -> None:
    """Compare a tree with the prompts it was made from, all tokens included.

    Raises:
        AssertionError: ``tree`` is not the prefix tree of these prompts. The message
            names the rule that is broken, and the node or leaf that breaks it.
    """
    n, m = tree.num_requests, tree.num_nodes
    by_leaf = (tree.order, tree.input_len, tree.lcp, tree.leaf_parent)
    by_node = (tree.parent, tree.depth, tree.leaf_begin, tree.leaf_end)
    _require(n == len(offsets) - 1, "every request has one leaf")
    _require(
        all(len(array) == n for array in by_leaf)
        and all(len(array) == m for array in by_node),
        "all arrays by leaf are of one length, all arrays by node of another",
    )
    _require(
        np.array_equal(np.sort(tree.order), np.arange(n)),
        "order is a permutation of the requests",
    )
    _require(
        np.array_equal(tree.input_len, np.diff(offsets)[tree.order]),
        "input_len is the number of tokens of a leaf's prompt",
    )
    _require(
        m > 0
        and (tree.parent[0], tree.depth[0]) == (-1, 0)
        and (tree.leaf_begin[0], tree.leaf_end[0]) == (0, n),
        "node 0 is the root: parent -1, depth 0, above all leaves",
    )
    _require(
        bool(((tree.parent[1:] >= 0) & (tree.parent[1:] < np.arange(1, m))).all()),
        "a parent comes before its children",
    )
    rule, node = _broken_node(*by_node)
    _require(rule < 0, f"{_NODE_RULES[rule]}; node {node} breaks it")
    rule, leaf = _broken_leaf(tree.lcp, tree.leaf_parent, *by_node)
    _require(rule < 0, f"{_LEAF_RULES[rule]}; leaf {leaf} breaks it")
    rule, leaf = _broken_text(tokens, offsets, tree.order, tree.lcp)
    _require(rule < 0, f"{_TEXT_RULES[rule]}; leaf {leaf} breaks it")


def _require(holds: bool, rule: str) -> None:
    # Not the statement: python -O would remove it.
    if not holds:
        raise AssertionError(f"Not the prefix tree of these prompts, where {rule}.")


@jit
def _broken_node(
    parent: Int32s, depth: Int32s, leaf_begin: Int64s, leaf_end: Int64s
) -> tuple[int, int]:
    """The rule of _NODE_RULES that is broken first, or -1, and the node."""
    above = 0
    for node in range(1, len(parent)):
        while above > 0 and leaf_end[above] <= leaf_begin[node]:
            above = parent[above]
        begin, end = leaf_begin[node], leaf_end[node]
        if parent[node] != above:
            return 0, node
        if not (leaf_begin[above] <= begin and end <= leaf_end[above]):
            return 1, node
        if depth[node] <= depth[above]:
            return 2, node
        num_above = leaf_end[above] - leaf_begin[above]
        if end - begin < 2 or (above > 0 and end - begin == num_above):
            return 3, node
        above = node
    return -1, -1


@jit
def _broken_leaf(
    lcp: Int32s,
    leaf_parent: Int32s,
    parent: Int32s,
    depth: Int32s,
    leaf_begin: Int64s,
    leaf_end: Int64s,
) -> tuple[int, int]:
    """The rule of _LEAF_RULES that is broken first, or -1, and the leaf."""
    node, num_seen = 0, 1
    for leaf in range(len(lcp)):
        while leaf_end[node] <= leaf:
            node = parent[node]
        if leaf > 0 and lcp[leaf] != depth[node]:
            return 0, leaf
        while num_seen < len(parent) and leaf_begin[num_seen] == leaf:
            node = num_seen
            num_seen += 1
        if leaf_parent[leaf] != node:
            return 1, leaf
    return -1, -1


@jit
def _broken_text(
    tokens: Int32s, offsets: Int64s, order: Int64s, lcp: Int32s
) -> tuple[int, int]:
    """The rule of _TEXT_RULES that is broken first, or -1, and the leaf."""
    if len(lcp) > 0 and lcp[0] != 0:
        return 0, 0
    for leaf in range(1, len(lcp)):
        a, b, common = order[leaf - 1], order[leaf], lcp[leaf]
        start_a, start_b = offsets[a], offsets[b]
        own_a = offsets[a + 1] - start_a - common
        own_b = offsets[b + 1] - start_b - common
        if common < 0 or own_a < 0 or own_b < 0:
            return 0, leaf
        for k in range(common):
            if tokens[start_a + k] != tokens[start_b + k]:
                return 1, leaf
        if own_a > 0:
            if own_b == 0 or tokens[start_a + common] >= tokens[start_b + common]:
                return 2, leaf
        elif own_b == 0 and a > b:
            return 3, leaf
    return -1, -1


def shared_with_previous(tree: PrefixTree, leaves: Sequence[int]) -> list[int]:
    """Tokens that each leaf of a sequence shares with the one before it."""
    shared = [
        int(tree.lcp[min(a, b) + 1 : max(a, b) + 1].min()) for a, b in pairwise(leaves)
    ]
    return [0, *shared][: len(leaves)]
