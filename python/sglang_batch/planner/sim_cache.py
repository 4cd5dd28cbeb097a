"""The prefix cache of the simulator: which nodes of the prefix tree are resident.

Tokens are of four kinds: *locked* (prefixes of running requests), *idle* (prefixes that
no running request uses, evictable), *garbage* (what finished requests left behind:
their own prompt tokens and answers, which nobody will ask for again, but an LRU cache
cannot know that) and *private* (running requests' own, counted by the simulator).

Under ``LRU`` idle prefixes and garbage are evicted oldest first, as in SGLang's radix
cache. Under ``PLANNED`` the cache knows the plan: garbage and prefixes without a
remaining use are dropped at once, and then the prefix whose next use lies furthest
ahead goes first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .jit import jit
from .prefix_tree import PrefixTree
from .requests import Int32s, Int64s

LRU = 0
PLANNED = 1

LOCKED, IDLE, GARBAGE = 0, 1, 2
_NONE = -1


class SimCache(NamedTuple):
    """Entries ``0..m-1`` are the tree's nodes, ``m + i`` is the garbage of leaf ``i``.

    parent, length: int32 ``[m]``, a node's parent and its own tokens.
    depth: int32 ``[m]``.
    resident: uint8 ``[m]``; refs: int32 ``[m]``, running requests at or below a node;
    uses_left: int32 ``[m]``, requests below a node that were not admitted yet.
    children: int32 ``[m]``, resident children of a node.
    next_use: int64 ``[m]``, rank in the plan of the next request below a node, -1 where
        it must be looked up again.
    prev, next: int32 ``[m + n + 1]``, the eviction list, oldest first; the last entry
        is its head.
    garbage: int32 ``[n]``, tokens of each leaf's garbage.
    totals: int64 ``[3]``, tokens LOCKED, IDLE and GARBAGE.
    """

    parent: Int32s
    length: Int32s
    depth: Int32s
    leaf_begin: Int64s
    leaf_end: Int64s
    resident: NDArray[np.uint8]
    refs: Int32s
    uses_left: Int32s
    children: Int32s
    next_use: Int64s
    prev: Int32s
    next: Int32s
    garbage: Int32s
    totals: Int64s
    eviction: int


def make_cache(tree: PrefixTree, eviction: int) -> SimCache:
    """An empty cache."""
    m, n = len(tree.parent), len(tree.order)
    length = tree.depth - np.where(tree.parent >= 0, tree.depth[tree.parent], 0)
    links = np.full(m + n + 1, _NONE, dtype=np.int32)
    links[-1] = m + n
    resident = np.zeros(m, dtype=np.uint8)
    resident[0] = 1
    return SimCache(
        parent=tree.parent,
        length=length.astype(np.int32),
        depth=tree.depth,
        leaf_begin=tree.leaf_begin,
        leaf_end=tree.leaf_end,
        resident=resident,
        refs=np.zeros(m, dtype=np.int32),
        uses_left=(tree.leaf_end - tree.leaf_begin).astype(np.int32),
        children=np.zeros(m, dtype=np.int32),
        next_use=np.full(m, _NONE, dtype=np.int64),
        prev=links.copy(),
        next=links.copy(),
        garbage=np.zeros(n, dtype=np.int32),
        totals=np.zeros(3, dtype=np.int64),
        eviction=eviction,
    )


@jit
def cached_depth(cache: SimCache, node: int) -> int:
    """Tokens of a node's prefix that are resident."""
    while cache.resident[node] == 0:
        node = cache.parent[node]
    return int(cache.depth[node])


@jit
def _append(cache: SimCache, entry: int) -> None:
    head = len(cache.next) - 1
    last = cache.prev[head]
    cache.next[last] = entry
    cache.prev[entry] = last
    cache.next[entry] = head
    cache.prev[head] = entry


@jit
def _unlink(cache: SimCache, entry: int) -> None:
    before, after = cache.prev[entry], cache.next[entry]
    cache.next[before] = after
    cache.prev[after] = before


@jit
def lock(cache: SimCache, node: int, first_use: bool) -> None:
    """A request starts to use a node's prefix; what was not resident now is.

    Args:
        first_use: whether this is one of the uses that the plan counts.
    """
    while node > 0:
        length = cache.length[node]
        if cache.refs[node] == 0:
            if cache.resident[node] == 0:
                cache.resident[node] = 1
                cache.children[cache.parent[node]] += 1
            else:
                _unlink(cache, node)
                cache.totals[IDLE] -= length
            cache.totals[LOCKED] += length
        cache.refs[node] += 1
        if first_use:
            cache.uses_left[node] -= 1
            cache.next_use[node] = -1
        node = cache.parent[node]


@jit
def newly_locked(cache: SimCache, node: int) -> int:
    """Tokens of a node's prefix that no running request holds."""
    tokens = 0
    while node > 0 and cache.refs[node] == 0:
        tokens += cache.length[node]
        node = cache.parent[node]
    return tokens


@jit
def unlock(cache: SimCache, node: int) -> None:
    """A request ends or is retracted; its prefix stays while it may be of use."""
    while node > 0:
        cache.refs[node] -= 1
        if cache.refs[node] == 0:
            cache.totals[LOCKED] -= cache.length[node]
            if cache.eviction == PLANNED and cache.uses_left[node] == 0:
                cache.resident[node] = 0
                cache.children[cache.parent[node]] -= 1
            else:
                cache.totals[IDLE] += cache.length[node]
                _append(cache, node)
        node = cache.parent[node]


@jit
def leave_garbage(cache: SimCache, leaf: int, tokens: int) -> None:
    """A request ended and leaves its own tokens behind."""
    if cache.eviction == PLANNED or tokens == 0:
        return
    cache.garbage[leaf] = tokens
    cache.totals[GARBAGE] += tokens
    _append(cache, len(cache.parent) + leaf)


@jit
def _furthest(cache: SimCache, rank: Int64s, admitted: NDArray[np.uint8]) -> int:
    """The idle entry whose next use lies furthest ahead in the plan."""
    head = len(cache.next) - 1
    best = cache.next[head]
    best_use = -1
    entry = best
    while entry != head:
        if cache.next_use[entry] < 0:
            nearest = len(rank)
            for leaf in range(cache.leaf_begin[entry], cache.leaf_end[entry]):
                if admitted[leaf] == 0 and rank[leaf] < nearest:
                    nearest = rank[leaf]
            cache.next_use[entry] = nearest
        # A child goes before its parent, which can not be evicted without it.
        if cache.next_use[entry] >= best_use and cache.children[entry] == 0:
            best, best_use = entry, cache.next_use[entry]
        entry = cache.next[entry]
    return int(best)


@jit
def evict(
    cache: SimCache, tokens: int, rank: Int64s, admitted: NDArray[np.uint8]
) -> int:
    """Free at least ``tokens`` tokens if that many are evictable; returns those freed.

    Args:
        rank: int64 ``[n]``, place of each leaf in the plan.
        admitted: uint8 ``[n]``, leaves that had their turn.
    """
    head = len(cache.next) - 1
    m = len(cache.parent)
    freed = 0
    while freed < tokens and cache.next[head] != head:
        if cache.eviction == PLANNED:
            entry = _furthest(cache, rank, admitted)
        else:
            entry = int(cache.next[head])
        _unlink(cache, entry)
        if entry < m:
            cache.resident[entry] = 0
            cache.children[cache.parent[entry]] -= 1
            cache.totals[IDLE] -= cache.length[entry]
            freed += cache.length[entry]
        else:
            cache.totals[GARBAGE] -= cache.garbage[entry - m]
            freed += cache.garbage[entry - m]
            cache.garbage[entry - m] = 0
    return freed
