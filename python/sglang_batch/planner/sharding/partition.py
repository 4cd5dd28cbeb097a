"""One job cut into shards of equal compute and equal memory time, one per device.

BlendServe (section 6.1) gives every device of a data-parallel set a part of the job
with the same work and the density of the whole, at the cost of computing the prompts
along the split paths again. Here the tree is first divided into units: large subtrees
are opened into their children as long as few shared tokens are lost, and small siblings
are kept together in runs. Units are then dealt, largest first, to the shards with least
of the unit's kind of work, and moved as long as that makes the shards more equal.
Finally the slowest shard hands over units as long as that makes it faster: a request
with more than a fair share of the memory time leaves less time for other work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ..compiled import jit
from ..costs.cost_model import CostModel
from ..costs.tree_work import LeafWork, node_work
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Bools, Floats, Int32s, Int64s
from .dealing import deal, ease_slowest

# More sharing than allowed is lost only if the slowest shard takes longer than equal
# shards without repeated tokens by more than this share, and gains more than this.
_TOLERANCE = 0.01

# Most passes over all units to move them once dealt. Two or three suffice.
_MAX_PASSES = 20


@dataclass(frozen=True, slots=True)
class Partition:
    """The shard of each request, for ``k`` shards, some of which may be empty.

    shard: int32 ``[n]`` by request, 0..k-1.
    compute_s, memory_s: float64 ``[k]``, estimated work of each shard in seconds. A
        shared prefix counts once in every shard that has it.
    lost_tokens: prompt tokens computed in addition to those of a single tree.
    """

    shard: Int32s
    compute_s: Floats
    memory_s: Floats
    lost_tokens: int

    @property
    def num_shards(self) -> int:
        """``k``."""
        return len(self.compute_s)

    def requests_of(self, shard: int) -> Int64s:
        """The requests of a shard in ascending order, int64."""
        return np.flatnonzero(self.shard == shard)


def partition(
    tree: PrefixTree,
    cost: CostModel,
    work: LeafWork,
    num_shards: int,
    *,
    granularity: int = 256,
    max_lost_sharing: float = 0.005,
) -> Partition:
    """Cut a job into shards with equal shares of its compute and of its memory time.

    Args:
        work: estimated work by leaf of ``tree``.
        granularity: approximate units per shard. Only subtrees with more than
            ``1 / (num_shards * granularity)`` of the job's compute or memory time are
            opened, and siblings are gathered up to that size. A single request is
            never divided.
        max_lost_sharing: share of the shared prompt tokens that may be lost, 0 to 1.
            More is lost only if the slowest shard would otherwise take over 1 % longer
            than its fair share, and only if that makes it over 1 % faster.

    Raises:
        ConfigError: a setting is out of range.
    """
    _check(num_shards, granularity, max_lost_sharing)
    if num_shards == 1:
        return _measured(tree, cost, work, np.zeros(tree.num_requests, np.int32), 1)
    shares = _shares(tree, cost, work)
    fair_s = float(cost.step_time_s(shares.compute_s, shares.memory_s)) / num_shards
    grain = 1.0 / (num_shards * granularity)
    larger = np.maximum(shares.compute, shares.memory)[: tree.num_nodes]
    larger = _at_most_parents(tree.parent, larger)
    candidates = np.argsort(-larger, kind="stable")[: np.count_nonzero(larger > grain)]
    # Every shard with a part of an opened node computes its prefix.
    length = tree.depth - np.where(tree.parent >= 0, tree.depth[tree.parent], 0)
    price = length.astype(np.int64) * (num_shards - 1)

    budget = max_lost_sharing * (tree.num_tokens - tree.num_unique_tokens)
    best, best_s = None, np.inf
    while True:
        opened = _open_nodes(candidates, tree.parent, price, budget)
        leaf_shard = _dealt(tree, cost, shares, opened, grain, num_shards)
        found = _measured(tree, cost, work, leaf_shard, num_shards)
        slowest_s = cost.step_time_s(found.compute_s, found.memory_s).max()
        if best is None or slowest_s < (1 - _TOLERANCE) * best_s:
            best, best_s = found, slowest_s
        if best_s <= (1 + _TOLERANCE) * fair_s or budget >= price[candidates].sum():
            return best
        budget = max(2 * budget, tree.num_tokens / 1000)


def _check(num_shards: int, granularity: int, max_lost_sharing: float) -> None:
    if num_shards < 1:
        raise ConfigError(f"num_shards={num_shards!r} must be 1 or more.")
    if granularity < 1:
        raise ConfigError(f"granularity={granularity!r} must be 1 or more.")
    if not 0 <= max_lost_sharing <= 1:
        raise ConfigError(f"max_lost_sharing={max_lost_sharing!r} must be 0 to 1.")


def _measured(
    tree: PrefixTree,
    cost: CostModel,
    work: LeafWork,
    leaf_shard: Int32s,
    num_shards: int,
) -> Partition:
    """The partition with this shard for each leaf, int32 ``[n]``."""
    shared = _shared_within_shards(tree.lcp, leaf_shard, num_shards)
    compute = _prefill_s(cost, tree.input_len) - _prefill_s(cost, shared)
    compute += work.decode_s
    shard = np.empty_like(leaf_shard)
    shard[tree.order] = leaf_shard
    return Partition(
        shard=shard,
        compute_s=np.bincount(leaf_shard, compute, num_shards).astype(np.float64),
        memory_s=np.bincount(leaf_shard, work.memory_s, num_shards).astype(np.float64),
        lost_tokens=int(tree.lcp.sum(dtype=np.int64) - shared.sum(dtype=np.int64)),
    )


def _prefill_s(cost: CostModel, num_tokens: Int32s) -> Floats:
    """Compute time of whole prompts, in seconds."""
    return cost.prefill_time_s(num_tokens, 0)


# --- From the tree to units.


class _Shares(NamedTuple):
    """Work as shares of the job's compute and memory time, 0 if the job has none.

    compute, memory: float64 ``[m + n]``, of each subtree and of each leaf, including
        their prefixes from the root on.
    prefix: float64 ``[m]``, compute of each node's prefix from the root on.
    compute_s, memory_s: the job's compute and memory time, in seconds.
    """

    compute: Floats
    memory: Floats
    prefix: Floats
    compute_s: float
    memory_s: float


def _shares(tree: PrefixTree, cost: CostModel, work: LeafWork) -> _Shares:
    nodes, memory = node_work(tree, cost, work)
    total, total_memory = float(nodes[0]), float(memory[0])
    scale = 1.0 / total if total > 0 else 0.0
    memory_scale = 1.0 / total_memory if total_memory > 0 else 0.0
    leaves = _prefill_s(cost, tree.input_len) + work.decode_s
    return _Shares(
        compute=np.concatenate([nodes, leaves]) * scale,
        memory=np.concatenate([memory, work.memory_s]) * memory_scale,
        prefix=_prefill_s(cost, tree.depth) * scale,
        compute_s=total,
        memory_s=total_memory,
    )


@jit
def _at_most_parents(parent: Int32s, values: Floats) -> Floats:
    """Values clipped to the parent's, which only rounding errors exceed."""
    clipped = values.copy()
    for node in range(1, len(parent)):
        clipped[node] = min(clipped[node], clipped[parent[node]])
    return clipped


@jit
def _open_nodes(
    candidates: Int64s, parent: Int32s, price: Int64s, budget: float
) -> Bools:
    """Nodes to open within the budget, in the order of the candidates, bool ``[m]``."""
    opened = np.zeros(len(parent), np.bool_)
    opened[0] = True
    left = budget
    for node in candidates:
        if node > 0 and opened[parent[node]] and price[node] <= left:
            opened[node] = True
            left -= price[node]
    return opened


def _dealt(
    tree: PrefixTree,
    cost: CostModel,
    shares: _Shares,
    opened: Bools,
    grain: float,
    num_shards: int,
) -> Int32s:
    """The shard of each leaf, int32 ``[n]``. Opened nodes may be in several shards."""
    begin, compute, memory = _make_units(
        opened, tree.parent, tree.leaf_parent, tree.leaf_end,
        shares.compute, shares.memory, shares.prefix, grain,
    )  # fmt: skip
    largest_first = np.argsort(-np.maximum(compute, memory), kind="stable")
    unit_shard = deal(largest_first, compute, memory, num_shards, _MAX_PASSES)
    ease_slowest(
        unit_shard, compute * shares.compute_s, memory * shares.memory_s, num_shards,
        cost.interference_exponent,
    )  # fmt: skip
    return np.repeat(unit_shard, np.diff(begin))


@jit
def _make_units(
    opened: Bools, parent: Int32s, leaf_parent: Int32s, leaf_end: Int64s,
    share_compute: Floats, share_memory: Floats, prefix: Floats, grain: float,
) -> tuple[Int64s, Floats, Floats]:  # fmt: skip
    """The first leaf position of each unit, int64 ``[u + 1]``, and its work, ``[u]``.

    A unit is a run of unopened children of an opened node: one child, or several with
    at most ``grain`` together. The prefixes of opened nodes belong to no unit.
    """
    n, m = len(leaf_parent), len(parent)
    whole = np.full(m, -1, np.int64)
    for node in range(1, m):
        above = whole[parent[node]]
        whole[node] = above if above >= 0 or opened[node] else node
    begin = np.empty(n + 1, np.int64)
    compute, memory = np.empty(n), np.empty(n)
    unit, unit_parent, leaf = -1, -1, 0
    while leaf < n:
        child, above, end = m + leaf, leaf_parent[leaf], leaf + 1
        if whole[above] >= 0:
            child = whole[above]
            above, end = parent[child], leaf_end[child]
        # Rounding errors may make the difference negative.
        c = max(0.0, share_compute[child] - prefix[above])
        r = share_memory[child]
        if above == unit_parent and max(compute[unit] + c, memory[unit] + r) <= grain:
            compute[unit] += c
            memory[unit] += r
        else:
            unit += 1
            begin[unit], compute[unit], memory[unit] = leaf, c, r
            unit_parent = above
        leaf = end
    begin[unit + 1] = n
    return begin[: unit + 2].copy(), compute[: unit + 1], memory[: unit + 1]


# --- Sharing within shards.


@jit
def _shared_within_shards(lcp: Int32s, leaf_shard: Int32s, k: int) -> Int32s:
    """Tokens that each leaf shares with the one before it in its shard, int32 ``[n]``."""
    shared = np.empty(len(lcp), np.int32)
    # Tokens that the next leaf shares with the last one of each shard.
    common = np.zeros(k, np.int32)
    for leaf in range(len(lcp)):
        for s in range(k):
            common[s] = min(common[s], lcp[leaf])
        shared[leaf] = common[leaf_shard[leaf]]
        common[leaf_shard[leaf]] = np.iinfo(np.int32).max
    return shared
