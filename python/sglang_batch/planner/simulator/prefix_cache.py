"""The prefix cache of the simulator: which nodes of the prefix tree are resident.

Tokens are of four kinds: *locked* (prefixes of running requests), *idle* (prefixes that
no running request uses, evictable), *garbage* (tokens of finished requests that no other
shares, which an LRU cache cannot tell apart) and *private* (of running requests alone,
counted elsewhere).

Of a model with recurrent states, a prefix can be used only where the plan cut the prompt of the
request that computed it, and a state, a unit of the second pool, was kept.

Under ``LRU`` idle prefixes and garbage are evicted oldest first, as in SGLang's radix cache.
Under ``PLANNED`` garbage and prefixes without a remaining use are dropped at once, and the
prefix whose next use is furthest away is evicted first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..admission_rules.followers import WORTH_A_STATE
from ..compiled import jit_in_place
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Int64s

LRU = 0
PLANNED = 1

LOCKED, IDLE, GARBAGE = 0, 1, 2
# Further totals: nodes that running requests use, and states that are kept.
NODES, STATES = 3, 4
_NONE = -1

NODE = np.dtype(
    [
        ("leaf_begin", np.int64),
        ("leaf_end", np.int64),
        ("next_use", np.int64),  # rank of the next request below, -1: not looked up
        ("parent", np.int32),
        ("length", np.int32),  # own tokens
        ("depth", np.int32),
        ("refs", np.int32),  # running requests at or below
        ("uses_left", np.int32),  # requests below that are not admitted yet
        ("children", np.int32),  # resident children
        ("readers", np.int32),  # decoding requests at or below
        ("resident", np.int32),
        ("leader", np.int32),  # request that computes it while followers wait
        ("followers", np.int32),  # the first follower
        # Of a model with states: whether a prompt ends here, whether its leader's prompt
        # is cut here, and whether there is a state. Other models need none.
        ("is_end", np.int32),
        ("is_stop", np.int32),
        ("has_state", np.int32),
        ("media", np.int32),  # placeholders of images and sounds in its prefix
    ],
    align=True,
)


# An entry of the cache, and its neighbours in the eviction list.
ENTRY = np.dtype(
    [("older", np.int32), ("newer", np.int32), ("garbage", np.int32)], align=True
)


class SimCache(NamedTuple):
    """Entries ``0..m-1`` are the tree's nodes, ``m + i`` is the garbage of leaf ``i``.

    nodes: ``NODE [m]``.
    entries: ``ENTRY [m + n + 1]``. The last is the head of the eviction list.
    totals: int64 ``[5]``, tokens LOCKED, IDLE and GARBAGE, NODES in use and STATES.
    eviction: LRU or PLANNED.
    keeps_states: whether prefixes can be used only where a state was kept.
    """

    nodes: NDArray[Any]
    entries: NDArray[Any]
    totals: Int64s
    eviction: int
    keeps_states: bool


def make_cache(
    tree: PrefixTree, eviction: int, page_size: int = 1, *, keeps_states: bool = False
) -> SimCache:
    """An empty cache, which shares whole pages."""
    m, n = tree.num_nodes, tree.num_requests
    nodes = np.zeros(m, NODE)
    depth = tree.depth // page_size * page_size
    nodes["parent"] = tree.parent
    nodes["depth"] = depth
    nodes["length"] = depth - np.where(tree.parent >= 0, depth[tree.parent], 0)
    nodes["leaf_begin"] = tree.leaf_begin
    nodes["leaf_end"] = tree.leaf_end
    nodes["uses_left"] = tree.leaf_end - tree.leaf_begin
    nodes["next_use"] = _NONE
    nodes["leader"] = nodes["followers"] = _NONE
    nodes["resident"][0] = nodes["has_state"][0] = 1
    if tree.media is not None:
        nodes["media"] = tree.media.depth(tree.leaf_begin, tree.leaf_end)
    if keeps_states:
        ends = tree.leaf_parent[tree.input_len <= depth[tree.leaf_parent]]
        nodes["is_end"][ends[ends > 0]] = 1
    entries = np.zeros(m + n + 1, ENTRY)
    entries["older"] = entries["newer"] = m + n
    return SimCache(
        nodes=nodes,
        entries=entries,
        totals=np.zeros(5, dtype=np.int64),
        eviction=eviction,
        keeps_states=keeps_states,
    )


@jit_in_place
def cached_depth(cache: SimCache, node: int) -> int:
    """Tokens of a node's prefix that are resident."""
    while cache.nodes[node].resident == 0:
        node = cache.nodes[node].parent
    return int(cache.nodes[node].depth)


@jit_in_place
def kept_depth(cache: SimCache, node: int) -> int:
    """The same without tokens that a request still computes, or has lost its state unused."""
    at = cache.nodes[node]
    while at.resident == 0 or at.leader != _NONE or at.has_state + at.refs == 0:
        at = cache.nodes[at.parent]
    return int(at.depth)


@jit_in_place
def usable_depth(cache: SimCache, node: int) -> int:
    """Tokens of a node's prefix that a request need not compute."""
    at = cache.nodes[node]
    while at.resident == 0 or at.leader != _NONE or at.has_state == 0:
        at = cache.nodes[at.parent]
    return int(at.depth - at.is_end)


@jit_in_place
def media_in(cache: SimCache, node: int, depth: int) -> int:
    """Placeholders of images and sounds in the first ``depth`` tokens of a prefix, which
    end at a node."""
    while cache.nodes[node].depth - cache.nodes[node].is_end > depth:
        node = cache.nodes[node].parent
    return int(cache.nodes[node].media)


@jit_in_place
def without_state(cache: SimCache, node: int) -> int:
    """Tokens of a node's prefix that other requests hold, but cannot be used."""
    if not cache.keeps_states:
        return 0
    return max(0, kept_depth(cache, node) - usable_depth(cache, node))


@jit_in_place
def _append(cache: SimCache, entry: int) -> None:
    head = len(cache.entries) - 1
    last = cache.entries[head].older
    cache.entries[last].newer = entry
    cache.entries[entry].older = last
    cache.entries[entry].newer = head
    cache.entries[head].older = entry


@jit_in_place
def _unlink(cache: SimCache, entry: int) -> None:
    before, after = cache.entries[entry].older, cache.entries[entry].newer
    cache.entries[before].newer = after
    cache.entries[after].older = before


@jit_in_place
def lock(cache: SimCache, node: int, first_use: bool) -> None:
    """A request starts to use a node's prefix, all of which becomes resident.
    ``first_use``: whether this is one of the uses counted by the plan."""
    while node > 0:
        at = cache.nodes[node]
        if at.refs == 0:
            if at.resident == 0:
                at.resident = 1
                at.has_state = not cache.keeps_states
                cache.nodes[at.parent].children += 1
            else:
                _unlink(cache, node)
                cache.totals[IDLE] -= at.length
            cache.totals[LOCKED] += at.length
            cache.totals[NODES] += at.length > 0
        at.refs += 1
        if first_use:
            at.uses_left -= 1
            at.next_use = _NONE
            if at.uses_left == 0:
                _drop_state(cache, node)
        node = at.parent


@jit_in_place
def newly_locked(cache: SimCache, node: int) -> tuple[int, int]:
    """Tokens and nodes of a node's prefix that no running request holds."""
    tokens = number = 0
    while node > 0 and cache.nodes[node].refs == 0:
        tokens += cache.nodes[node].length
        number += cache.nodes[node].length > 0
        node = cache.nodes[node].parent
    return tokens, number


@jit_in_place
def unlock(cache: SimCache, node: int) -> None:
    """A request ends or is retracted. Its prefix is kept while it may be used again."""
    while node > 0:
        at = cache.nodes[node]
        at.refs -= 1
        if at.refs == 0:
            cache.totals[LOCKED] -= at.length
            cache.totals[NODES] -= at.length > 0
            unneeded = at.uses_left == 0 or (at.has_state == 0 and at.children == 0)
            if cache.eviction == PLANNED and unneeded:
                at.resident = 0
                cache.nodes[at.parent].children -= 1
            else:
                cache.totals[IDLE] += at.length
                _append(cache, node)
        node = at.parent


@jit_in_place
def mark_stops(cache: SimCache, leader: int, node: int) -> None:
    """Choose where a leader's prompt is cut, as ``PrefixUses.stops`` does."""
    if not cache.keeps_states:
        return
    depth, last = -1, -1
    while True:
        next_one, at = 0, node
        while at > 0 and cache.nodes[at].depth > depth:
            if cache.nodes[at].leader == leader:
                next_one = at
            at = cache.nodes[at].parent
        if next_one == 0:
            return
        one = cache.nodes[next_one]
        depth = one.depth
        end = depth - one.is_end
        begin = last if last >= 0 else cache.nodes[one.parent].depth
        one.is_stop = (end - begin) * one.uses_left >= WORTH_A_STATE
        if one.is_stop:
            last = end


@jit_in_place
def next_stop(cache: SimCache, leader: int, node: int, begin: int) -> int:
    """Where a leader's prompt is cut that is computed from ``begin`` on, or -1."""
    stop = -1
    while cache.keeps_states and node > 0:
        at = cache.nodes[node]
        if at.leader == leader and at.is_stop and at.depth - at.is_end > begin:
            stop = at.depth - at.is_end
        node = at.parent
    return int(stop)


@jit_in_place
def keep_state(cache: SimCache, node: int) -> None:
    """A node is computed. Its state is kept if the prompt was cut there."""
    at = cache.nodes[node]
    if at.is_stop and at.uses_left > 0 and at.has_state == 0:
        at.has_state = 1
        cache.totals[STATES] += 1
    at.is_stop = 0


@jit_in_place
def _drop_state(cache: SimCache, node: int) -> None:
    if cache.keeps_states and cache.nodes[node].has_state:
        cache.nodes[node].has_state = 0
        cache.totals[STATES] -= 1


@jit_in_place
def evict_states(cache: SimCache, number: int, requests: NDArray[Any]) -> None:
    """Free so many states of prefixes that no running request uses, or all of them."""
    head = len(cache.entries) - 1
    left = cache.totals[STATES] - number
    while cache.totals[STATES] > left and cache.entries[head].newer != head:
        _evict_node(cache, _furthest(cache, requests))


@jit_in_place
def _evict_node(cache: SimCache, node: int) -> int:
    at = cache.nodes[node]
    _unlink(cache, node)
    _drop_state(cache, node)
    at.resident = 0
    cache.nodes[at.parent].children -= 1
    cache.totals[IDLE] -= at.length
    return int(at.length)


@jit_in_place
def give_use_back(cache: SimCache, node: int) -> None:
    """Count one more future use of a node's prefix. Call it before ``unlock``."""
    while node > 0:
        cache.nodes[node].uses_left += 1
        cache.nodes[node].next_use = _NONE
        node = cache.nodes[node].parent


@jit_in_place
def change_readers(cache: SimCache, node: int, change: int) -> int:
    """Add ``change`` decoding requests, 1 or -1, to a node's prefix. Returns the change in
    tokens of all nodes that at least one request reads."""
    tokens = 0
    while node > 0:
        at = cache.nodes[node]
        if at.readers == 0:
            tokens += at.length
        at.readers += change
        if at.readers == 0:
            tokens -= at.length
        node = at.parent
    return tokens


@jit_in_place
def leave_garbage(cache: SimCache, leaf: int, tokens: int) -> None:
    """Keep the private tokens of a request that ended, under ``LRU``."""
    if cache.eviction == PLANNED or tokens == 0:
        return
    cache.entries[len(cache.nodes) + leaf].garbage = tokens
    cache.totals[GARBAGE] += tokens
    _append(cache, len(cache.nodes) + leaf)


@jit_in_place
def _furthest(cache: SimCache, requests: NDArray[Any]) -> int:
    """The idle node whose next use is furthest away in the plan."""
    head = len(cache.entries) - 1
    best = int(cache.entries[head].newer)
    best_use = -1
    entry = best
    while entry != head:
        at = cache.nodes[entry]
        if at.next_use < 0:
            nearest = len(requests)
            for leaf in range(at.leaf_begin, at.leaf_end):
                if requests[leaf].admitted == 0:
                    nearest = min(nearest, requests[leaf].rank)
            at.next_use = nearest
        # A child is evicted before its parent.
        if at.next_use >= best_use and at.children == 0:
            best, best_use = entry, at.next_use
        entry = int(cache.entries[entry].newer)
    return best


@jit_in_place
def evict(cache: SimCache, tokens: int, requests: NDArray[Any]) -> int:
    """Free at least ``tokens`` tokens, or all evictable ones. Returns the number freed.

    Args:
        requests: ``REQUEST [n]``, with their ranks in the plan.
    """
    head = len(cache.entries) - 1
    m = len(cache.nodes)
    freed = 0
    while freed < tokens and cache.entries[head].newer != head:
        if cache.eviction == PLANNED:
            entry = _furthest(cache, requests)
        else:
            entry = int(cache.entries[head].newer)
        if entry < m:
            freed += _evict_node(cache, entry)
        else:
            _unlink(cache, entry)
            cache.totals[GARBAGE] -= cache.entries[entry].garbage
            freed += cache.entries[entry].garbage
            cache.entries[entry].garbage = 0
    return freed
