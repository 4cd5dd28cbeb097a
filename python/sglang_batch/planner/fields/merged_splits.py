"""Groups of up to some hundred rows, merged from the bottom up.

A prefix tree that splits in two everywhere saves, at each of its nodes, the length of the
values that all rows below it have in common. So the rows, or sets of rows, with most in
common are merged first. Fields in which the rows all differ play no part.
"""

from __future__ import annotations

import numpy as np

from ..compiled import jit
from ..requests import Int32s

# Rows that are merged: their pairs are all compared.
MOST_ROWS = 192


@jit
def merged_groups(edge: Int32s, lens: Int32s) -> tuple[int, Int32s]:
    """Groups of rows that have no value in common.

    Returns:
        The length saved by the whole tree, and the group of each row from 0, int32
        ``[n]``; -1: the row is alone.
    """
    n, m = edge.shape
    held = edge.copy()  # the values in common of the set that each row has
    weight = np.zeros((n, n), np.int64)
    best = np.zeros(n, np.int64)  # partner with most in common, among those after it
    alive = np.ones(n, np.bool_)
    stands_for = np.arange(n)
    for i in range(n):
        for j in range(i + 1, n):
            weight[i, j] = _shared(held, lens, i, j)
        best[i] = _partner(weight, alive, i)
    saved = 0
    for _ in range(n - 1):
        first = -1
        for i in range(n):
            if (
                alive[i]
                and best[i] >= 0
                and (first < 0 or weight[i, best[i]] > weight[first, best[first]])
            ):
                first = i
        if first < 0 or weight[first, best[first]] == 0:
            break
        other = best[first]
        saved += weight[first, other]
        for c in range(m):
            if held[first, c] != held[other, c]:
                held[first, c] = -1
        alive[other] = False
        for i in range(n):
            if stands_for[i] == other:
                stands_for[i] = first
        for j in range(n):
            if alive[j] and j != first:
                a, b = min(first, j), max(first, j)
                if weight[a, b] > 0:
                    weight[a, b] = _shared(held, lens, a, b)
        for i in range(n):
            if alive[i] and (i == first or best[i] == first or best[i] == other):
                best[i] = _partner(weight, alive, i)
    group = np.full(n, -1, np.int32)
    number = np.full(n, -1, np.int32)
    size = np.zeros(n, np.int64)
    for i in range(n):
        size[stands_for[i]] += 1
    found = 0
    for i in range(n):
        top = stands_for[i]
        if size[top] > 1:
            if number[top] < 0:
                number[top] = found
                found += 1
            group[i] = number[top]
    return saved, group


@jit
def _shared(held: Int32s, lens: Int32s, a: int, b: int) -> int:
    total = 0
    for c in range(held.shape[1]):
        if held[a, c] == held[b, c] and held[a, c] >= 0:
            total += lens[held[a, c]]
    return total


@jit
def _partner(weight: np.ndarray, alive: np.ndarray, i: int) -> int:
    found = -1
    for j in range(i + 1, len(alive)):
        if alive[j] and (found < 0 or weight[i, j] > weight[i, found]):
            found = j
    return found
