"""Groups of requests that share one prefix, and the order of the groups.

A scheduler that computes one shared prefix per request chooses one node of its path in the
prefix tree (BatchLLM, section 4.2). Those closest to the root have the most requests and the
shortest prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..compiled import jit
from ..requests import Floats, Int32s, Int64s
from .prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """A partition of the leaves into ``g`` groups, numbered by their first leaf.

    prefix_len: int32 ``[g]``, tokens that all requests of a group share and that are
        computed once for it. 0 for a request that is a group of its own.
    sizes: int64 ``[g]``, requests of each group.
    group_of: int32 ``[n]``, the group of each leaf. Its leaves need not be neighbours.
    """

    prefix_len: Int32s
    sizes: Int64s
    group_of: Int32s


def prefix_groups(tree: PrefixTree) -> PrefixGroups:
    """Enlarge the first-level prefixes of the tree (BatchLLM, Algorithm 1).

    From the bottom up, a grandchild with ``k`` leaves and ``t`` tokens more than the
    child becomes a child itself if the ``(k - 1) * t`` tokens that this saves are more
    than the child's own, which are then computed once more (unless the child keeps no
    leaf). The root's children at the end are the groups.
    """
    hangs_from = _enlarge_first_level(
        tree.parent, tree.depth, tree.leaf_begin, tree.leaf_end
    )
    group_of, head = _number_groups(tree.parent, tree.leaf_parent, hangs_from)
    sizes = np.bincount(group_of, minlength=len(head))
    prefix_len = np.where(sizes > 1, tree.depth[head], 0).astype(np.int32)
    return PrefixGroups(prefix_len=prefix_len, sizes=sizes, group_of=group_of)


def group_order(
    tree: PrefixTree, groups: PrefixGroups, est_output_len: Floats
) -> Int64s:
    """Requests in the order of their groups, int64 ``[n]`` (BatchLLM, section 4.3.2).

    Groups with much decoding per prefilled token are first:
    ``R = sum(d) / (L_prefix + sum(L_distinct))``, Eq. 3 for a whole group. Equal groups are in the
    order of their first leaf, and the requests of a group in depth-first order.

    Args:
        est_output_len: float64 ``[n]``, output tokens by request index.
    """
    num_groups = len(groups.sizes)
    distinct = tree.input_len - groups.prefix_len[groups.group_of]
    prefill = groups.prefix_len + np.bincount(groups.group_of, distinct, num_groups)
    decode = np.zeros(num_groups)
    np.add.at(decode, groups.group_of, est_output_len[tree.order])
    # Prompts may be empty.
    ratio = decode / np.maximum(prefill, 1)
    place = np.empty(num_groups, np.int64)
    place[np.argsort(-ratio, kind="stable")] = np.arange(num_groups)
    return tree.order[np.argsort(place[groups.group_of], kind="stable")]


@jit
def _enlarge_first_level(
    parent: Int32s, depth: Int32s, leaf_begin: Int64s, leaf_end: Int64s
) -> Int32s:
    """The parent of each node after the enlargement, int32 ``[m]``. The root's children are
    the groups.

    A node that moves up is unlinked from one list of children and prepended to another.
    """
    num_nodes = len(parent)
    hangs_from = parent.copy()
    first_child = np.full(num_nodes, -1, np.int32)
    sibling = np.full(num_nodes, -1, np.int32)
    # Leaves that a node keeps, including those of its remaining children.
    leaves = leaf_end - leaf_begin
    # In preorder, children have larger numbers: in falling order, a child is complete.
    for child in range(num_nodes - 1, 0, -1):
        above = parent[child]
        child_tokens = np.int64(depth[child] - depth[above])
        # The second round finds a grandchild that is alone once the others have moved.
        for _ in range(2):
            before = -1
            node = first_child[child]
            while node >= 0:
                after = sibling[node]
                gain = (leaves[node] - 1) * np.int64(depth[node] - depth[child])
                penalty = child_tokens if leaves[node] < leaves[child] else 0
                if gain > penalty:
                    if before < 0:
                        first_child[child] = after
                    else:
                        sibling[before] = after
                    sibling[node] = first_child[above]
                    first_child[above] = node
                    hangs_from[node] = above
                    leaves[child] -= leaves[node]
                else:
                    before = node
                node = after
        sibling[child] = first_child[above]
        first_child[above] = child
    return hangs_from


@jit
def _number_groups(
    parent: Int32s, leaf_parent: Int32s, hangs_from: Int32s
) -> tuple[Int32s, Int32s]:
    """The group of each leaf, int32 ``[n]``, and the node of each group, int32 ``[g]``. A
    leaf is in that of its deepest node among the root's children, or is a group of its own
    at the root."""
    head = np.zeros(len(parent), np.int32)
    for node in range(1, len(parent)):
        head[node] = node if hangs_from[node] == 0 else head[parent[node]]
    number = np.full(len(parent), -1, np.int32)
    group_of = np.empty(len(leaf_parent), np.int32)
    node_of = np.empty(len(leaf_parent), np.int32)
    num_groups = 0
    for leaf in range(len(leaf_parent)):
        node = head[leaf_parent[leaf]]
        if node == 0 or number[node] < 0:
            number[node] = num_groups
            node_of[num_groups] = node
            num_groups += 1
        group_of[leaf] = number[node]
    return group_of, node_of[:num_groups]
