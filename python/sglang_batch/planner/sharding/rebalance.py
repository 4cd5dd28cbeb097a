"""Requests of a running job that move between shards, so that all shards end together.

The slowest shard gives requests to the fastest, one family after another: a family has
the requests that lack the same prefix in the other shard. First go those that can go as a
whole, and of these, those that come last in the order. As much of a family moves as makes
both shards end earliest, where each second of computing its prefix again must save one. So
a family stays together, or stays where it is, if its prefix is long, and is divided if its
own work is longer.

The replicas of one server, few and of the same speed, even out in pairs. Among many
engines, or engines of different speed, the slowest gives until it ends with the mean, not
with the fastest, so that a few gifts of each suffice, and one that has nothing to give does
not keep the others from it. An engine that is not there first leaves all that was not sent
to the one that then ends first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...errors import InputError
from ..costs.cost_model import CostModel
from ..costs.tree_work import LeafWork
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Bools, Floats, Int32s, Int64s
from .gifts import (
    GIVER,
    TAKER,
    LeafTimes,
    count,
    families,
    forget,
    give,
    in_order,
    prefixes_s,
)
from .speeds import ShardSpeeds, speeds_for

# Shards whose ends differ by less than this share are equal.
_EQUAL = 1e-3
# Most gifts of one shard to another, for each shard. Two or three suffice.
_MAX_GIFTS = 8
# Most shards that even out in pairs.
_MOST_IN_PAIRS = 64


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
    speeds: ShardSpeeds | None = None,
) -> Int32s:
    """The shard of each leaf after moves that make the slowest shard faster.

    Args:
        work: estimated work of whole requests by leaf of ``tree``.
        speeds: of the shards' engines, by their numbers. Shards without an engine keep
            only what may not move. None: all engines are as fast.

    Returns:
        int32 ``[n]``. The same as before if no engine is there.

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
        shards.leave_missing()
        shards.even_out()
    return shards.shard


class _Shards:
    """The shards of a running job while requests move between them.

    Attributes:
        shard: int32 ``[n]``, of each leaf.
    """

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
        # Requests of a giver and a taker below each node. Zeros between gifts.
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

    def leave_missing(self) -> None:
        """Take all that may move away from engines that are not there.

        It goes as a whole to the shard that then ends first, which may give it on.
        """
        for missing in self._missing:
            members = self._members[missing]
            left = members[self._times.may_move[members]]
            if len(left):
                loads = self._loads[:, self._there].T + self._load(left)
                heir = self._there[np.argmin(self._ends(loads.T, self._there))]
                self._hand_over(left, missing, heir)
                self._loads[:, heir] = self._load(self._members[heir])

    def even_out(self) -> None:
        """Let the slowest shard give to the fastest until they end together."""
        there = self._there
        seconds = self._ends(self._loads[:, there], there)
        if not seconds.any():
            return
        in_pairs = len(there) <= _MOST_IN_PAIRS and np.all(self._slow[:, there] == 1.0)
        # How much of the job each engine can do in the same time.
        pace = 1.0 / self._ends(self._loads.sum(axis=1, keepdims=True), there)
        gives = np.ones(len(there), np.bool_)
        for _ in range(_MAX_GIFTS * len(there)):
            giver = int(np.argmax(np.where(gives, seconds, -1.0)))
            if in_pairs:
                enough_s, taker = 0.0, int(np.argmin(seconds))
                difference = seconds[giver] - seconds[taker]
            else:
                enough_s = float(np.average(seconds[gives], weights=pace[gives]))
                taker = int(np.argmax((enough_s - seconds) * pace))
                difference = seconds[giver] - enough_s
            if difference <= _EQUAL * seconds[giver]:
                break
            pair = there[[giver, taker]]
            if self._give(pair, enough_s):
                seconds[[giver, taker]] = self._ends(self._loads[:, pair], pair)
                continue
            gives[giver] = False
            if in_pairs or not gives.any():
                break

    def _give(self, pair: Int64s, enough_s: float) -> bool:
        """Let a giver give to a taker. Returns whether it did.

        Args:
            enough_s: the giver need not end earlier.
        """
        giver, taker = pair
        times = self._times
        for row, shard in enumerate(pair):
            count(self._members[shard], times, self._pending[row], self._begun[row])
        members = self._members[giver]
        offered = members[times.may_move[members]]
        family = families(offered, times, self._pending[TAKER])
        order = in_order(
            family, times.leaf_parent[offered], self._far[offered], self._pending[GIVER]
        )
        loads = self._loads[:, pair]
        offered = offered[order]
        moves = give(
            offered, family[order], times, self._pending, self._begun, loads,
            self._slow[:, pair], enough_s, float(self._cost.interference_exponent),
        )  # fmt: skip
        for shard in pair:
            forget(self._members[shard], times, self._pending, self._begun)
        self._loads[:, pair] = loads
        if not moves.any():
            return False
        self._hand_over(np.sort(offered[moves]), giver, taker)
        return True

    def _hand_over(self, leaves: Int64s, giver: int, taker: int) -> None:
        """Note that ascending leaves have another shard."""
        self.shard[leaves] = taker
        members = self._members
        members[giver] = members[giver][self.shard[members[giver]] == giver]
        members[taker] = np.sort(np.concatenate([members[taker], leaves]))
