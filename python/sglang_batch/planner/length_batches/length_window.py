"""The range of lengths whose requests make most tokens a second, without node borders.

AlignedServe's search only finds the ranges of its nodes. Here every range of waiting
lengths counts that fits, and its worth is the rate of its first step: rows over seconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..compiled import jit_in_place
from ..costs.cost_model import tokens_read
from .density_search import LengthRange
from .length_tree import (
    COUNT,
    LEAVES,
    MAX_LENGTH,
    LengthTree,
    longest_up_to,
    shortest_from,
)

# Share of the KV that a window fills: its rows grow.
WINDOW_SHARE = 0.7


class BatchLaw(NamedTuple):
    """What a decode step costs, and how large a batch may be.

    weight_s: seconds of a step without rows.
    read_s: seconds to read a token's KV.
    row_share, padded: see ``costs.cost_model.tokens_read``.
    capacity: tokens of KV. Of a padded batch, rows times its longest row.
    max_rows: most rows.
    parks: whether rows can leave for a while without being computed again.
    """

    weight_s: float
    read_s: float
    row_share: float
    padded: bool
    capacity: float
    max_rows: int
    parks: bool


@jit_in_place
def step_s(law: BatchLaw, rows: float, total: float, longest: float) -> float:
    """Seconds of a decode step."""
    read = tokens_read(total, longest, rows, law.row_share, law.padded)
    return max(law.weight_s + law.read_s * read, 1e-30)


@jit_in_place
def usual_rows(law: BatchLaw, length: float) -> float:
    """Rows of a batch whose rows have all this length."""
    fits = WINDOW_SHARE * law.capacity / max(length, 1.0)
    return max(1.0, min(float(law.max_rows), fits))


@jit_in_place
def best_window(tree: LengthTree, law: BatchLaw) -> tuple[LengthRange, float]:
    """The window with the highest rate, the shortest of equal ones, and that rate.

    Takes time linear in the range of waiting lengths, up to the one from which on no window
    can be better.
    """
    nodes = tree.nodes
    best = LengthRange(0, 0, 0, 0, 0, 0)
    best_rate = -1.0
    low = first = shortest_from(tree, 1)
    high = longest_up_to(tree, MAX_LENGTH)
    if low == 0:
        return best, best_rate
    limit = WINDOW_SHARE * law.capacity
    most = float(law.max_rows)
    rows, total = 0, 0.0
    for longest in range(low, high + 1):
        here = nodes[LEAVES + longest - 1, COUNT]
        if here == 0:
            continue
        rows += here
        total += float(here) * longest
        if law.padded and most * longest > limit:
            most = float(int(limit / longest))
        most = max(1.0, most)
        # Drop the shortest lengths as long as none of them fits beside the others.
        while low < longest:
            there = nodes[LEAVES + low - 1, COUNT]
            full = rows - there >= most
            if not law.padded:
                full = full or total - float(there - 1) * low > limit
            if there > 0 and not full:
                break
            rows -= there
            total -= float(there) * low
            low += 1
        kept, read = float(rows), total
        if kept > most:
            read -= (kept - most) * low
            kept = most
        if not law.padded and read > limit:
            out = min(kept - 1.0, float(math.ceil((read - limit) / low)))
            kept, read = kept - out, read - out * low
        rate = kept / step_s(law, kept, read, float(longest))
        if rate > best_rate:
            best_rate = rate
            at_low = int(nodes[LEAVES + low - 1, COUNT] - (rows - kept))
            at_high = at_low if low == longest else here
            best = LengthRange(low, longest, at_low, at_high, int(kept), int(read))
        # Longer windows have no more rows, and none below the lowest length of this one.
        if law.padded and kept == most:
            break
        if not law.padded and low > first:
            full_rows = max(1.0, min(most, limit / low))
            seconds = step_s(law, full_rows, full_rows * low, float(longest))
            if full_rows <= best_rate * seconds:
                break
    return best, best_rate
