"""Groups of many rows by the values of some fields.

Each group has one value in common, which its rows list first. A row may join the group
of its value in any field, so it has to be chosen between them. What a group would save is
tried out: its rows list the other fields in one order, those that save most first. The ways to
choose:

- ``BY_SAVED``: the group that saves most, then that which saves most of the rows that are
  left, and so on;
- ``PER_ROW``: the same with what a group saves per row;
- ``BY_SHARED``: the same with the squared lengths of the values that all of its rows share.
  This is greedy group recursion ("Optimizing LLM Queries in Relational Data Analytics
  Workloads", arXiv 2403.05821, algorithm 1), with dependencies as they are in the group;
- ``BY_FIELD``: all rows by one field, the best of three, and rows whose value is their own
  as ``BY_SAVED``.

None is the best for all tables, so :mod:`.field_orders` tries them.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from ..compiled import jit
from ..requests import Bools, Floats, Int32s, Int64s

# The ways to choose groups.
BY_SAVED, PER_ROW, BY_SHARED, BY_FIELD = 0, 1, 2, 3
WAYS = (BY_SAVED, PER_ROW, BY_SHARED, BY_FIELD)
# Fields of which groups are tried out, among few and among many rows.
_MOST_FIELDS, _FIELDS_OF_MANY, _MANY = 12, 6, 5_000
# Fields by which all rows are split, to compare.
_WHOLE_FIELDS = 3


class Scratch(NamedTuple):
    """Working memory, so that small groups cost nothing for the size of the table.

    seen: int64 ``[edges]``, the last tag under which an edge was seen.
    slot: int32 ``[edges]``, a number for it under that tag.
    tag: int64 ``[1]``, the last tag given.
    sizes, moved: int32 ``[rows]``.
    """

    seen: Int64s
    slot: Int32s
    tag: Int64s
    sizes: Int32s
    moved: Int32s


def scratch(num_rows: int, num_edges: int) -> Scratch:
    """Working memory for a table of this size."""
    return Scratch(
        np.zeros(num_edges, np.int64),
        np.zeros(num_edges, np.int32),
        np.zeros(1, np.int64),
        np.zeros(num_rows + 1, np.int32),
        np.zeros(num_rows + 1, np.int32),
    )


@jit
def group_by_edge(
    edges: Int32s, rows: Int32s, ends: Int32s, start: int, end: int, work: Scratch
) -> int:
    """Sort ``rows[start:end]`` by their edge, in the order in which edges come first.

    Args:
        edges: int32 ``[n]``, the edge of each row.
        ends: int32, filled with the end of each group.

    Returns:
        The number of groups.
    """
    if end - start == 2:
        if edges[rows[start]] == edges[rows[start + 1]]:
            ends[0] = end
            return 1
        ends[0], ends[1] = start + 1, end
        return 2
    work.tag[0] += 1
    tag = work.tag[0]
    groups = 0
    for k in range(start, end):
        e = edges[rows[k]]
        if work.seen[e] != tag:
            work.seen[e] = tag
            work.slot[e] = groups
            work.sizes[groups] = 0
            groups += 1
        work.sizes[work.slot[e]] += 1
    if groups == 1:
        ends[0] = end
        return 1
    at = start
    for g in range(groups):
        size = work.sizes[g]
        work.sizes[g] = at
        at += size
        ends[g] = at
    for k in range(start, end):
        work.moved[k] = rows[k]
    for k in range(start, end):
        g = work.slot[edges[work.moved[k]]]
        rows[work.sizes[g]] = work.moved[k]
        work.sizes[g] += 1
    return groups


@jit
def value_groups(
    edge: Int32s, lens: Int32s, way: int, work: Scratch
) -> tuple[int, Int32s]:
    """Groups of rows, chosen in one of the ways above.

    Args:
        edge: int32 ``[fields, n]``, each with values that repeat, and none with the same
            value for all.
        way: one of ``WAYS``.

    Returns:
        The length that is saved at least, and the group of each row from 0, int32
        ``[n]``; -1: the row is in none.
    """
    m, n = edge.shape
    candidates = _candidates(edge, lens, work)
    num = len(candidates)
    by_edge = np.empty((num, n), np.int32)  # rows of each candidate, sorted by its edge
    # What the group of a row saves in all, and by the values that all of it share.
    saves = np.zeros((num, n))
    shares = np.zeros((num, n))
    size = np.zeros((num, n), np.int32)  # rows of the group of a row
    first = np.zeros((num, n), np.int32)  # where the group begins in by_edge
    chains = np.zeros((num, m), np.int32)
    links = np.zeros(num, np.int64)
    ends = np.empty(n + 1, np.int32)
    total = np.zeros(num, np.int64)
    for k in range(num):
        c = candidates[k]
        for i in range(n):
            by_edge[k, i] = i
        groups = group_by_edge(edge[c], by_edge[k], ends, 0, n, work)
        group_ends = ends[:groups].copy()
        links[k] = _chain(edge, lens, c, by_edge[k], group_ends, chains[k], work)
        saved = _chain_saves(
            edge, lens, chains[k, : links[k]], by_edge[k].copy(), group_ends, work
        )
        start = 0
        for g in range(groups):
            end = group_ends[g]
            shared = _shared_squares(edge, lens, by_edge[k, start:end])
            for at in range(start, end):
                i = by_edge[k, at]
                saves[k, i], size[k, i], first[k, i] = saved[g], end - start, start
                shares[k, i] = shared * (end - start - 1)
            total[k] += saved[g]
            start = end
    if way != BY_FIELD:
        worth = shares if way == BY_SHARED else saves
        taken = _choose(by_edge, worth, size, first, way == PER_ROW, -1)
        saved_in_all = _saved_by(
            edge, lens, candidates, by_edge, taken, chains, links, work
        )
        return saved_in_all, _numbered(edge, candidates, taken, work)
    most = -1
    chosen = np.full(n, -1, np.int32)
    for k in np.argsort(-total, kind="mergesort")[:_WHOLE_FIELDS]:
        taken = _choose(by_edge, saves, size, first, False, k)
        length = _saved_by(edge, lens, candidates, by_edge, taken, chains, links, work)
        if length > most:
            most = length
            chosen = taken
    return most, _numbered(edge, candidates, chosen, work)


@jit
def _candidates(edge: Int32s, lens: Int32s, work: Scratch) -> Int32s:
    """The fields of which groups are tried out, those that could save most.

    Of fields that split the rows in the same way there is one.
    """
    m, n = edge.shape
    most = _MOST_FIELDS if n <= _MANY else _FIELDS_OF_MANY
    could = np.zeros(m, np.float64)
    key = np.zeros(m, np.int64)
    for c in range(m):
        work.tag[0] += 1
        tag = work.tag[0]
        groups = 0
        for i in range(n):
            e = edge[c, i]
            if work.seen[e] != tag:
                work.seen[e] = tag
                work.slot[e] = groups
                groups += 1
            else:
                could[c] += lens[e]
            key[c] = key[c] * 1_000_003 + work.slot[e] + 1
    left = np.ones(m, np.bool_)
    for c in range(m):
        for d in range(c):
            if left[d] and key[d] == key[c]:
                left[c] = False
                could[d] += could[c]
                break
    if left.sum() > most:
        _add_below(edge, lens, left, could, work)
    order = np.argsort(-could, kind="mergesort")
    found = np.empty(m, np.int32)
    num = 0
    for k in range(m):
        if left[order[k]] and num < most:
            found[num] = order[k]
            num += 1
    return found[:num]


@jit
def _add_below(
    edge: Int32s,
    lens: Int32s,
    left: Bools,
    could: Floats,
    work: Scratch,
) -> None:
    """Add to what fields save what others save within their groups, at most."""
    m, n = edge.shape
    ends = np.empty(n + 1, np.int32)
    rows = np.empty(n, np.int32)
    for c in range(m):
        if not left[c]:
            continue
        for i in range(n):
            rows[i] = i
        groups = group_by_edge(edge[c], rows, ends, 0, n, work)
        for d in range(m):
            if d != c:
                could[c] += _repeats(edge[d], lens, rows, ends[:groups], work)


@jit
def _repeats(
    edges: Int32s, lens: Int32s, rows: Int32s, ends: Int32s, work: Scratch
) -> int:
    """Length of the values that repeat one in the same group."""
    total = 0
    start = 0
    for end in ends:
        if end - start > 1:
            work.tag[0] += 1
            tag = work.tag[0]
            for k in range(start, end):
                e = edges[rows[k]]
                if work.seen[e] == tag:
                    total += lens[e]
                else:
                    work.seen[e] = tag
        start = end
    return total


@jit
def _chain(
    edge: Int32s,
    lens: Int32s,
    field: int,
    rows: Int32s,
    ends: Int32s,
    chain: Int32s,
    work: Scratch,
) -> int:
    """Fill ``chain`` with a field and those that save in its groups, most first.

    For two fields this order is the best: listing one first saves what it saves within
    the groups, and both orders save the same in the rows that are equal in both.
    """
    m = edge.shape[0]
    save = np.zeros(m, np.int64)
    for d in range(m):
        if d != field:
            save[d] = _repeats(edge[d], lens, rows, ends, work)
    order = np.argsort(-save, kind="mergesort")
    chain[0] = field
    links = 1
    for k in range(m):
        if save[order[k]] > 0:
            chain[links] = order[k]
            links += 1
    return links


@jit
def _chain_saves(
    edge: Int32s,
    lens: Int32s,
    chain: Int32s,
    rows: Int32s,
    ends: Int32s,
    work: Scratch,
) -> Int64s:
    """What each group saves if its rows list the fields of a chain, int64 ``[groups]``.

    Args:
        rows: sorted by the first field of the chain. Changed.
        ends: int32, the end of each group in ``rows``.
    """
    n = len(rows)
    saved = np.zeros(len(ends), np.int64)
    begin = np.empty(n, np.int32)
    end = np.empty(n, np.int32)
    group = np.empty(n, np.int32)
    num = 0
    start = 0
    for g in range(len(ends)):
        size = ends[g] - start
        if size > 1:
            begin[num], end[num], group[num] = start, ends[g], g
            saved[g] = (size - 1) * lens[edge[chain[0], rows[start]]]
            num += 1
        start = ends[g]
    parts = np.empty(n + 1, np.int32)
    for link in range(1, len(chain)):
        if num == 0:
            break
        edges = edge[chain[link]]
        # Parts of a segment have two rows or more, so they are at most half as many.
        next_begin = np.empty(n // 2 + 1, np.int32)
        next_end = np.empty(n // 2 + 1, np.int32)
        next_group = np.empty(n // 2 + 1, np.int32)
        found = 0
        for s in range(num):
            many = group_by_edge(edges, rows, parts, begin[s], end[s], work)
            start = begin[s]
            for p in range(many):
                size = parts[p] - start
                if size > 1:
                    saved[group[s]] += (size - 1) * lens[edges[rows[start]]]
                    next_begin[found], next_end[found] = start, parts[p]
                    next_group[found] = group[s]
                    found += 1
                start = parts[p]
        begin, end, group, num = next_begin, next_end, next_group, found
    return saved


@jit
def _choose(
    by_edge: Int32s,
    saves: Floats,
    size: Int32s,
    first: Int32s,
    per_row: bool,
    whole: int,
) -> Int32s:
    """The candidate by whose value each row is grouped, int32 ``[n]``; -1: by none.

    Args:
        per_row: groups that save most per row come first, not those that save most.
        whole: the candidate by which rows are grouped before. -1: none.
    """
    num, n = by_edge.shape
    taken = np.full(n, -1, np.int32)
    left = size.copy()  # rows of a group that are not taken, at the group's first row
    if whole >= 0:
        for i in range(n):
            if size[whole, i] > 1:
                taken[i] = whole
                for k in range(num):
                    left[k, by_edge[k, first[k, i]]] -= 1
    waiting = [(0.0, 0, 0)]
    waiting.pop()
    for k in range(num):
        at = 0
        while at < n:
            i = by_edge[k, at]
            if left[k, i] > 1 and k != whole:
                score = _score(saves[k, i], size[k, i], left[k, i], per_row)
                waiting.append((-score, k, at))
            at += size[k, i]
    heapq.heapify(waiting)
    while waiting:
        old, k, at = heapq.heappop(waiting)
        i = by_edge[k, at]
        if left[k, i] < 2:
            continue
        score = _score(saves[k, i], size[k, i], left[k, i], per_row)
        if -score > old:  # rows have left since
            heapq.heappush(waiting, (-score, k, at))
            continue
        for at_row in range(at, at + size[k, i]):
            row = by_edge[k, at_row]
            if taken[row] < 0:
                taken[row] = k
                for d in range(num):
                    left[d, by_edge[d, first[d, row]]] -= 1
    return taken


@jit
def _score(saves: float, size: int, left: int, per_row: bool) -> float:
    """What a group saves with the rows that are left, as if all of it were common."""
    score = saves * (left - 1.0) / (size - 1.0)
    return score / left if per_row else score


@jit
def _shared_squares(edge: Int32s, lens: Int32s, rows: Int32s) -> float:
    """The squared lengths of the values that all rows share."""
    total = 0.0
    if len(rows) < 2:
        return total
    for c in range(edge.shape[0]):
        e = edge[c, rows[0]]
        same = True
        for i in rows[1:]:
            if edge[c, i] != e:
                same = False
                break
        if same:
            total += float(lens[e]) ** 2
    return total


@jit
def _saved_by(
    edge: Int32s,
    lens: Int32s,
    candidates: Int32s,
    by_edge: Int32s,
    taken: Int32s,
    chains: Int32s,
    links: Int64s,
    work: Scratch,
) -> int:
    """What the groups save if each lists the fields of its candidate's chain."""
    num, n = by_edge.shape
    total = 0
    rows = np.empty(n, np.int32)
    ends = np.empty(n, np.int32)
    for k in range(num):
        edges = edge[candidates[k]]
        count, groups = 0, 0
        for at in range(n):
            i = by_edge[k, at]
            if taken[i] == k:
                if count and edges[i] != edges[rows[count - 1]]:
                    ends[groups] = count
                    groups += 1
                rows[count] = i
                count += 1
        if count:
            ends[groups] = count
            groups += 1
            total += _chain_saves(
                edge, lens, chains[k, : links[k]], rows[:count].copy(), ends[:groups], work
            ).sum()  # fmt: skip
    return total


@jit
def _numbered(edge: Int32s, candidates: Int32s, taken: Int32s, work: Scratch) -> Int32s:
    """The number of each row's group, from 0 in the order of first rows."""
    n = len(taken)
    group = np.full(n, -1, np.int32)
    work.tag[0] += 1
    tag = work.tag[0]
    found = 0
    for i in range(n):
        if taken[i] >= 0:
            e = edge[candidates[taken[i]], i]
            if work.seen[e] != tag:
                work.seen[e] = tag
                work.slot[e] = found
                found += 1
            group[i] = work.slot[e]
    return group
