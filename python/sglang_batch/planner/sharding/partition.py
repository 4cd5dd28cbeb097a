"""One job cut into shards that take the same time, one per engine.

BlendServe (section 6.1) gives every device of a data-parallel set a part of the job
with the same work and the density of the whole, at the cost of computing the prompts
along the split paths again. Here the tree is first divided into units: large subtrees
are opened into their children as long as few shared tokens are lost, and small siblings
are kept together in runs. Units are then dealt, largest first, to the shards with least
of the unit's kind of work, and moved as long as that makes the shards more equal.
Finally the slowest shard hands over units as long as that makes it faster.

Engines of different speed get work in proportion to it. With many engines the job is cut
for groups of them first, and each part for smaller groups, so that a large subtree is
opened for the few engines that need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ..compiled import jit
from ..costs.cost_model import CostModel, overlapped
from ..costs.tree_work import LeafWork, node_work
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Bools, Floats, Int32s, Int64s, PlanRequests
from .speeds import ShardSpeeds, speeds_for

# Units per shard (of the slowest engine), about. Larger subtrees are opened, and siblings gathered
# up to that size. A request is never divided.
GRANULARITY = 256
# Share of the shared prompt tokens that may be lost. More is lost only if the slowest shard takes
# longer than equal shards without repeated tokens by more than the tolerance, and gains more than
# that.
_MAX_LOST_SHARING = 0.005
_TOLERANCE = 0.01

# Most passes over all units to move them once dealt. Two or three suffice.
_MAX_PASSES = 20

# Most shards that a job is dealt to at once, and parts into which it is cut for more.
_MOST_AT_ONCE = 64
_PARTS = 16


@dataclass(frozen=True, slots=True)
class Partition:
    """The shard of each request, for ``k`` shards, some of which may be empty.

    shard: int32 ``[n]`` by request, 0..k-1.
    compute_s, memory_s: float64 ``[k]``, estimated work of each shard in seconds of the
        cost model. A shared prefix counts once in every shard that has it.
    lost_tokens: prompt tokens computed in addition to those of a single tree.
    """

    shard: Int32s
    compute_s: Floats
    memory_s: Floats
    lost_tokens: int

    def requests_of(self, shard: int) -> Int64s:
        """The requests of a shard in ascending order, int64."""
        return np.flatnonzero(self.shard == shard)


def partition(
    tree: PrefixTree,
    cost: CostModel,
    work: LeafWork,
    num_shards: int,
    speeds: ShardSpeeds | None = None,
) -> Partition:
    """Cut a job into shards that take the same time to compute and the same to read.

    Args:
        work: estimated work by leaf of ``tree``.
        speeds: of the shards' engines. Shards without an engine are empty. None: all
            engines are as fast.

    Raises:
        ConfigError: ``num_shards`` is below 1, there are not as many speeds as shards, or no
            engine is there.
    """
    if num_shards < 1:
        raise ConfigError(f"num_shards={num_shards!r} must be 1 or more.")
    speeds = speeds_for(speeds, num_shards)
    there = np.flatnonzero(speeds.there)
    if not len(there):
        raise ConfigError(
            f"None of the {num_shards} engines is there to take the job; wait until one is."
        )
    slow = speeds.take(there).slowness()
    by_leaf = there[_cut(tree, cost, work, slow)].astype(np.int32)
    shard = np.empty_like(by_leaf)
    shard[tree.order] = by_leaf
    return replace(_loads(tree, cost, work, by_leaf, num_shards), shard=shard)


def _cut(tree: PrefixTree, cost: CostModel, work: LeafWork, slow: Floats) -> Int32s:
    """The shard of each leaf, int32 ``[n]``, on engines as slow as ``slow``, float64 ``[2, k]``."""
    k = slow.shape[1]
    if k <= _MOST_AT_ONCE:
        return _cut_at_once(tree, cost, work, slow, 1)
    cuts = int(np.ceil(np.log(k) / np.log(_PARTS)))
    # Engines of a group should be good at the same work.
    alike = np.argsort(slow[0] / slow[1], kind="stable").astype(np.int32)
    return alike[_cut_in_parts(tree, cost, work, slow[:, alike], cuts)]


def _cut_in_parts(
    tree: PrefixTree, cost: CostModel, work: LeafWork, slow: Floats, cuts: int
) -> Int32s:
    """The same as :func:`_cut`: first for groups of shards, then within each group, ``cuts`` times
    at most."""
    k = slow.shape[1]
    if k <= _PARTS:
        return _cut_at_once(tree, cost, work, slow, cuts)
    begin = np.arange(_PARTS + 1) * k // _PARTS
    # A group is as fast as all its engines together.
    as_one = 1.0 / np.add.reduceat(1.0 / slow, begin[:-1], axis=1)
    group = _cut_at_once(tree, cost, work, as_one, cuts)
    by_group = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group, minlength=_PARTS))
    shard = np.empty_like(group)
    for number, leaves in enumerate(np.split(by_group, ends[:-1])):
        shards = slice(begin[number], begin[number + 1])
        part, own = tree.restricted_to(leaves), work.take(leaves)
        found = _cut_in_parts(part, cost, own, slow[:, shards], cuts)
        shard[leaves] = begin[number] + found
    return shard


def _cut_at_once(
    tree: PrefixTree, cost: CostModel, work: LeafWork, slow: Floats, cuts: int
) -> Int32s:
    """The same as :func:`_cut`, for all shards at once. The losses of several ``cuts`` add up."""
    tolerance = _TOLERANCE / cuts
    k = slow.shape[1]
    if k == 1 or not tree.num_requests:
        return np.zeros(tree.num_requests, np.int32)
    shares = _shares(tree, cost, work)
    # How many of the fastest engine they are together.
    width = (1.0 / slow).sum(axis=1)
    whole_s = cost.step_time_s(
        shares.compute_s, shares.memory_s * (width[0] / width[1])
    )
    # A fair share, or what the fastest engine takes for a request with most work of a kind.
    compute = shares.compute[tree.num_nodes :] * shares.compute_s
    memory = shares.memory[tree.num_nodes :] * shares.memory_s
    leaf = np.argmax(np.maximum(compute, memory))
    largest_s = cost.step_time_s(compute[leaf] * slow[0], memory[leaf] * slow[1])
    least_s = max(float(whole_s) / width[0], float(largest_s.min()))
    grain = 1.0 / float((slow.max(axis=1) * width * GRANULARITY).max())
    larger = np.maximum(shares.compute, shares.memory)[: tree.num_nodes]
    larger = _at_most_parents(tree.parent, larger)
    large = np.flatnonzero(larger > grain)
    candidates = large[np.argsort(-larger[large], kind="stable")]
    # Every shard with a part of an opened node computes its prefix.
    price = tree.own_len.astype(np.int64) * (k - 1)

    shared = tree.num_tokens - tree.num_unique_tokens
    budget = _MAX_LOST_SHARING / cuts * shared
    against_fastest = slow / slow.min(axis=1, keepdims=True)
    best, best_s = np.zeros(0, np.int32), np.inf
    while True:
        opened = _open_nodes(candidates, tree.parent, price, budget)
        begin, compute, memory = _make_units(
            opened, tree.parent, tree.leaf_parent, tree.leaf_end,
            shares.compute, shares.memory, shares.prefix, grain,
        )  # fmt: skip
        largest_first = np.argsort(-np.maximum(compute, memory), kind="stable")
        unit = deal(largest_first, compute, memory, against_fastest, _MAX_PASSES)
        compute, memory = compute * shares.compute_s, memory * shares.memory_s
        relieve_slowest(unit, compute, memory, slow, cost.interference_exponent)
        found = np.repeat(unit, np.diff(begin))
        loads = _loads(tree, cost, work, found, k)
        slowest_s = cost.step_time_s(
            loads.compute_s * slow[0], loads.memory_s * slow[1]
        ).max()
        if not len(best) or slowest_s < (1 - tolerance) * best_s:
            best, best_s = found, slowest_s
        is_good = best_s <= (1 + tolerance) * least_s
        if is_good or budget >= price[candidates].sum():
            return best
        budget = max(2 * budget, tree.num_tokens / 1000)


def _loads(
    tree: PrefixTree,
    cost: CostModel,
    work: LeafWork,
    leaf_shard: Int32s,
    num_shards: int,
) -> Partition:
    """The shards of these leaves, int32 ``[n]``, by leaf in place of by request."""
    shared = shared_within_shards(tree.lcp, leaf_shard, num_shards)
    compute = cost.prefill_time_s(tree.input_len, 0) - cost.prefill_time_s(shared, 0)
    compute += work.decode_s
    return Partition(
        leaf_shard,
        np.bincount(leaf_shard, compute, num_shards).astype(np.float64),
        np.bincount(leaf_shard, work.memory_s, num_shards).astype(np.float64),
        int(tree.lcp.sum(dtype=np.int64) - shared.sum(dtype=np.int64)),
    )


# --- From the tree to units.


class _Shares(NamedTuple):
    """Work as shares of the job's compute and memory time, 0 if the job has none.

    compute, memory: float64 ``[m + n]``, of each subtree and of each leaf with its prefix.
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
    leaves = cost.prefill_time_s(tree.input_len, 0) + work.decode_s
    return _Shares(
        compute=np.concatenate([nodes, leaves]) * scale,
        memory=np.concatenate([memory, work.memory_s]) * memory_scale,
        prefix=cost.prefill_time_s(tree.depth, 0) * scale,
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
def shared_within_shards(lcp: Int32s, leaf_shard: Int32s, k: int) -> Int32s:
    """Tokens that each leaf shares with the one before it in its shard, int32 ``[n]``.

    Args:
        leaf_shard: int32 ``[n]`` by leaf, below ``k``.
    """
    shared = np.zeros(len(lcp), np.int32)
    last = np.full(k, -1, np.int64)
    # Leaves that share less with the one before them than all later ones do. The first
    # of them after a leaf tells how much that leaf and the present one share.
    least = np.empty(len(lcp) + 1, np.int64)
    count = 0
    for leaf in range(len(lcp)):
        while count > 0 and lcp[least[count - 1]] >= lcp[leaf]:
            count -= 1
        least[count] = leaf
        count += 1
        before = last[leaf_shard[leaf]]
        if before >= 0:
            low, high = 0, count - 1
            while low < high:
                middle = (low + high) // 2
                if least[middle] > before:
                    high = middle
                else:
                    low = middle + 1
            shared[leaf] = lcp[least[low]]
        last[leaf_shard[leaf]] = leaf
    return shared


@jit
def deal(
    largest_first: Int64s,
    compute: Floats,
    memory: Floats,
    slow: Floats,
    max_passes: int,
) -> Int32s:
    """The shard of each unit, int32 ``[u]``.

    Both the first placement and the moves lower the sum over shards of compute share
    squared plus memory share squared, each over the speed of the shard's engine. Once no
    move lowers it, and if all engines are as fast, no shard has more than
    1.21 * (1/k + u) of either, where u is the largest share of a unit. Proof: no move
    out of a shard with load L = (c, m) helps, so x (L - x) <= x L' for its units x and
    other loads L'. Summed over its units and averaged over the shards, this is
    c^2 + m^2 <= (c + m) (1/k + u).

    Args:
        largest_first: int64 ``[u]``, the units in falling size.
        compute, memory: float64 ``[u]``, shares of the job's compute and memory time.
        slow: float64 ``[2, k]``, each engine's time over the fastest's, for both.
    """
    k = slow.shape[1]
    loads = np.zeros((2, k))
    shard = np.full(len(largest_first), -1, np.int32)
    for _ in range(1 + max_passes):
        moved = False
        for unit in largest_first:
            c, m = compute[unit], memory[unit]
            before = shard[unit]
            if before >= 0:
                loads[0, before] -= c
                loads[1, before] -= m
            best = max(before, 0)
            least = _harm(c, m, loads, slow, best)
            for s in range(k):
                harm = _harm(c, m, loads, slow, s)
                # By more than rounding errors, or equal units would swap for ever.
                if harm < least * (1.0 - 1e-9):
                    best, least = s, harm
            loads[0, best] += c
            loads[1, best] += m
            moved |= best != before
            shard[unit] = best
        if not moved:
            break
    return shard


@jit
def _harm(c: float, m: float, loads: Floats, slow: Floats, s: int) -> float:
    """Half of the squares that a unit adds to the sum in a shard.

    Without the half of its own squares, which it adds to the fastest shard, too. So among
    engines of the same speed only the loads count.
    """
    own = c * c * (slow[0, s] - 1.0) + m * m * (slow[1, s] - 1.0)
    harm: float = c * loads[0, s] * slow[0, s] + m * loads[1, s] * slow[1, s] + own / 2
    return harm


@jit
def relieve_slowest(
    shard: Int32s, compute: Floats, memory: Floats, slow: Floats, exponent: float
) -> None:
    """Move units away from the slowest shard, in place, until no move helps.

    Each takes the unit and the other shard that make the slower of the two fastest. The slowest
    never gets slower, so the guarantee of :func:`deal` still holds for its time.

    Args:
        shard: int32 ``[u]``, the shard of each unit, which is changed.
        compute, memory: float64 ``[u]``, in seconds.
        slow: float64 ``[2, k]``, seconds of each shard's engine for one of both.
        exponent: k of :func:`~..costs.cost_model.overlapped`.
    """
    k = slow.shape[1]
    loads = np.zeros((2, k))
    for unit in range(len(shard)):
        loads[0, shard[unit]] += compute[unit]
        loads[1, shard[unit]] += memory[unit]
    seconds = np.zeros(k)
    for s in range(k):
        seconds[s] = _seconds(loads[0, s], loads[1, s], slow, s, exponent)
    for _ in range(2 * len(shard)):
        slowest = int(np.argmax(seconds))
        least = seconds[slowest] * (1.0 - 1e-9)
        best, to = -1, -1
        for unit in range(len(shard)):
            if shard[unit] != slowest:
                continue
            c, m = compute[unit], memory[unit]
            rest = max(0.0, loads[0, slowest] - c), max(0.0, loads[1, slowest] - m)
            left = _seconds(rest[0], rest[1], slow, slowest, exponent)
            if left >= least:
                continue
            for s in range(k):
                there = _seconds(loads[0, s] + c, loads[1, s] + m, slow, s, exponent)
                if s != slowest and max(left, there) < least:
                    best, to, least = unit, s, max(left, there)
        if best < 0:
            break
        for s, sign in ((slowest, -1.0), (to, 1.0)):
            loads[0, s] = max(0.0, loads[0, s] + sign * compute[best])
            loads[1, s] = max(0.0, loads[1, s] + sign * memory[best])
            seconds[s] = _seconds(loads[0, s], loads[1, s], slow, s, exponent)
        shard[best] = to


@jit
def _seconds(
    compute: float, memory: float, slow: Floats, s: int, exponent: float
) -> float:
    seconds: float = overlapped(compute * slow[0, s], memory * slow[1, s], exponent)
    return seconds


@dataclass(frozen=True, slots=True)
class ShardJob:
    """A shard as a job of its own, whose requests are numbered 0..len(index)-1.

    index: int64, the number of each request in the whole job, in ascending order.
        ``values[index]`` selects the shard's values of an array by request, and
        ``index[order]`` translates the shard's order to numbers in the whole job.
    tree: the prefix tree of the shard's requests.
    requests: the shard's requests, with their prompts.
    """

    index: Int64s
    tree: PrefixTree
    requests: PlanRequests


def shard_jobs(
    tree: PrefixTree, requests: PlanRequests, indices: Sequence[Int64s]
) -> list[ShardJob]:
    """Shards as jobs that can be planned alone. Prompts are copied.

    Args:
        indices: int64 arrays, the numbers of each shard's requests in ascending order.
    """
    position = tree.position
    return [
        ShardJob(
            index,
            tree.restricted_to(np.sort(position[index])).renumbered(),
            requests.take(index),
        )
        for index in indices
    ]
