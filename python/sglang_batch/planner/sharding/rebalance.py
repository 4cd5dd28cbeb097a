"""Requests of a running job that move between shards, so that all shards end together.

The slowest shard gives requests to the fastest, one family after another: a family has
the requests that lack the same prefix in the other shard. First go those that can go as a
whole, and of these, those that come last in the order. As much of a family moves as makes
both shards end earliest, where each second of computing its prefix again must save one. So
a family stays together, or stays where it is, if its prefix is long, and is divided if its
own work is longer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit
from ..costs.cost_model import CostModel, overlapped
from ..costs.tree_work import LeafWork
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Bools, Floats, Int32s, Int64s

# Shards whose ends differ by less than this share are equal.
_EQUAL = 1e-3
# Most gifts of one shard to another, for each shard. Two or three suffice.
_MAX_GIFTS = 8


class LeafState(NamedTuple):
    """Where the requests of a running job are, each ``[n]`` by leaf.

    shard: int32, the shard that has the request.
    may_move: bool, whether it has not been sent. Others stay.
    left: float64, the share of its work that is still to be done, 0 to 1. 0 for those
        that have ended.
    far: float64, the place in its shard's order. The highest go first.
    """

    shard: Int32s
    may_move: Bools
    left: Floats
    far: Floats


def rebalance(
    tree: PrefixTree,
    cost: CostModel,
    work: LeafWork,
    state: LeafState,
    num_shards: int,
) -> Int32s:
    """The shard of each leaf after moves that make the slowest shard faster.

    Args:
        work: estimated work of whole requests by leaf of ``tree``.

    Returns:
        int32 ``[n]``.
    """
    shard = state.shard.copy()
    prefill = cost.prefill_time_s(tree.depth, 0)
    prefix_s = prefill - np.where(tree.parent >= 0, prefill[tree.parent], 0.0)
    own = cost.prefill_time_s(tree.input_len, 0) - prefill[tree.leaf_parent]
    compute = work.decode_s * state.left + np.where(state.may_move, own, 0.0)
    memory = work.memory_s * state.left
    pending, begun = _counts(
        tree.parent, tree.leaf_parent, shard, state.may_move, state.left, num_shards
    )
    loads = np.zeros((2, num_shards))
    loads[0] = np.bincount(shard, compute, num_shards)
    loads[1] = np.bincount(shard, memory, num_shards)
    loads[0] += ((pending > 0) & (begun == 0)) @ prefix_s
    exponent = float(cost.interference_exponent)
    for _ in range(_MAX_GIFTS * num_shards):
        seconds = cost.step_time_s(loads[0], loads[1])
        giver, taker = int(np.argmax(seconds)), int(np.argmin(seconds))
        if seconds[giver] - seconds[taker] <= _EQUAL * seconds[giver]:
            break
        offered = np.flatnonzero(state.may_move & (shard == giver))
        family = _families(
            offered, tree.leaf_parent, tree.parent, pending[taker], prefix_s
        )
        given = _in_order(
            family, tree.leaf_parent[offered], state.far[offered], pending[giver]
        )
        if not _give(
            offered[given], family[given], giver, taker, shard, tree.parent, tree.leaf_parent,
            prefix_s, compute, memory, pending, begun, loads, exponent,
        ):  # fmt: skip
            break
    return shard


@jit
def _counts(
    parent: Int32s, leaf_parent: Int32s, shard: Int32s, may_move: Bools,
    left: Floats, k: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:  # fmt: skip
    """Requests of each shard below each node, int32 ``[k, m]`` each: those that have not
    ended, and those that have begun, so that the prefix is computed."""
    pending = np.zeros((k, len(parent)), np.int32)
    begun = np.zeros((k, len(parent)), np.int32)
    for leaf in range(len(leaf_parent)):
        s = shard[leaf]
        node = leaf_parent[leaf]
        while node >= 0:
            pending[s, node] += left[leaf] > 0.0
            begun[s, node] += not may_move[leaf]
            node = parent[node]
    return pending, begun


@jit
def _families(
    offered: Int64s, leaf_parent: Int32s, parent: Int32s, pending: NDArray[np.int32],
    prefix_s: Floats,
) -> Int64s:  # fmt: skip
    """The highest node above each leaf whose prefix a shard would have to compute, or -1.

    Args:
        pending: ``[m]``, requests of that shard below each node.
    """
    family = np.full(len(offered), -1, np.int64)
    for i in range(len(offered)):
        node = leaf_parent[offered[i]]
        while node >= 0 and pending[node] == 0:
            if prefix_s[node] > 0.0:
                family[i] = node
            node = parent[node]
    return family


def _in_order(
    family: Int64s, node: Int32s, far: Floats, pending: NDArray[np.int32]
) -> Int64s:
    """The order in which leaves are given away, int64.

    Args:
        family, node, far: of each leaf: the family, -1 for none, the node above, and the
            place in the order.
        pending: ``[m]``, requests of the giver below each node.
    """
    m = len(pending)
    whole = np.bincount(family[family >= 0], minlength=m) == pending
    divided = (family >= 0) & ~whole[family]
    # The first use of each family, and of the siblings within it.
    first = np.full((2, m + 1), np.inf)
    np.minimum.at(first[0], family, far)
    np.minimum.at(first[1], node, far)
    order: Int64s = np.lexsort(
        (-far, node, -first[1][node], family, -first[0][family], divided)
    )
    return order


@jit
def _give(
    offered: Int64s, family: Int64s, giver: int, taker: int, shard: Int32s, parent: Int32s,
    leaf_parent: Int32s, prefix_s: Floats, compute: Floats, memory: Floats,
    pending: NDArray[np.int32], begun: NDArray[np.int32], loads: NDArray[np.float64],
    exponent: float,
) -> bool:  # fmt: skip
    """Move some of the offered leaves, family by family. Returns whether any moved."""
    moved, begin = False, 0
    while begin < len(offered):
        end = begin + 1
        while end < len(offered) and family[end] == family[begin]:
            end += 1
        least, best, at = _cost(loads, giver, taker, exponent), begin, begin
        while at < end:
            leaf = offered[at]
            _move(
                leaf, giver, taker, shard, parent, leaf_parent, prefix_s, compute,
                memory, pending, begun, loads,
            )  # fmt: skip
            at += 1
            now = _cost(loads, giver, taker, exponent)
            # By more than rounding errors.
            if now < least * (1.0 - 1e-9):
                least, best = now, at
        for i in range(best, at):
            _move(
                offered[i], taker, giver, shard, parent, leaf_parent, prefix_s, compute,
                memory, pending, begun, loads,
            )  # fmt: skip
        moved |= best > begin
        if begin < best < end:
            break  # both end together
        begin = end
    return moved


@jit
def _move(
    leaf: int, giver: int, taker: int, shard: Int32s, parent: Int32s,
    leaf_parent: Int32s, prefix_s: Floats, compute: Floats, memory: Floats,
    pending: NDArray[np.int32], begun: NDArray[np.int32], loads: NDArray[np.float64],
) -> None:  # fmt: skip
    """Move one leaf, and count the prefixes that are no longer or newly needed."""
    shard[leaf] = taker
    loads[0, giver] -= compute[leaf]
    loads[1, giver] -= memory[leaf]
    loads[0, taker] += compute[leaf]
    loads[1, taker] += memory[leaf]
    node = leaf_parent[leaf]
    while node >= 0:
        pending[giver, node] -= 1
        if pending[giver, node] == 0 and begun[giver, node] == 0:
            loads[0, giver] -= prefix_s[node]
        if pending[taker, node] == 0 and begun[taker, node] == 0:
            loads[0, taker] += prefix_s[node]
        pending[taker, node] += 1
        node = parent[node]


@jit
def _cost(loads: NDArray[np.float64], giver: int, taker: int, exponent: float) -> float:
    """What moves have to lower: the later end, and the work of both together."""
    a = overlapped(max(loads[0, giver], 0.0), max(loads[1, giver], 0.0), exponent)
    b = overlapped(max(loads[0, taker], 0.0), max(loads[1, taker], 0.0), exponent)
    return max(a, b) + a + b
