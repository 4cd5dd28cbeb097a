"""The cost of a decode step by the lengths of its rows, and the groups of lengths that cost
least.

In a padded batch a row costs as much as the longest. Batches of few lengths waste nothing
on padding, but each takes steps of its own, and a step reads all weights. The cheapest way
to divide the lengths of a job is found exactly, over buckets of lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compiled import jit_in_place
from ..costs.cost_model import tokens_read
from ..requests import Floats, Int32s, Int64s
from .length_tree import (
    MAX_LENGTH,
    NONE,
    LengthTree,
    count_up_to,
    longest_up_to,
    shortest_from,
)

# Share of the KV that a batch of equal lengths fills: its rows grow.
GROUP_SHARE = 0.7


# With paged KV, rows are parked from this ``row_share`` on, and where their moves are hidden
# by steps. ``docs/experimental.md`` has the figures.
PARKS_FROM = 8.0


class BatchLaw(NamedTuple):
    """The cost of a decode step, and the largest batch.

    weight_s: seconds of a step without rows.
    read_s: seconds to read a token's KV.
    row_share, padded: see ``costs.cost_model.tokens_read``.
    capacity: tokens of KV. Of a padded batch, rows times its longest row.
    max_rows: most rows.
    parks: whether rows can leave for a while without being computed again, and that pays.
    """

    weight_s: float
    read_s: float
    row_share: float
    padded: bool
    capacity: float
    max_rows: int
    parks: bool


def parking_pays(row_share: float, *, padded: bool) -> bool:
    """Whether rows of an engine with paged KV are parked in a switch."""
    return padded or row_share >= PARKS_FROM


@jit_in_place
def step_s(law: BatchLaw, rows: float, total: float, longest: float) -> float:
    read = tokens_read(total, longest, rows, law.row_share, law.padded)
    return max(law.weight_s + law.read_s * read, 1e-30)


@jit_in_place
def usual_rows(law: BatchLaw, length: float) -> float:
    """Rows of a batch whose rows have all this length."""
    fits = GROUP_SHARE * law.capacity / max(length, 1.0)
    return max(1.0, min(float(law.max_rows), fits))


# Lengths grow by the same factor from bucket to bucket, at least by 1.
BUCKETS = 96


class LengthGroups(NamedTuple):
    """The rows of a job in buckets, rising in length, and their costs.

    bound: int64 ``[BUCKETS]``, longest length that a bucket may have.
    longest: int64 ``[BUCKETS]``, longest that it has.
    rows: float64 ``[BUCKETS]``, requests that wait or run.
    cost: float64 ``[BUCKETS + 1]``, of the rows from a bucket on, in tokens read.
    last: int64 ``[BUCKETS]``, last bucket of the group that begins with a bucket.
    """

    bound: Int64s
    longest: Int64s
    rows: Floats
    cost: Floats
    last: Int64s


def make_groups() -> LengthGroups:
    return LengthGroups(
        np.zeros(BUCKETS, np.int64),
        np.zeros(BUCKETS, np.int64),
        np.zeros(BUCKETS),
        np.zeros(BUCKETS + 1),
        np.zeros(BUCKETS, np.int64),
    )


@jit_in_place
def length_now(tree: LengthTree, key: Int32s, row: int, clock: int) -> int:
    """Tokens that a running row reads. It joined with ``key`` of them."""
    return int(key[row] + clock - tree.since[row])


@jit_in_place
def first_group(
    groups: LengthGroups,
    tree: LengthTree,
    law: BatchLaw,
    first_row: int,
    key: Int32s,
    clock: int,
) -> int:
    """The longest length that should run with the shortest one, 0 if there are no requests.

    A group of ``rows`` is ``rows / n`` full batches of its :func:`usual_rows` ``n``, or one
    batch. A step of a batch reads ``weights + rows x longest``, both in tokens. The lengths
    are divided so that the sum over all groups is least.

    Args:
        groups: scratch.
        tree: the requests that wait.
        first_row: of the rows that run, linked by ``tree.after``. NONE if there are none.
        key: int32 ``[n]``, lengths with which they joined, at the tick ``tree.since``.
        clock: ticks until now.
    """
    number = _fill_buckets(groups, tree, first_row, key, clock)
    weights = law.weight_s / max(law.read_s, 1e-30)
    groups.cost[number] = 0.0
    for begin in range(number - 1, -1, -1):
        if groups.rows[begin] == 0:
            groups.cost[begin] = groups.cost[begin + 1]
            continue
        groups.cost[begin] = np.inf
        rows = 0.0
        for end in range(begin, number):
            if groups.rows[end] == 0:
                continue
            rows += groups.rows[end]
            longest = float(groups.longest[end])
            full = usual_rows(law, longest)
            steps = max(1.0, rows / full)
            cost = steps * weights + rows * longest + groups.cost[end + 1]
            if cost < groups.cost[begin]:
                groups.cost[begin] = cost
                groups.last[begin] = end
    if groups.rows[0] == 0:
        return 0
    return int(groups.longest[groups.last[0]])


@jit_in_place
def _fill_buckets(
    groups: LengthGroups, tree: LengthTree, first_row: int, key: Int32s, clock: int
) -> int:
    """Put all requests into buckets, of which the first is not empty. Returns how many."""
    low, high = shortest_from(tree, 1), longest_up_to(tree, MAX_LENGTH)
    row = first_row
    while row != NONE:
        length = length_now(tree, key, row, clock)
        low = min(low, length) if low > 0 else length
        high = max(high, length)
        row = tree.after[row]
    low = max(low, 1)
    ratio = (high / low) ** (1.0 / BUCKETS)
    number, before = 0, 0
    bound, exact = low, float(low)
    while True:
        exact *= ratio
        bound = max(bound, int(exact))
        if number == BUCKETS - 1 or bound > high:
            bound = high
        up_to = count_up_to(tree, bound)
        groups.bound[number] = bound
        groups.rows[number] = up_to - before
        groups.longest[number] = 0
        if up_to > before:
            groups.longest[number] = longest_up_to(tree, bound)
        before = up_to
        number += 1
        if bound == high:
            break
        bound += 1
    row = first_row
    while row != NONE:
        length = length_now(tree, key, row, clock)
        at = _bucket_of(groups, number, length)
        groups.rows[at] += 1
        groups.longest[at] = max(groups.longest[at], length)
        row = tree.after[row]
    return number


@jit_in_place
def _bucket_of(groups: LengthGroups, number: int, length: int) -> int:
    first, last = 0, number - 1
    while first < last:
        middle = (first + last) // 2
        if groups.bound[middle] < length:
            first = middle + 1
        else:
            last = middle
    return first
