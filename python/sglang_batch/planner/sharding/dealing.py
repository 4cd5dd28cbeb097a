"""Units of work, each with a compute and a memory time, dealt to shards."""

from __future__ import annotations

import numpy as np

from ..compiled import jit
from ..costs.cost_model import overlapped
from ..requests import Floats, Int32s, Int64s


@jit
def deal(
    largest_first: Int64s,
    compute: Floats,
    memory: Floats,
    slow: Floats,
    max_passes: int,
) -> Int32s:
    """The shard of each unit, int32 ``[u]``.

    Both the first placement and the moves lower the sum over shards of compute share
    squared plus memory share squared, each over the speed of the shard's engine. Once no
    move lowers it, and if all engines are as fast, no shard has more than
    1.21 * (1/k + u) of either, where u is the largest share of a unit. Proof: no move
    out of a shard with load L = (c, m) helps, so x (L - x) <= x L' for its units x and
    other loads L'. Summed over its units and averaged over the shards, this is
    c^2 + m^2 <= (c + m) (1/k + u).

    Args:
        largest_first: int64 ``[u]``, the units in falling size.
        compute, memory: float64 ``[u]``, shares of the job's compute and memory time.
        slow: float64 ``[2, k]``, how many times as long as the fastest engine that of each
            shard takes for compute and for memory.
    """
    k = slow.shape[1]
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
            least = _harm(c, m, loads, slow, best)
            for s in range(k):
                harm = _harm(c, m, loads, slow, s)
                # By more than rounding errors, or equal units would swap for ever.
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
def _harm(c: float, m: float, loads: Floats, slow: Floats, s: int) -> float:
    """Half of what a unit adds to the sum of squares in a shard.

    Without the half of its own squares, which it adds to the fastest shard, too. So among
    engines of the same speed only the loads count.
    """
    own = c * c * (slow[0, s] - 1.0) + m * m * (slow[1, s] - 1.0)
    harm: float = c * loads[0, s] * slow[0, s] + m * loads[1, s] * slow[1, s] + own / 2
    return harm


@jit
def ease_slowest(
    shard: Int32s, compute: Floats, memory: Floats, slow: Floats, exponent: float
) -> None:
    """Move units away from the slowest shard, in place.

    Each move takes the unit and the other shard that make the slower of the two fastest,
    until no move helps. The slowest shard never gets slower, so the guarantee of
    :func:`deal` still holds for its time.

    Args:
        shard: int32 ``[u]``, the shard of each unit, which is changed.
        compute, memory: float64 ``[u]``, in seconds.
        slow: float64 ``[2, k]``, how long the engine of each shard takes for a second of
            compute and of memory.
        exponent: k of :func:`~..costs.cost_model.overlapped`.
    """
    k = slow.shape[1]
    loads = np.zeros((2, k))
    for unit in range(len(shard)):
        loads[0, shard[unit]] += compute[unit]
        loads[1, shard[unit]] += memory[unit]
    seconds = np.zeros(k)
    for s in range(k):
        seconds[s] = _seconds(loads[0, s], loads[1, s], slow, s, exponent)
    for _ in range(2 * len(shard)):
        slowest = int(np.argmax(seconds))
        least = seconds[slowest] * (1.0 - 1e-9)
        best, to = -1, -1
        for unit in range(len(shard)):
            if shard[unit] != slowest:
                continue
            c, m = compute[unit], memory[unit]
            rest = max(0.0, loads[0, slowest] - c), max(0.0, loads[1, slowest] - m)
            left = _seconds(rest[0], rest[1], slow, slowest, exponent)
            if left >= least:
                continue
            for s in range(k):
                there = _seconds(loads[0, s] + c, loads[1, s] + m, slow, s, exponent)
                if s != slowest and max(left, there) < least:
                    best, to, least = unit, s, max(left, there)
        if best < 0:
            break
        for s, sign in ((slowest, -1.0), (to, 1.0)):
            loads[0, s] = max(0.0, loads[0, s] + sign * compute[best])
            loads[1, s] = max(0.0, loads[1, s] + sign * memory[best])
            seconds[s] = _seconds(loads[0, s], loads[1, s], slow, s, exponent)
        shard[best] = to


@jit
def _seconds(
    compute: float, memory: float, slow: Floats, s: int, exponent: float
) -> float:
    seconds: float = overlapped(compute * slow[0, s], memory * slow[1, s], exponent)
    return seconds
