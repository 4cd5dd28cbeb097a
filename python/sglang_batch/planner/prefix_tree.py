"""The compact prefix tree of all prompts of a job, as arrays.

Requests are the leaves, in depth-first order; the internal nodes are the places where
two or more prompts part (or where one prompt ends inside others). A node's prefix is
shared by all leaves below it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .requests import Int32s, Int64s


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """``n`` leaves by position in depth-first order, ``m`` nodes in preorder.

    order: int64 ``[n]``, the request at each leaf position.
    input_len: int32 ``[n]``, prompt tokens of the request at each leaf position.
    lcp: int32 ``[n]``, tokens that a leaf shares with the leaf before it; ``lcp[0]`` = 0.
    leaf_parent: int32 ``[n]``, the node a leaf hangs from: the deepest node whose
        prefix the leaf has. The leaf's own tokens are
        ``input_len - depth[leaf_parent]``, 0 for a prompt that is repeated or continued
        by others.
    parent: int32 ``[m]``; node 0 is the root, whose parent is -1.
    depth: int32 ``[m]``, tokens of a node's prefix from the root on; the root's is 0.
    leaf_begin, leaf_end: int64 ``[m]``; the leaves below a node are the positions
        ``leaf_begin:leaf_end``. Every node but the root has two or more.
    """

    order: Int64s
    input_len: Int32s
    lcp: Int32s
    leaf_parent: Int32s
    parent: Int32s
    depth: Int32s
    leaf_begin: Int64s
    leaf_end: Int64s
