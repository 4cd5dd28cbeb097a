"""Greedy group recursion, the published way to order fields, to compare with.

Algorithm 1 of "Optimizing LLM Queries in Relational Data Analytics Workloads" (arXiv
2403.05821), without its early stopping, which trades savings for time. It is given every
functional dependency between two fields that holds for all rows.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from sglang_batch.planner.compiled import jit
from sglang_batch.planner.fields.field_table import FieldTable

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


def greedy_orders(table: FieldTable) -> NDArray[np.int16]:
    """The order of the fields of each row, int16 ``[rows, fields]``."""
    orders = np.zeros(table.values.shape, np.int16)
    edges = table.edges
    _recurse(edges.edge, edges.lens, dependencies(table.values), orders)
    return orders


def dependencies(values: Int32s) -> Bools:
    """Which field (second index) depends on which (first), bool ``[fields, fields]``."""
    fields = values.shape[1]
    wide = values.astype(np.int64)
    found = np.zeros((fields, fields), np.bool_)
    for a in range(fields):
        distinct = len(np.unique(wide[:, a]))
        for b in range(fields):
            pairs = wide[:, a] * (wide[:, b].max() + 1) + wide[:, b]
            found[a, b] = a != b and len(np.unique(pairs)) == distinct
    return found


@jit
def _recurse(
    edge: Int32s, lens: Int32s, depends: Bools, orders: NDArray[np.int16]
) -> None:
    n, m = edge.shape
    used = np.zeros(m, np.bool_)
    count = np.zeros(len(lens), np.int64)
    waiting = [(np.arange(n), 0)]
    while waiting:
        rows, depth = waiting.pop()
        used[:] = False
        for k in range(depth):
            used[orders[rows[0], k]] = True
        left = np.ones(len(rows), np.bool_)
        by_edge = np.zeros((m, len(rows)), np.int64)
        heap = [(0.0, 0, 0)]
        heap.pop()
        if len(rows) > 1:
            for c in range(m):
                if used[c]:
                    continue
                by_edge[c] = np.argsort(edge[rows, c], kind="mergesort")
                for i in rows:
                    count[edge[i, c]] += 1
                for at in range(len(rows)):
                    e = edge[rows[by_edge[c, at]], c]
                    if at == 0 or e != edge[rows[by_edge[c, at - 1]], c]:
                        hits = _hits(edge, lens, depends, used, rows[by_edge[c, at]], c)
                        if count[e] > 1:
                            heap.append((-hits * (count[e] - 1), c, at))
            heapq.heapify(heap)
        while heap:
            old, c, at = heapq.heappop(heap)
            e = edge[rows[by_edge[c, at]], c]
            if count[e] < 2:
                continue
            hits = _hits(edge, lens, depends, used, rows[by_edge[c, at]], c)
            if -hits * (count[e] - 1) > old:  # rows have left since
                heapq.heappush(heap, (-hits * (count[e] - 1), c, at))
                continue
            group = np.empty(count[e], np.int64)
            size = 0
            while at < len(rows) and edge[rows[by_edge[c, at]], c] == e:
                if left[by_edge[c, at]]:
                    group[size] = rows[by_edge[c, at]]
                    left[by_edge[c, at]] = False
                    size += 1
                at += 1
            below = depth
            for d in range(-1, m):
                if d < 0 or (depends[c, d] and not used[d]):
                    for i in group:
                        orders[i, below] = c if d < 0 else d
                    below += 1
            for i in group:
                for d in range(m):
                    if not used[d]:
                        count[edge[i, d]] -= 1
            waiting.append((group, below))
        for k in range(len(rows)):
            if left[k]:
                below = depth
                for d in range(m):
                    if not used[d]:
                        orders[rows[k], below] = d
                        below += 1
                        count[edge[rows[k], d]] = 0


@jit
def _hits(
    edge: Int32s, lens: Int32s, depends: Bools, used: Bools, row: int, c: int
) -> float:
    """The squared lengths of a value and of those that depend on it (HITCOUNT)."""
    total = float(lens[edge[row, c]]) ** 2
    for d in range(edge.shape[1]):
        if depends[c, d] and not used[d]:
            total += float(lens[edge[row, d]]) ** 2
    return total
