"""Units of work dealt to shards, each with so much compute and so much memory time."""

from __future__ import annotations

import numpy as np

from .cost_model import overlapped
from .jit import jit
from .requests import Floats, Int32s, Int64s


@jit
def deal(
    largest_first: Int64s, compute: Floats, memory: Floats, k: int, max_passes: int
) -> Int32s:
    """The shard of each unit, int32 ``[u]``.

    Both the first placing and the moves lower the sum over shards of compute share
    squared plus memory share squared. Where no unit can move to lower it, with u the
    largest share of a unit, no shard has more than 1.21 * (1/k + u) of either: no move
    out of a shard with load L = (c, m) helps, x (L - x) <= x L' for its units x and
    other loads L'; summed over its units and averaged over the shards,
    c^2 + m^2 <= (c + m) (1/k + u).
    """
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
            least = c * loads[0, best] + m * loads[1, best]
            for s in range(k):
                harm = c * loads[0, s] + m * loads[1, s]
                # By more than rounding, or equal units would change places for ever.
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
def ease_slowest(
    shard: Int32s, compute: Floats, memory: Floats, k: int, exponent: float
) -> None:
    """Move units, seconds ``[u]`` each, off the shard that takes longest.

    Each time the one, to where it makes the slower of the two shards fastest, until
    none makes it faster. The slowest shard never gets slower, so what :func:`deal`
    guarantees for its time holds.
    """
    loads = np.zeros((2, k))
    for unit in range(len(shard)):
        loads[0, shard[unit]] += compute[unit]
        loads[1, shard[unit]] += memory[unit]
    seconds = np.zeros(k)
    for s in range(k):
        seconds[s] = overlapped(loads[0, s], loads[1, s], exponent)
    for _ in range(2 * len(shard)):
        slowest = int(np.argmax(seconds))
        least = seconds[slowest] * (1.0 - 1e-9)
        best, to = -1, -1
        for unit in range(len(shard)):
            if shard[unit] != slowest:
                continue
            c, m = compute[unit], memory[unit]
            rest = max(0.0, loads[0, slowest] - c), max(0.0, loads[1, slowest] - m)
            left = overlapped(rest[0], rest[1], exponent)
            if left >= least:
                continue
            for s in range(k):
                there = overlapped(loads[0, s] + c, loads[1, s] + m, exponent)
                if s != slowest and max(left, there) < least:
                    best, to, least = unit, s, max(left, there)
        if best < 0:
            break
        for s, sign in ((slowest, -1.0), (to, 1.0)):
            loads[0, s] = max(0.0, loads[0, s] + sign * compute[best])
            loads[1, s] = max(0.0, loads[1, s] + sign * memory[best])
            seconds[s] = overlapped(loads[0, s], loads[1, s], exponent)
        shard[best] = to
