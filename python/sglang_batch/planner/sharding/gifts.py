"""A gift: requests that one shard gives to another, one family after another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit
from ..costs.cost_model import overlapped
from ..requests import Bools, Floats, Int32s, Int64s

# Rows of arrays that are of a giver and a taker.
GIVER, TAKER = 0, 1

Counts = NDArray[np.int32]


class LeafTimes(NamedTuple):
    """What is left of a job, by the nodes of its tree and by leaf. Times are in seconds of
    the cost model.

    parent, leaf_parent: as of the tree.
    prefix_s: float64 ``[m]``, to compute a node's own part of its prefix.
    compute_s, memory_s: float64 ``[n]``, of the requests without shared prefixes.
    may_move, pending: bool ``[n]``, whether a request can be given, and whether it has not
        ended.
    """

    parent: Int32s
    leaf_parent: Int32s
    prefix_s: Floats
    compute_s: Floats
    memory_s: Floats
    may_move: Bools
    pending: Bools


@jit
def prefixes_s(
    members: Int64s, times: LeafTimes, pending: Counts, begun: Counts
) -> float:
    """Seconds to compute all prefixes that a shard needs and has not computed.

    Args:
        members: int64, leaves of the shard.
        pending, begun: int32 ``[m]`` of zeros, as they are again afterwards.
    """
    count(members, times, pending, begun)
    total = 0.0
    for leaf in members:
        node = times.leaf_parent[leaf]
        while node >= 0 and (pending[node] > 0 or begun[node] > 0):
            if begun[node] == 0:
                total += times.prefix_s[node]
            pending[node] = begun[node] = 0
            node = times.parent[node]
    return total


@jit
def count(members: Int64s, times: LeafTimes, pending: Counts, begun: Counts) -> None:
    """Add a shard's requests to the nodes above them, int32 ``[m]`` each: those that have
    not ended, and those that have begun, so that the prefix is computed."""
    for leaf in members:
        node = times.leaf_parent[leaf]
        while node >= 0:
            pending[node] += times.pending[leaf]
            begun[node] += not times.may_move[leaf]
            node = times.parent[node]


@jit
def forget(members: Int64s, times: LeafTimes, pending: Counts, begun: Counts) -> None:
    """Set the nodes above a shard's requests to 0 again, for both shards of a gift."""
    for leaf in members:
        node = times.leaf_parent[leaf]
        while node >= 0:
            for shard in (GIVER, TAKER):
                pending[shard, node] = begun[shard, node] = 0
            node = times.parent[node]


@jit
def families(offered: Int64s, times: LeafTimes, pending: Counts) -> Int64s:
    """The highest node above each leaf whose prefix the taker would have to compute, or -1.

    Args:
        pending: int32 ``[m]``, requests of the taker below each node.
    """
    family = np.full(len(offered), -1, np.int64)
    for i in range(len(offered)):
        node = times.leaf_parent[offered[i]]
        while node >= 0 and pending[node] == 0:
            if times.prefix_s[node] > 0.0:
                family[i] = node
            node = times.parent[node]
    return family


def in_order(family: Int64s, node: Int32s, far: Floats, pending: Counts) -> Int64s:
    """The order in which leaves are given away, int64.

    Args:
        family, node, far: of each leaf: the family, -1 for none, the node above, and the
            place in the order.
        pending: int32 ``[m]``, requests of the giver below each node.
    """
    each, place = np.unique(family, return_inverse=True)
    whole = np.bincount(place, minlength=len(each)) == pending[each]
    divided = (each >= 0) & ~whole
    siblings, place_below = np.unique(node, return_inverse=True)
    # The first use of each family, and of the siblings within it.
    first = np.full(len(each), np.inf)
    np.minimum.at(first, place, far)
    first_below = np.full(len(siblings), np.inf)
    np.minimum.at(first_below, place_below, far)
    order: Int64s = np.lexsort(
        (-far, node, -first_below[place_below], family, -first[place], divided[place])
    )
    return order


@jit
def give(
    offered: Int64s, family: Int64s, times: LeafTimes, pending: Counts, begun: Counts,
    loads: Floats, slow: Floats, enough_s: float, exponent: float,
) -> Bools:  # fmt: skip
    """Move some of the offered leaves, family by family. Returns which, bool.

    Args:
        offered, family: int64, the leaves in the order in which they are offered, and
            their families.
        pending, begun: int32 ``[2, m]``, requests of the giver and the taker below each
            node, which are changed.
        loads: float64 ``[2, 2]``, compute and memory seconds of the giver and the taker,
            which are changed.
        slow: float64 ``[2, 2]``, seconds that the engines of both take for one of those.
        enough_s: seconds below which an end is as good as any other. 0: all families are
            offered.
        exponent: k of :func:`~..costs.cost_model.overlapped`.
    """
    # As if both engines had the mean of their speeds.
    mean = 2.0 / (1.0 / slow[:, GIVER] + 1.0 / slow[:, TAKER])
    moved = np.zeros(len(offered), np.bool_)
    begin = 0
    while begin < len(offered):
        if enough_s > 0.0 and _seconds_of(
            loads, slow[:, GIVER], GIVER, exponent
        ) <= max(enough_s, _seconds_of(loads, slow[:, TAKER], TAKER, exponent)):
            break
        end = begin + 1
        while end < len(offered) and family[end] == family[begin]:
            end += 1
        least, best, at = _cost(loads, slow, mean, enough_s, exponent), begin, begin
        while at < end:
            _move(offered[at], TAKER, times, pending, begun, loads)
            at += 1
            now = _cost(loads, slow, mean, enough_s, exponent)
            # By more than rounding errors.
            if now < least * (1.0 - 1e-9):
                least, best = now, at
        for i in range(best, at):
            _move(offered[i], GIVER, times, pending, begun, loads)
        moved[begin:best] = True
        if begin < best < end:
            break  # both end together
        begin = end
    return moved


@jit
def _move(
    leaf: int, to: int, times: LeafTimes, pending: Counts, begun: Counts, loads: Floats
) -> None:
    """Move one leaf, and count the prefixes that are no longer or newly needed."""
    of = 1 - to
    loads[0, of] -= times.compute_s[leaf]
    loads[1, of] -= times.memory_s[leaf]
    loads[0, to] += times.compute_s[leaf]
    loads[1, to] += times.memory_s[leaf]
    node = times.leaf_parent[leaf]
    while node >= 0:
        pending[of, node] -= 1
        if pending[of, node] == 0 and begun[of, node] == 0:
            loads[0, of] -= times.prefix_s[node]
        if pending[to, node] == 0 and begun[to, node] == 0:
            loads[0, to] += times.prefix_s[node]
        pending[to, node] += 1
        node = times.parent[node]


@jit
def _cost(
    loads: Floats, slow: Floats, mean: Floats, enough_s: float, exponent: float
) -> float:
    """What moves have to lower: the later end, and the work of both together."""
    given = _seconds_of(loads, slow[:, GIVER], GIVER, exponent)
    taken = _seconds_of(loads, slow[:, TAKER], TAKER, exponent)
    later = max(given, taken, enough_s)
    if slow[0, GIVER] != slow[0, TAKER] or slow[1, GIVER] != slow[1, TAKER]:
        given = _seconds_of(loads, mean, GIVER, exponent)
        taken = _seconds_of(loads, mean, TAKER, exponent)
    return later + given + taken


@jit
def _seconds_of(loads: Floats, slow: Floats, shard: int, exponent: float) -> float:
    """Seconds that an engine as slow, ``[2]``, takes for the loads of a shard."""
    compute, memory = max(loads[0, shard], 0.0), max(loads[1, shard], 0.0)
    seconds: float = overlapped(compute * slow[0], memory * slow[1], exponent)
    return seconds
