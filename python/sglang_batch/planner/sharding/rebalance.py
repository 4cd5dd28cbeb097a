"""Requests of a running job that move between shards, so that all shards end together.

The slowest shard can give requests to the fastest, one family after another: a family has
the requests that lack the same prefix in the other shard. First go those that can go as a
whole, and of these, those that come last in the order. As much of a family moves as makes
both shards end earliest, where each second of computing its prefix again must save one.

The replicas of one server, few and of the same speed, even out in pairs. Among many
engines, or engines of different speed, the slowest gives until it ends with the mean, so
that a few moves of each suffice, and one that has nothing to give does not keep the others
from it. An engine that is not there first leaves all that was not sent to the one that then
ends first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..compiled import jit
from ..costs.cost_model import CostModel, overlapped
from ..costs.tree_work import LeafWork
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Bools, Floats, Int32s, Int64s
from .speeds import ShardSpeeds, speeds_for

# Shards whose ends differ by less than this share are equal.
_EQUAL = 1e-3
# Most moves from one shard to another, for each shard. Two or three suffice.
_MAX_MOVES = 8
# Most shards that even out in pairs.
_MOST_IN_PAIRS = 64


class LeafState(NamedTuple):
    """Where the requests of a running job are, each ``[n]`` by leaf.

    shard: int32, the shard that has the request.
    may_move: bool, whether it has not been sent. Others stay.
    left: float64, the share of its work that is still to be done, 0 to 1.
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
    speeds: ShardSpeeds | None = None,
) -> Int32s:
    """The shard of each leaf after moves that make the slowest shard faster, int32 ``[n]``.

    Args:
        work: estimated work of whole requests by leaf of ``tree``.
        speeds: of the shards' engines. Shards without an engine keep only requests that may
            not move; if none is there, nothing moves. None: all engines are as fast.

    Raises:
        ConfigError: there are not as many speeds as shards.
        InputError: a request is in none of the shards.
    """
    speeds = speeds_for(speeds, num_shards)
    outside = (state.shard < 0) | (state.shard >= num_shards)
    if outside.any():
        raise InputError(
            f"A request is in shard {state.shard[outside][0]} of {num_shards}; shards "
            "keep their numbers, with a speed of 0 where the engine left."
        )
    shards = _Shards(tree, cost, work, state, speeds)
    if speeds.there.any():
        shards.empty_missing()
        shards.even_out()
    return shards.shard


class _Shards:
    """The shards of a running job while requests move between them; ``shard`` is int32 ``[n]``."""

    def __init__(
        self,
        tree: PrefixTree,
        cost: CostModel,
        work: LeafWork,
        state: LeafState,
        speeds: ShardSpeeds,
    ) -> None:
        self.shard = state.shard.copy()
        self._cost, self._far = cost, state.far
        self._there = np.flatnonzero(speeds.there)
        self._missing = np.flatnonzero(~speeds.there)
        self._slow = speeds.slowness()
        prefill = cost.prefill_time_s(tree.depth, 0)
        own = cost.prefill_time_s(tree.input_len, 0) - prefill[tree.leaf_parent]
        self._times = LeafTimes(
            tree.parent,
            tree.leaf_parent,
            prefill - np.where(tree.parent >= 0, prefill[tree.parent], 0.0),
            work.decode_s * state.left + np.where(state.may_move, own, 0.0),
            work.memory_s * state.left,
            state.may_move,
            state.may_move | (state.left > 0.0),
        )
        # Ascending leaves of each shard.
        ends = np.cumsum(np.bincount(self.shard, minlength=len(speeds)))
        self._members = np.split(np.argsort(self.shard, kind="stable"), ends[:-1])
        # Requests of a giver and a taker below each node. Zeros between moves.
        self._pending = np.zeros((2, tree.num_nodes), np.int32)
        self._begun = np.zeros((2, tree.num_nodes), np.int32)
        # Compute and memory seconds. Nobody counts those of missing engines.
        self._loads = np.zeros((2, len(speeds)))
        for shard in self._there:
            self._loads[:, shard] = self._load(self._members[shard])

    def _load(self, leaves: Int64s) -> tuple[float, float]:
        """Compute and memory seconds of the leaves as a shard."""
        times = self._times
        prefixes = prefixes_s(leaves, times, self._pending[0], self._begun[0])
        compute = float(times.compute_s[leaves].sum())
        return compute + prefixes, float(times.memory_s[leaves].sum())

    def _ends(self, loads: Floats, shards: Int64s) -> Floats:
        """Seconds that engines take for compute and memory seconds of ``[2, shards]``."""
        return self._cost.step_time_s(*(loads * self._slow[:, shards]))

    def empty_missing(self) -> None:
        """Take all that may move away from engines that are not there, each as a whole to the shard
        that then ends first, which may give it on."""
        for missing in self._missing:
            members = self._members[missing]
            left = members[self._times.may_move[members]]
            if len(left):
                loads = self._loads[:, self._there].T + self._load(left)
                receiver = self._there[np.argmin(self._ends(loads.T, self._there))]
                self._reassign(left, missing, receiver)
                self._loads[:, receiver] = self._load(self._members[receiver])

    def even_out(self) -> None:
        """Move requests from the slowest shard to the fastest until they end together."""
        there = self._there
        seconds = self._ends(self._loads[:, there], there)
        if not seconds.any():
            return
        in_pairs = len(there) <= _MOST_IN_PAIRS and np.all(self._slow[:, there] == 1.0)
        # How much of the job each engine can do in the same time.
        pace = 1.0 / self._ends(self._loads.sum(axis=1, keepdims=True), there)
        can_give = np.ones(len(there), np.bool_)
        for _ in range(_MAX_MOVES * len(there)):
            giver = int(np.argmax(np.where(can_give, seconds, -1.0)))
            if in_pairs:
                target_s, taker = 0.0, int(np.argmin(seconds))
                difference = seconds[giver] - seconds[taker]
            else:
                target_s = float(np.average(seconds[can_give], weights=pace[can_give]))
                taker = int(np.argmax((target_s - seconds) * pace))
                difference = seconds[giver] - target_s
            if difference <= _EQUAL * seconds[giver]:
                break
            pair = there[[giver, taker]]
            if self._move_between(pair, target_s):
                seconds[[giver, taker]] = self._ends(self._loads[:, pair], pair)
                continue
            can_give[giver] = False
            if in_pairs or not can_give.any():
                break

    def _move_between(self, pair: Int64s, target_s: float) -> bool:
        """Move requests until the giver ends at ``target_s`` or no move helps. Returns
        whether any moved."""
        giver, taker = pair
        times = self._times
        for row, shard in enumerate(pair):
            count_requests(
                self._members[shard], times, self._pending[row], self._begun[row]
            )
        members = self._members[giver]
        offered = members[times.may_move[members]]
        family = families(offered, times, self._pending[TAKER])
        order = move_order(
            family, times.leaf_parent[offered], self._far[offered], self._pending[GIVER]
        )
        loads = PairLoads(
            self._loads[:, pair],
            self._slow[:, pair],
            target_s,
            float(self._cost.interference_exponent),
        )
        offered = offered[order]
        moves = move_families(
            offered, family[order], times, self._pending, self._begun, loads
        )
        for shard in pair:
            reset_counts(self._members[shard], times, self._pending, self._begun)
        self._loads[:, pair] = loads.loads
        if not moves.any():
            return False
        self._reassign(np.sort(offered[moves]), giver, taker)
        return True

    def _reassign(self, leaves: Int64s, giver: int, taker: int) -> None:
        """Note that ascending leaves have another shard."""
        self.shard[leaves] = taker
        members = self._members
        members[giver] = members[giver][self.shard[members[giver]] == giver]
        members[taker] = np.sort(np.concatenate([members[taker], leaves]))


# Rows of arrays that are of a giver and a taker.
GIVER, TAKER = 0, 1

Counts = NDArray[np.int32]


class LeafTimes(NamedTuple):
    """The work that is left of a job, in seconds of the cost model.

    parent, leaf_parent: as of the tree.
    prefix_s: float64 ``[m]``, to compute a node's own part of its prefix.
    compute_s, memory_s: float64 ``[n]``, of the requests without shared prefixes.
    may_move, pending: bool ``[n]``, whether a request can be given, and has not ended.
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
    """Seconds to compute all prefixes that a shard of these leaves needs and has not computed.
    ``pending`` and ``begun`` are int32 ``[m]`` of zeros, as they are again afterwards."""
    count_requests(members, times, pending, begun)
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
def count_requests(
    members: Int64s, times: LeafTimes, pending: Counts, begun: Counts
) -> None:
    """Add a shard's requests to the nodes above them, int32 ``[m]`` each: those that have
    not ended, and those that have begun, so that the prefix is computed."""
    for leaf in members:
        node = times.leaf_parent[leaf]
        while node >= 0:
            pending[node] += times.pending[leaf]
            begun[node] += not times.may_move[leaf]
            node = times.parent[node]


@jit
def reset_counts(
    members: Int64s, times: LeafTimes, pending: Counts, begun: Counts
) -> None:
    """Set the nodes above a shard's requests to 0 again, for both shards of a move."""
    for leaf in members:
        node = times.leaf_parent[leaf]
        while node >= 0:
            for shard in (GIVER, TAKER):
                pending[shard, node] = begun[shard, node] = 0
            node = times.parent[node]


@jit
def families(offered: Int64s, times: LeafTimes, pending: Counts) -> Int64s:
    """The highest node above each leaf whose prefix the taker, with ``pending`` requests below
    each node, would have to compute, or -1."""
    family = np.full(len(offered), -1, np.int64)
    for i in range(len(offered)):
        node = times.leaf_parent[offered[i]]
        while node >= 0 and pending[node] == 0:
            if times.prefix_s[node] > 0.0:
                family[i] = node
            node = times.parent[node]
    return family


def move_order(family: Int64s, node: Int32s, far: Floats, pending: Counts) -> Int64s:
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


class PairLoads(NamedTuple):
    """The loads of a giver and a taker while requests move between them.

    loads: float64 ``[2, 2]``, compute and memory seconds of both, which moves change.
    slow: float64 ``[2, 2]``, seconds that the engines of both take for one of those.
    target_s: seconds below which all ends are as good. 0: all families are offered.
    exponent: k of :func:`~..costs.cost_model.overlapped`.
    """

    loads: Floats
    slow: Floats
    target_s: float
    exponent: float


@jit
def move_families(
    offered: Int64s, family: Int64s, times: LeafTimes, pending: Counts, begun: Counts,
    pair: PairLoads,
) -> Bools:  # fmt: skip
    """Move some of the offered leaves, family by family. Returns which, bool.

    Args:
        offered, family: int64, the leaves in the order in which they are offered.
        pending, begun: int32 ``[2, m]``, requests of the giver and the taker below each
            node, which are changed.
    """
    slow, target_s = pair.slow, pair.target_s
    # As if both engines had the mean of their speeds.
    mean = 2.0 / (1.0 / slow[:, GIVER] + 1.0 / slow[:, TAKER])
    latest = _later(pair) * (1.0 + 1e-9)
    moved = np.zeros(len(offered), np.bool_)
    begin = 0
    while begin < len(offered):
        if target_s > 0.0 and _seconds_of(pair, slow[:, GIVER], GIVER) <= max(
            target_s, _seconds_of(pair, slow[:, TAKER], TAKER)
        ):
            break
        end = begin + 1
        while end < len(offered) and family[end] == family[begin]:
            end += 1
        least, best, at = _cost(pair, mean), begin, begin
        while at < end:
            _move(offered[at], TAKER, times, pending, begun, pair.loads)
            at += 1
            now = _cost(pair, mean)
            # By more than rounding errors. Work is not saved at the price of a later end.
            if now < least * (1.0 - 1e-9) and _later(pair) <= latest:
                least, best = now, at
        for i in range(best, at):
            _move(offered[i], GIVER, times, pending, begun, pair.loads)
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
def _later(pair: PairLoads) -> float:
    """Seconds until the last of both ends."""
    given = _seconds_of(pair, pair.slow[:, GIVER], GIVER)
    return max(given, _seconds_of(pair, pair.slow[:, TAKER], TAKER))


@jit
def _cost(pair: PairLoads, mean: Floats) -> float:
    """The cost that moves have to lower: the later end, and the work of both together."""
    slow = pair.slow
    given = _seconds_of(pair, slow[:, GIVER], GIVER)
    taken = _seconds_of(pair, slow[:, TAKER], TAKER)
    later = max(given, taken, pair.target_s)
    if slow[0, GIVER] != slow[0, TAKER] or slow[1, GIVER] != slow[1, TAKER]:
        given = _seconds_of(pair, mean, GIVER)
        taken = _seconds_of(pair, mean, TAKER)
    return later + given + taken


@jit
def _seconds_of(pair: PairLoads, slow: Floats, shard: int) -> float:
    """Seconds that an engine as slow, ``[2]``, takes for the loads of a shard."""
    compute, memory = max(pair.loads[0, shard], 0.0), max(pair.loads[1, shard], 0.0)
    seconds: float = overlapped(compute * slow[0], memory * slow[1], pair.exponent)
    return seconds
