"""An order whose every stretch looks like the whole.

Sorted by density, the left side begins with its most extreme requests and ends with
its mildest. What the right side may hold would have to follow, but its requests run for
ten thousand steps and cannot give KV back. So the sorted side is cut into units, at
places where few tokens are shared, and the units are dealt out evenly: the side's
density, and with it the KV it needs, then stays the same from beginning to end.
"""

from __future__ import annotations

import numpy as np

from .jit import jit
from .prefix_tree import PrefixTree
from .requests import Floats, Int32s, Int64s

NUM_UNITS = 512
_GOLDEN = (5.0**0.5 - 1.0) / 2.0


def interleaved(
    tree: PrefixTree, leaves: Int64s, work: Floats, max_repeated_tokens: int
) -> Int64s:
    """A permutation of ``leaves``, as places in it, int64 ``[len(leaves)]``.

    Args:
        leaves: int64, positions in the tree, sorted by density.
        work: float64 ``[n]`` by leaf; units are of about equal work.
        max_repeated_tokens: shared tokens that may be lost at the cuts. There are as
            many units as that allows.
    """
    if len(leaves) == 0:
        return np.zeros(0, np.int64)
    shared = tree.shared_with_previous(leaves)
    num_units = NUM_UNITS
    while True:
        unit = _cut(shared, work[leaves], num_units)
        cuts = np.flatnonzero(np.diff(unit)) + 1
        if shared[cuts].sum(dtype=np.int64) <= max_repeated_tokens or num_units == 1:
            break
        num_units //= 2
    # Multiples of the golden ratio fall into any interval in proportion to its length.
    turn = np.arange(unit[-1] + 1) * _GOLDEN % 1.0
    return np.argsort(turn[unit], kind="stable")


@jit
def _cut(shared: Int32s, work: Floats, num_units: int) -> Int64s:
    """The unit of each place: a cut every so much work, where least is shared.

    The cut is looked for within a unit's length after the place where it is due.
    """
    size = work.sum() / num_units
    unit = np.empty(len(work), np.int64)
    current = 0
    done = 0.0
    best = -1
    i = 0
    begin = 0
    while i < len(work):
        done += work[i]
        if done >= size and i > begin:
            if best < 0 or shared[i] < shared[best]:
                best = i
            if shared[best] == 0 or done >= 2.0 * size or i == len(work) - 1:
                for j in range(begin, best):
                    unit[j] = current
                current += 1
                begin, i = best, best
                best, done = -1, work[begin]
        i += 1
    for j in range(begin, len(work)):
        unit[j] = current
    return unit
