"""Groups of rows by the values of some fields.

Each group has one value in common, which its rows list first. The best groups of a few rows
are found exactly (:func:`best_groups`). Among many rows, a row may join the group of its value
in any field, so it has to be chosen between them (:func:`value_groups`). The saving of a group
is tried out:
its rows list the other fields in one order, those that save most first. The ways to choose:

- ``BY_SAVED``: the group that saves most, then that which saves most of the rows that are
  left, and so on;
- ``PER_ROW``: the same with the saving per row;
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
BY_SAVED, PER_ROW, BY_SHARED, BY_FIELD = WAYS = (0, 1, 2, 3)
# Fields of which groups are tried out, among few and among many rows.
_MOST_FIELDS, _FIELDS_OF_MANY, _MANY = 12, 6, 5_000
# Fields by which all rows are split, to compare.
_WHOLE_FIELDS = 3


class Scratch(NamedTuple):
    """Lengths of edges, and working memory, so that small groups cost nothing for the size of
    the table.

    lens: int32 ``[edges]``.
    seen, slot: int64 and int32 ``[edges]``, the last tag under which an edge was seen, and a
        number for it under that tag.
    tag: int64 ``[1]``, the last tag given.
    sizes, moved: int32 ``[rows]``.
    """

    lens: Int32s
    seen: Int64s
    slot: Int32s
    tag: Int64s
    sizes: Int32s
    moved: Int32s


def scratch(num_rows: int, lens: Int32s) -> Scratch:
    return Scratch(
        lens,
        np.zeros(len(lens), np.int64),
        np.zeros(len(lens), np.int32),
        np.zeros(1, np.int64),
        np.zeros(num_rows + 1, np.int32),
        np.zeros(num_rows + 1, np.int32),
    )


@jit
def group_by_edge(
    edges: Int32s, rows: Int32s, ends: Int32s, start: int, end: int, work: Scratch
) -> int:
    """Sort ``rows[start:end]`` by their edge, in the order in which edges come first, and fill
    ``ends`` with the end of each group. Returns the number of groups."""
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
def value_groups(edge: Int32s, way: int, work: Scratch) -> tuple[int, Int32s]:
    """Groups of rows, chosen in one of the ways above.

    Args:
        edge: int32 ``[fields, n]``, each with values that repeat, none the same for all.

    Returns:
        The length that is saved at least, and the group of each row from 0, int32
        ``[n]``; -1: the row is in none.
    """
    candidates = _candidates(edge, work)
    found = _savings(edge, candidates, work)
    if way != BY_FIELD:
        worth = found.shares if way == BY_SHARED else found.saves
        taken = _choose(found, worth, way == PER_ROW, -1)
        saved_in_all = _saved_by(edge, candidates, found, taken, work)
        return saved_in_all, _numbered(edge, candidates, taken, work)
    most = -1
    chosen = np.full(edge.shape[1], -1, np.int32)
    for k in np.argsort(-found.total, kind="mergesort")[:_WHOLE_FIELDS]:
        taken = _choose(found, found.saves, False, k)
        length = _saved_by(edge, candidates, found, taken, work)
        if length > most:
            most = length
            chosen = taken
    return most, _numbered(edge, candidates, chosen, work)


class Savings(NamedTuple):
    """The savings of groups by each of ``c`` candidate fields.

    by_edge: int32 ``[c, n]``, rows sorted by their edge.
    saves, shares: float64 ``[c, n]``, length that the group of a row saves in all, and by the
        values that all of it share.
    size, first: int32 ``[c, n]``, rows of a row's group, and where it begins in ``by_edge``.
    chains, links: int32 ``[c, fields]`` and int64 ``[c]``, fields that its groups list.
    total: int64 ``[c]``, length that all groups save.
    """

    by_edge: Int32s
    saves: Floats
    shares: Floats
    size: Int32s
    first: Int32s
    chains: Int32s
    links: Int64s
    total: Int64s


@jit
def _savings(edge: Int32s, candidates: Int32s, work: Scratch) -> Savings:
    """Try out the groups of each candidate."""
    m, n = edge.shape
    num = len(candidates)
    by_edge = np.empty((num, n), np.int32)
    saves = np.zeros((num, n))
    shares = np.zeros((num, n))
    size = np.zeros((num, n), np.int32)
    first = np.zeros((num, n), np.int32)
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
        links[k] = _chain(edge, c, by_edge[k], group_ends, chains[k], work)
        saved = _chain_saves(
            edge, chains[k, : links[k]], by_edge[k].copy(), group_ends, work
        )
        start = 0
        for g in range(groups):
            end = group_ends[g]
            shared = _shared_squares(edge, by_edge[k, start:end], work)
            for at in range(start, end):
                i = by_edge[k, at]
                saves[k, i], size[k, i], first[k, i] = saved[g], end - start, start
                shares[k, i] = shared * (end - start - 1)
            total[k] += saved[g]
            start = end
    return Savings(by_edge, saves, shares, size, first, chains, links, total)


@jit
def _candidates(edge: Int32s, work: Scratch) -> Int32s:
    """The fields that could save most. Of fields that split the rows in the same way there
    is one."""
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
                could[c] += work.lens[e]
            key[c] = key[c] * 1_000_003 + work.slot[e] + 1
    left = np.ones(m, np.bool_)
    for c in range(m):
        for d in range(c):
            if left[d] and key[d] == key[c]:
                left[c] = False
                could[d] += could[c]
                break
    if left.sum() > most:
        _add_below(edge, left, could, work)
    order = np.argsort(-could, kind="mergesort")
    found = np.empty(m, np.int32)
    num = 0
    for k in range(m):
        if left[order[k]] and num < most:
            found[num] = order[k]
            num += 1
    return found[:num]


@jit
def _add_below(edge: Int32s, left: Bools, could: Floats, work: Scratch) -> None:
    """Add the most that other fields save within its groups to the savings of each field."""
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
                could[c] += _repeats(edge[d], rows, ends[:groups], work)


@jit
def _repeats(edges: Int32s, rows: Int32s, ends: Int32s, work: Scratch) -> int:
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
                    total += work.lens[e]
                else:
                    work.seen[e] = tag
        start = end
    return total


@jit
def _chain(
    edge: Int32s,
    field: int,
    rows: Int32s,
    ends: Int32s,
    chain: Int32s,
    work: Scratch,
) -> int:
    """Fill ``chain`` with a field and those that save in its groups, most first.

    For two fields this is the best order: both save the same in the rows that are equal in both.
    """
    m = edge.shape[0]
    save = np.zeros(m, np.int64)
    for d in range(m):
        if d != field:
            save[d] = _repeats(edge[d], rows, ends, work)
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
    edge: Int32s, chain: Int32s, rows: Int32s, ends: Int32s, work: Scratch
) -> Int64s:
    """The savings of each group, int64 ``[groups]``, if its rows list the fields of a
    chain. Its rows are sorted by the first field up to ``ends``, and are changed."""
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
            saved[g] = (size - 1) * work.lens[edge[chain[0], rows[start]]]
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
                    saved[group[s]] += (size - 1) * work.lens[edges[rows[start]]]
                    next_begin[found], next_end[found] = start, parts[p]
                    next_group[found] = group[s]
                    found += 1
                start = parts[p]
        begin, end, group, num = next_begin, next_end, next_group, found
    return saved


@jit
def _choose(found: Savings, saves: Floats, per_row: bool, whole: int) -> Int32s:
    """The candidate by whose value each row is grouped, int32 ``[n]``; -1: by none.

    Args:
        per_row: groups that save most per row come first, not those that save most.
        whole: the candidate by which rows are grouped before. -1: none.
    """
    by_edge, size, first = found.by_edge, found.size, found.first
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
    """The savings of a group with the rows that are left, as if all of it were common."""
    score = saves * (left - 1.0) / (size - 1.0)
    return score / left if per_row else score


@jit
def _shared_squares(edge: Int32s, rows: Int32s, work: Scratch) -> float:
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
            total += float(work.lens[e]) ** 2
    return total


@jit
def _saved_by(
    edge: Int32s, candidates: Int32s, found: Savings, taken: Int32s, work: Scratch
) -> int:
    """The savings of the groups if each lists the fields of its candidate's chain."""
    by_edge = found.by_edge
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
            chain = found.chains[k, : found.links[k]]
            total += _chain_saves(
                edge, chain, rows[:count].copy(), ends[:groups], work
            ).sum()
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


# The lightest prefix tree of a few rows, exactly.
#
# Values that all rows of a set have in common are best listed first. So a set costs the values in
# common plus the best way to split it, and a split into several groups is a row of splits
# in two:
#
#     cost(S) = min over A, B with A + B = S of cost(A) + cost(B) - common(S)
#
# where ``common(S)`` is the length of the values that all rows of S have in common, which
# A and B would each pay. With n rows these are 3 ** n sums, whatever the number of fields.

# Rows that are split exactly: about 20 microseconds.
MOST_OPTIMAL_ROWS = 8


@jit
def best_costs(edge: Int32s, lens: Int32s) -> tuple[Int64s, Int64s, Int64s]:
    """The least weight of each set of rows of ``edge``, int32 ``[n, fields]``: int64 ``[2
    ** n]`` by the bits of its rows. And the part of it that is best split off (0 for a
    single row), and the length that its rows have in common."""
    n, m = edge.shape
    size = 1 << n
    cost, part, same = (
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
    )
    for rows in range(1, size):
        first = 0
        while not (rows >> first) & 1:
            first += 1
        for c in range(m):
            equal = True
            for i in range(first + 1, n):
                if (rows >> i) & 1 and edge[i, c] != edge[first, c]:
                    equal = False
                    break
            if equal:
                same[rows] += lens[edge[first, c]]
        rest = rows & (rows - 1)  # without the first row, which is always in A
        if rest == 0:
            cost[rows] = same[rows]
            continue
        best = np.int64(-1)
        b = rest
        while b:
            found = cost[rows ^ b] + cost[b]
            if best < 0 or found < best:
                best = found
                part[rows] = b
            b = (b - 1) & rest
        cost[rows] = best - same[rows]
    return cost, part, same


@jit
def best_groups(edge: Int32s, lens: Int32s) -> Int32s:
    """The group of each row from 0, int32 ``[n]``, in the best first split of rows that
    have no value in common. -1: the row is alone."""
    n = edge.shape[0]
    _, part, same = best_costs(edge, lens)
    group = np.full(n, -1, np.int32)
    waiting = np.empty(2 * n, np.int64)
    waiting[0] = (1 << n) - 1
    left, found = 1, 0
    everything = waiting[0]
    while left:
        left -= 1
        rows = waiting[left]
        if part[rows] == 0:
            continue
        if rows != everything and same[rows] > same[everything]:
            for i in range(n):
                if (rows >> i) & 1:
                    group[i] = found
            found += 1
            continue
        waiting[left] = part[rows]
        waiting[left + 1] = rows ^ part[rows]
        left += 2
    return group
