"""A depth-first order cut into pieces where neighbours share least.

A cut inside a family, the requests below one node of the prefix tree, makes two engines
compute the family's prefix if the pieces go to different ones. What it brings is smaller
pieces. So a family is cut only where the price is a small share of the work on both
sides: then the same is true of all pieces together, wherever they go.
"""

from __future__ import annotations

import numpy as np

from ...errors import ConfigError
from ..compiled import jit_without_gil
from ..requests import Floats, Int32s, Int64s

MAX_REPEATED = 0.005
"""Share of the work of a family's parts that computing its prefix again may take."""


def check_max_repeated(max_repeated: float) -> None:
    """Raise :class:`ConfigError` unless it is a share."""
    if not 0 <= max_repeated <= 1:
        raise ConfigError(f"max_repeated={max_repeated!r} must be 0 to 1.")


@jit_without_gil
def cut_order(
    lcp: Int32s,
    price: Floats,
    before: Floats,
    fewest: int,
    most: int,
    max_repeated: float,
) -> Int64s:
    """The first position of each piece, and the end, int64 ``[u + 1]``.

    A piece has ``fewest`` to ``most`` requests and ends where the price is lowest among
    the places where a cut is allowed, of equal ones in the middle. If there is none, it
    goes on to the next place where one is. What is left at the end, if it is at most
    ``most``, is one piece.

    A cut is allowed if its price is at most ``max_repeated`` times the work of either
    part of the lowest family that it cuts. The same holds for the parts of all families
    then, as those around it have a lower price and more work.

    Args:
        lcp: int32 ``[n]``, tokens that each request shares with the one before it.
        price: float64 ``[n]``, work to compute these tokens again, which grows with
            them. Infinite where nothing may be cut.
        before: float64 ``[n + 1]``, work of all requests before a position, in the same
            unit.
        fewest, most: 1 or more.

    Returns:
        ``[0]`` for an empty order.
    """
    n = len(lcp)
    family_begin, family_end = _families(lcp)
    begin = np.zeros(n // fewest + 2, np.int64)
    u, start = 0, 0
    while n - start > most:
        cut, least = -1, np.inf
        middle = start + (fewest + most) // 2
        for at in range(start + fewest, n - fewest + 1):
            if at > start + most and cut >= 0:
                break
            if price[at] > least or (
                price[at] == least and abs(at - middle) >= abs(cut - middle)
            ):
                continue
            left = before[at] - before[max(start, family_begin[at])]
            right = before[family_end[at]] - before[at]
            if price[at] <= max_repeated * min(left, right):
                cut, least = at, price[at]
        if cut < 0:
            break
        u += 1
        begin[u] = start = cut
    if n > 0:
        u += 1
        begin[u] = n
    return begin[: u + 1].copy()


@jit_without_gil
def _families(lcp: Int32s) -> tuple[Int64s, Int64s]:
    """First position and end of the family that a cut at each position divides.

    It is the longest stretch around the cut whose requests all share as many tokens as
    the two at the cut. Each int64 ``[n]``.
    """
    n = len(lcp)
    begin, end = np.zeros(n, np.int64), np.full(n, n)
    waiting = np.empty(n, np.int64)
    num_waiting = 0
    for at in range(n):
        while num_waiting and lcp[waiting[num_waiting - 1]] > lcp[at]:
            num_waiting -= 1
            end[waiting[num_waiting]] = at
        if num_waiting:
            last = waiting[num_waiting - 1]
            begin[at] = begin[last] if lcp[last] == lcp[at] else last
        waiting[num_waiting] = at
        num_waiting += 1
    return begin, end
