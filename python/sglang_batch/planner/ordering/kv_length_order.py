"""Orders for engines where a row costs more the longer the other rows of its batch are.

``aligned`` is for dense batches. Rows that run at the same time should end at about the same
length, and the longest should begin first. Requests with a common prefix stay together, since
its keys and values are kept for the next of them only.

With ``length-tree`` and ``length-aligned``, ``kv_lengths.batch_state`` chooses among the
requests that wait while the job runs. These orders decide which requests belong together, and
in which order the engine learns of them. ``length-tree`` is AlignedServe's: every request
counts by its own length.

``length-aligned`` is joint with the prefix tree. A subtree that fits into one batch is a
*family* if that saves more time, of computing its prefixes again, than the padding of its
shorter members takes to read. The choice is exact, from the leaves up. A larger subtree is a
*block*: its families and other requests are sorted by length among themselves, so that its
prefix is computed once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..compiled import jit
from ..costs.cost_model import CostModel
from ..kv_lengths.batch_state import GROUPS, TREE
from ..kv_lengths.length_groups import GROUP_SHARE
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Bools, Floats, Int32s, Int64s
from .order import LengthKeys, Order
from .tree_order import longest_first

# A common prefix of fewer tokens is computed again: computing it costs less than rows of
# other lengths.
SHORTEST_KEPT = 16


def aligned_order(tree: PrefixTree, est_output_len: Floats) -> Int64s:
    """The requests by falling length, those with a common prefix together, int64 ``[n]``. A group
    has the place of its longest request."""
    # Nodes with few tokens of their own are part of those above.
    above = _kept_above(tree.parent, tree.depth, SHORTEST_KEPT)
    is_kept = above == np.arange(tree.num_nodes)
    place = np.cumsum(is_kept).astype(np.int32) - 1
    parent = place[above[np.maximum(tree.parent, 0)]]
    parent[0] = -1
    shorter = replace(
        tree,
        leaf_parent=place[above[tree.leaf_parent]].astype(np.int32),
        parent=parent[is_kept].astype(np.int32),
        depth=tree.depth[is_kept],
        leaf_begin=tree.leaf_begin[is_kept],
        leaf_end=tree.leaf_end[is_kept],
    )
    return longest_first(shorter, tree.input_len + est_output_len[tree.order])


@jit
def _kept_above(parent: Int32s, depth: Int32s, least: int) -> Int64s:
    """Of each node, itself or the nearest node above that is kept, int64 ``[m]``."""
    above = np.arange(len(parent))
    for node in range(1, len(parent)):
        over = above[parent[node]]
        if depth[node] - depth[over] < least:
            above[node] = over
    return above


# A common prefix of fewer tokens keeps nobody together.
_ALONE = -1


def length_tree_order(tree: PrefixTree, max_wait_steps: int | None = None) -> Order:
    """All requests, the shortest prompt first."""
    key = np.empty(tree.num_requests, np.int32)
    key[tree.order] = tree.input_len
    family = np.full(tree.num_requests, _ALONE, np.int32)
    requests = tree.order[np.argsort(tree.input_len, kind="stable")]
    return Order(requests, lengths=LengthKeys(TREE, key, family, max_wait_steps))


def length_aligned_order(
    tree: PrefixTree,
    cost: CostModel,
    est_output_len: Floats,
    kv_capacity_tokens: int,
    max_wait_steps: int | None = None,
) -> Order:
    """Block after block; in a block the shortest first, families together.

    Args:
        est_output_len: float64 ``[n]`` by request.
        kv_capacity_tokens: of the engine. A family is no larger than a batch.
    """
    capacity = GROUP_SHARE * kv_capacity_tokens
    lengths = est_output_len[tree.order]
    # Tokens of KV below each node when all of its requests end, prefixes once.
    kv = tree.unique_below(tree.input_len, tree.lcp) + tree.subtree_sums(lengths)
    key = tree.input_len.astype(np.int64)
    # Without padding there is nothing to be gained by parting siblings.
    pad_s = cost.kv_read_time_s if cost.padded else 0.0
    token_s = max(cost.token_time_s, 1e-30)
    # Of each leaf the node that is its family, _ALONE for none.
    family = _best_families(
        tree.parent,
        tree.depth,
        tree.leaf_parent,
        key,
        lengths,
        kv <= capacity,
        token_s,
        pad_s,
    )
    block = _blocks(tree.parent, tree.depth, tree.leaf_parent, kv > capacity)
    inside = family != _ALONE
    if inside.any():
        longest = np.zeros(int(family.max()) + 1, np.int64)
        np.maximum.at(longest, family[inside], key[inside])
        key[inside] = longest[family[inside]]
    place = np.arange(tree.num_requests)
    first = np.where(inside, tree.leaf_begin[np.maximum(family, 0)], place)
    by_leaf = np.lexsort((place, first, key, block))
    keys = np.empty(tree.num_requests, np.int32)
    families = np.empty(tree.num_requests, np.int32)
    keys[tree.order], families[tree.order] = key, family
    found = LengthKeys(GROUPS, keys, families, max_wait_steps)
    return Order(tree.order[by_leaf], lengths=found)


@jit
def _best_families(
    parent: Int32s,
    depth: Int32s,
    leaf_parent: Int32s,
    input_len: Int64s,
    lengths: Floats,
    fits: Bools,
    token_s: float,
    pad_s: float,
) -> Int32s:
    m, n = len(parent), len(leaf_parent)
    longest = np.zeros(m, np.int64)
    steps = np.zeros(m)  # sums over the leaves below: steps, and steps * length
    weighted = np.zeros(m)
    units = np.zeros(m)  # children, and leaves of the node itself
    saved = np.zeros(m)  # seconds by keeping all below together
    apart = np.zeros(m)  # seconds by the best choice below
    for leaf in range(n):
        node = leaf_parent[leaf]
        longest[node] = max(longest[node], input_len[leaf])
        steps[node] += lengths[leaf]
        weighted[node] += lengths[leaf] * input_len[leaf]
        units[node] += 1
    whole = np.zeros(m, np.bool_)
    for node in range(m - 1, 0, -1):
        own = depth[node] - depth[parent[node]]
        saved[node] += own * token_s * (units[node] - 1)
        padding = pad_s * (steps[node] * longest[node] - weighted[node])
        together = saved[node] - padding
        whole[node] = (
            fits[node] and depth[node] >= SHORTEST_KEPT and together > apart[node]
        )
        above = parent[node]
        longest[above] = max(longest[above], longest[node])
        steps[above] += steps[node]
        weighted[above] += weighted[node]
        units[above] += 1
        saved[above] += saved[node]
        apart[above] += max(together, apart[node]) if whole[node] else apart[node]
    top = np.full(m, _ALONE, np.int32)
    for node in range(1, m):
        top[node] = top[parent[node]]
        if top[node] == _ALONE and whole[node]:
            top[node] = node
    return top[leaf_parent]


@jit
def _blocks(
    parent: Int32s, depth: Int32s, leaf_parent: Int32s, is_large: Bools
) -> Int32s:
    """Of each leaf the deepest large node above it with a prefix of its own."""
    block = np.zeros(len(parent), np.int32)
    for node in range(1, len(parent)):
        block[node] = block[parent[node]]
        own = depth[node] - depth[block[node]]
        if is_large[node] and own >= SHORTEST_KEPT:
            block[node] = node
    return block[leaf_parent]
