"""The compact prefix tree of all prompts of a job, as arrays.

The leaves are the requests, in depth-first order. The internal nodes are the points at
which two or more prompts diverge, or at which one prompt ends inside others. A node's
prefix is shared by all leaves below it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit, jit_without_gil
from ..requests import (
    END_OF_PLACEHOLDERS,
    FIRST_PLACEHOLDER,
    Floats,
    Int32s,
    Int64s,
    sums_before,
)
from .prefix_sort import sort_prompts


class MediaTokens(NamedTuple):
    """Placeholders among the tokens of a tree's prompts, each int32 ``[n]`` by leaf: among those
    of the prompt, and among those that it shares with the leaf before it."""

    input_len: Int32s
    lcp: Int32s

    @property
    def num_unique(self) -> int:
        """Those of all prompts, with every shared prefix counted once."""
        return int((self.input_len - self.lcp).sum(dtype=np.int64))

    def depth(self, leaf_begin: Int64s, leaf_end: Int64s) -> Int32s:
        """Placeholders in the prefix of each node of a tree, int32 ``[m]``."""
        # All leaves below a node share as much as the two neighbours that share least.
        shared = np.append(self.lcp, np.int32(0))
        bounds = np.stack([np.minimum(leaf_begin + 1, len(self.lcp)), leaf_end], 1)
        found: Int32s = np.minimum.reduceat(shared, bounds.ravel())[::2]
        found[0] = 0
        return found


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """``n`` leaves by position in depth-first order, ``m`` nodes in preorder.

    order: int64 ``[n]``, the request at each leaf position.
    input_len: int32 ``[n]``, its prompt tokens.
    lcp: int32 ``[n]``, tokens that a leaf shares with the leaf before it, 0 for the first.
    leaf_parent: int32 ``[n]``, the deepest node whose prefix the leaf has. The leaf's own
        tokens are ``input_len - depth[leaf_parent]``, 0 for a prompt that is repeated or
        continued by others.
    parent: int32 ``[m]``. Node 0 is the root, whose parent is -1.
    depth: int32 ``[m]``, tokens of a node's prefix from the root on.
    leaf_begin, leaf_end: int64 ``[m]``. The leaves below a node are the positions
        ``leaf_begin:leaf_end``. Every node but the root has two or more.
    media: of prompts that have placeholders of images or sounds, if they were counted.
    """

    order: Int64s
    input_len: Int32s
    lcp: Int32s
    leaf_parent: Int32s
    parent: Int32s
    depth: Int32s
    leaf_begin: Int64s
    leaf_end: Int64s
    media: MediaTokens | None = None

    @property
    def num_requests(self) -> int:
        return len(self.order)

    @property
    def num_nodes(self) -> int:
        """``m``, the root and the other internal nodes, without the leaves."""
        return len(self.parent)

    @property
    def num_tokens(self) -> int:
        return int(self.input_len.sum(dtype=np.int64))

    @property
    def num_unique_tokens(self) -> int:
        """Tokens of all prompts with every shared prefix counted once."""
        return self.num_tokens - int(self.lcp.sum(dtype=np.int64))

    @property
    def prefix_sharing_ratio(self) -> float:
        """Share of all prompt tokens that an unbounded prefix cache saves, 0..1: the optimum of any
        order (BlendServe, section 2.2). 0.0 for a job without tokens."""
        num_tokens = self.num_tokens
        return int(self.lcp.sum(dtype=np.int64)) / num_tokens if num_tokens else 0.0

    def unique_below(self, whole: NDArray[Any], shared: NDArray[Any]) -> NDArray[Any]:
        """What is unique of the prompts below each node, its prefix included, ``[m]``.

        Args:
            whole, shared: ``[n]``, of each prompt, and of what it shares with the one before:
                ``input_len`` and ``lcp`` for tokens.
        """
        if self.num_requests == 0:
            return np.zeros(self.num_nodes, np.int64)
        new = sums_before(whole - shared)
        # The first leaf shares some with a leaf outside the node. It is not new in the whole
        # order, but it is new below this node.
        first = shared[self.leaf_begin]
        below: NDArray[Any] = new[self.leaf_end] - new[self.leaf_begin] + first
        return below

    def subtree_sums(self, values: Floats) -> Floats:
        """Sum of ``values``, float64 ``[n]`` by leaf position, below each node, float64 ``[m]``.

        As differences of running sums: rounding errors are relative to the sum over all leaves.
        """
        running: Floats = sums_before(values)
        return running[self.leaf_end] - running[self.leaf_begin]

    @property
    def position(self) -> Int64s:
        """The leaf position of each request, int64 ``[n]``."""
        position = np.empty_like(self.order)
        position[self.order] = np.arange(self.num_requests)
        return position

    @property
    def own_len(self) -> Int32s:
        """Tokens of each node's prefix beyond its parent's, int32 ``[m]``."""
        above = np.where(self.parent >= 0, self.depth[self.parent], 0)
        own: Int32s = (self.depth - above).astype(np.int32)
        return own

    def longest_below(self, values: Floats) -> Floats:
        """The largest of ``values``, float64 ``[n]`` by leaf, below each node, or 0."""
        return _longest_below(self.parent, self.leaf_parent, values)

    def restricted_to(self, leaves: Int64s) -> PrefixTree:
        """The tree of some of the requests, with the same numbers.

        Args:
            leaves: int64, leaf positions in ascending order.
        """
        if len(leaves) == 0:
            return _tree_of(self.order[:0], self.input_len[:0], self.lcp[:0])
        # Two leaves share the least that neighbours between them share.
        between = np.concatenate([leaves[:1], leaves[:-1] + 1])

        def restricted(lcp: Int32s) -> Int32s:
            least: Int32s = np.minimum.reduceat(lcp[: leaves[-1] + 1], between)
            least[0] = 0
            return least

        tree = _tree_of(
            self.order[leaves], self.input_len[leaves], restricted(self.lcp)
        )
        if self.media is None:
            return tree
        media = self.media
        media = MediaTokens(media.input_len[leaves], restricted(media.lcp))
        return replace(tree, media=media)

    def renumbered(self) -> PrefixTree:
        """The same tree with its requests renumbered 0..n-1 in ascending order."""
        _, order = np.unique(self.order, return_inverse=True)
        return replace(self, order=order.astype(np.int64))


def build_prefix_tree(
    tokens: Int32s, offsets: Int64s, *, count_media: bool = False
) -> PrefixTree:
    """The exact prefix tree of prompts ``tokens[offsets[i]:offsets[i + 1]]``.

    Leaves are sorted by token ids. A prompt comes before those that continue it, and
    equal prompts keep their input order.

    Args:
        tokens: int32 ``[num_tokens]``, token ids of 0 or more, of any vocabulary.
        offsets: int64 ``[n + 1]``. ``n`` may be 0 and prompts may be empty.
        count_media: look for placeholders of images and sounds, for a model whose encoder
            takes time. That reads all tokens, and nothing else does.
    """
    order, lcp = sort_prompts(tokens, offsets)
    tree = _tree_of(order, np.diff(offsets)[order].astype(np.int32), lcp)
    if not count_media:
        return tree
    begin = offsets[order]
    media = MediaTokens(*_count_media(tokens, begin, tree.input_len, lcp))
    return replace(tree, media=media) if media.input_len.any() else tree


@jit_without_gil
def _count_media(
    tokens: Int32s, begin: Int64s, input_len: Int32s, lcp: Int32s
) -> tuple[Int32s, Int32s]:
    """The fields of :class:`MediaTokens`, of prompts that begin at these tokens."""
    in_prompt, in_lcp = np.zeros_like(input_len), np.zeros_like(lcp)
    for leaf in range(len(begin)):
        count = 0
        for at in range(input_len[leaf]):
            if at == lcp[leaf]:
                in_lcp[leaf] = count
            token = tokens[begin[leaf] + at]
            count += FIRST_PLACEHOLDER <= token < END_OF_PLACEHOLDERS
        if lcp[leaf] == input_len[leaf]:
            in_lcp[leaf] = count
        in_prompt[leaf] = count
    return in_prompt, in_lcp


def _tree_of(order: Int64s, input_len: Int32s, lcp: Int32s) -> PrefixTree:
    """The tree over sorted prompts whose common prefixes are known."""
    depth, leaf_begin, leaf_end = _make_nodes(lcp)
    parent, leaf_parent = _link(len(order), leaf_begin, leaf_end)
    return PrefixTree(
        order=order,
        input_len=input_len,
        lcp=lcp,
        leaf_parent=leaf_parent,
        parent=parent,
        depth=depth,
        leaf_begin=leaf_begin,
        leaf_end=leaf_end,
    )


# --- From the sorted prompts' common prefixes to nodes.


@jit
def _make_nodes(lcp: Int32s) -> tuple[Int32s, Int64s, Int64s]:
    """``depth``, ``leaf_begin`` and ``leaf_end`` of all nodes in preorder.

    From the last leaf to the first, completed nodes fill the arrays from the back. Those that are
    still open, a path from the root, are kept at the free front of the same arrays.
    """
    n = len(lcp)
    most = max(n, 1)
    depth = np.empty(most, np.int32)
    leaf_begin = np.empty(most, np.int64)
    leaf_end = np.empty(most, np.int64)
    depth[0], leaf_end[0] = 0, n
    num_open, done = 1, most
    for leaf in range(n - 1, -1, -1):
        end = leaf + 1
        common = lcp[leaf] if leaf > 0 else -1
        while num_open > 0 and depth[num_open - 1] > common:
            num_open -= 1
            end = leaf_end[num_open]
            done -= 1
            depth[done], leaf_begin[done], leaf_end[done] = depth[num_open], leaf, end
        if common >= 0 and depth[num_open - 1] < common:
            depth[num_open], leaf_end[num_open] = common, end
            num_open += 1
    if n == 0:
        leaf_begin[0], done = 0, 0
    return depth[done:].copy(), leaf_begin[done:].copy(), leaf_end[done:].copy()


@jit
def _link(
    num_leaves: int, leaf_begin: Int64s, leaf_end: Int64s
) -> tuple[Int32s, Int32s]:
    """``parent`` of each node and ``leaf_parent`` of each leaf, by a walk over leaves."""
    parent = np.empty(len(leaf_begin), np.int32)
    leaf_parent = np.empty(num_leaves, np.int32)
    parent[0] = -1
    node, num_seen = 0, 1
    for leaf in range(num_leaves):
        while leaf_end[node] <= leaf:
            node = parent[node]
        while num_seen < len(parent) and leaf_begin[num_seen] == leaf:
            parent[num_seen] = node
            node = num_seen
            num_seen += 1
        leaf_parent[leaf] = node
    return parent, leaf_parent


@jit
def _longest_below(parent: Int32s, leaf_parent: Int32s, values: Floats) -> Floats:
    longest = np.zeros(len(parent))
    for leaf in range(len(values)):
        node = leaf_parent[leaf]
        longest[node] = max(longest[node], values[leaf])
    for node in range(len(parent) - 1, 0, -1):
        longest[parent[node]] = max(longest[parent[node]], longest[node])
    return longest
