"""One job cut into shards of equal compute and equal memory time, one per device.

BlendServe (section 6.1) gives every device of a data-parallel set a part of the job
with the same work and the density of the whole, at the price of the prompts along the
split paths. Here the tree is first taken apart into units: large subtrees are opened
into their children as long as few shared tokens are at stake, small siblings stay
together in runs. Units are then dealt, largest first, to the shards that have least of
what the unit needs, and moved while that makes the shards more equal. Last, the slowest
shard hands units over while that makes it faster: a request that has more than a fair
share of the memory time leaves less room for other work beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError
from .cost_model import CostModel
from .dealing import deal, ease_slowest
from .density import LeafWork, node_work
from .jit import jit
from .prefix_tree import PrefixTree
from .requests import Bools, Floats, Int32s, Int64s

# More sharing is given up than asked for only where the slowest shard takes longer, by
# more than this, than equal shards without repeated tokens, and gains more than this.
_TOLERANCE = 0.01

# Passes over all units to move them after they were dealt; two or three suffice.
_MAX_PASSES = 20


@dataclass(frozen=True, slots=True)
class Partition:
    """Which shard each request belongs to; ``k`` shards, some maybe empty.

    shard: int32 ``[n]`` by request, 0..k-1.
    compute_s, memory_s: float64 ``[k]``, expected work of each shard; a prefix that
        its requests share counts once in every shard that has it.
    lost_tokens: prompt tokens that are computed more often than in a single tree.
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
        work: expected work by leaf of ``tree``.
        granularity: units per shard, about. Only subtrees with more than a
            ``1 / (num_shards * granularity)`` of the job's compute or memory time are
            opened, and siblings are gathered up to that size. A single request is
            never divided.
        max_lost_sharing: share of the shared prompt tokens that may be lost. More is
            given up only where the slowest shard would otherwise take over 1 % longer
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
    # Whoever has a part of an opened node computes its prefix.
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
    """The partition that gives each leaf this shard."""
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
    """Compute time of prompts from their first token on."""
    return cost.prefill_time_s(num_tokens, 0)


# --- From the tree to units.


class _Shares(NamedTuple):
    """Work as shares of the job's compute and memory time; 0 where the job has none.

    compute, memory: float64 ``[m + n]``, below each node and of each leaf, prefixes
        from the root on included.
    prefix: float64 ``[m]``, compute of each node's prefix from the root on.
    compute_s, memory_s: the job's compute and memory time.
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
    """Values without the rounding errors that put a node before its parent."""
    clipped = values.copy()
    for node in range(1, len(parent)):
        clipped[node] = min(clipped[node], clipped[parent[node]])
    return clipped


@jit
def _open_nodes(
    candidates: Int64s, parent: Int32s, price: Int64s, budget: float
) -> Bools:
    """Nodes to open, in the order of the candidates as far as the budget reaches."""
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
    """The shard of each leaf, where opened nodes may be in several shards."""
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
    """Where units begin, int64 ``[u + 1]`` leaf positions, and their work ``[u]``.

    A unit is a run of children of one opened node, of which none is opened: one child,
    or several that have at most ``grain`` together. The prefixes of opened nodes belong
    to no unit.
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
        # The difference may come out a rounding error below nothing.
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


# --- What comes of it.


@jit
def _shared_within_shards(lcp: Int32s, leaf_shard: Int32s, k: int) -> Int32s:
    """Tokens that each leaf shares with the leaf before it in its shard, int32 [n]."""
    shared = np.empty(len(lcp), np.int32)
    # What the coming leaf shares with the last one of each shard.
    common = np.zeros(k, np.int32)
    for leaf in range(len(lcp)):
        for s in range(k):
            common[s] = min(common[s], lcp[leaf])
        shared[leaf] = common[leaf_shard[leaf]]
        common[leaf_shard[leaf]] = np.iinfo(np.int32).max
    return shared
