"""Buckets of prompts that are neighbours in the sorted job, found from a sample of it.

Between two buckets is a splitter, a sequence of tokens: prompts before it are left of it, the
others right. It is just long enough to tell apart the two prompts of the sample between
which it lies. So prompts on both sides share no more than these two do.

The sorted sample is cut where neighbours share least. A cut inside a family, the requests
below one node of the prefix tree, makes two engines compute the family's prefix if the pieces
go to different ones. So a family is cut only where that is a small share of the work on both
sides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ..compiled import jit_without_gil
from ..requests import Floats, Int32s, Int64s
from .prefix_sort import sort_prompts


@jit_without_gil
def cut_order(
    lcp: Int32s,
    price: Floats,
    before: Floats,
    fewest: int,
    most: int,
    max_repeated: float,
) -> Int64s:
    """The first position of each piece, and the end, int64 ``[u + 1]``; ``[0]`` for an empty order.

    A piece has ``fewest`` to ``most`` requests and ends where the price is lowest among
    the places where a cut is allowed, of equal ones in the middle. If there is none, it
    continues at the next place where one is.

    A cut is allowed if its price is at most ``max_repeated`` times the work of either
    part of the lowest family that it cuts, and so of all families around it.

    Args:
        lcp: int32 ``[n]``, tokens that each request shares with the one before it.
        price: float64 ``[n]``, work to compute these tokens again, infinite where nothing may
            be cut.
        before: float64 ``[n + 1]``, work of all requests before a position, in that unit.
        fewest, most: 1 or more.
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
    """First position and end of the family that a cut at each position divides, int64 ``[n]`` each:
    the longest stretch whose requests all share as many tokens as the two at the cut."""
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


_SAMPLED_PER_BUCKET = 1000


class Splitters(NamedTuple):
    """``b - 1`` splitters in rising order, between ``b`` buckets.

    tokens: int32, all splitters one after the other.
    offsets: int64 ``[b]``. Splitter ``i`` is ``tokens[offsets[i]:offsets[i + 1]]``, and
        bucket ``i + 1`` begins with it.
    common: int32 ``[b - 1]``, most tokens that prompts on both sides share.
    """

    tokens: Int32s
    offsets: Int64s
    common: Int32s

    @property
    def num_buckets(self) -> int:
        """``b``."""
        return len(self.offsets)


def sample_numbers(num_requests: int, num_buckets: int, seed: int) -> Int64s:
    """The requests to choose splitters by, int64 in rising order: one at random in each of as many
    equal stretches of the job as there are requests in the sample, 1,000 for each bucket."""
    size = min(num_requests, _SAMPLED_PER_BUCKET * num_buckets)
    # Exact for whole numbers of stretches, whatever the size of the job.
    stretch = np.arange(size + 1, dtype=np.int64) * num_requests // max(size, 1)
    rng = np.random.default_rng(seed)
    return rng.integers(stretch[:-1], stretch[1:], dtype=np.int64)


def choose_splitters(
    tokens: Int32s,
    offsets: Int64s,
    num_requests: int,
    num_buckets: int,
    *,
    max_repeated: float,
) -> Splitters:
    """Splitters where prompts of a sample share least.

    A bucket has about ``1 / num_buckets`` of the requests at most, and half as many at least. It
    has more if it has a family that must not be cut, whose prefix has over ``max_repeated`` of
    the tokens that its requests on either side have for themselves. Equal prompts are always in
    one bucket.

    Args:
        tokens: int32, the sample's prompts, in the order of their numbers.
        offsets: int64 ``[k + 1]``, where they begin.
        num_requests: of the whole job.

    Raises:
        ConfigError: a setting is out of range.
    """
    if num_buckets < 1:
        raise ConfigError(f"num_buckets={num_buckets!r} must be 1 or more.")
    if not 0 <= max_repeated <= 1:
        raise ConfigError(f"max_repeated={max_repeated!r} must be 0 to 1.")
    order, lcp = sort_prompts(tokens, offsets)
    input_len = np.diff(offsets)[order]
    # Tokens that no neighbour has and one of the answer, as often as the sample stands for
    # others. Prefixes are there once, however many requests have them.
    shared = np.maximum(lcp, np.append(lcp[1:], np.int32(0))[: len(lcp)])
    own = input_len - shared + 1
    before = np.zeros(len(order) + 1)
    np.cumsum(own * (num_requests / max(len(order), 1)), out=before[1:])
    price = np.where(lcp < input_len, lcp, np.inf)
    most = max(len(order) // num_buckets, 1)
    begin = cut_order(lcp, price, before, (most + 1) // 2, most, max_repeated)
    cuts = begin[1:-1]
    ends = np.zeros(len(cuts) + 1, np.int64)
    np.cumsum(lcp[cuts] + 1, out=ends[1:])
    parts = [
        tokens[first : first + length + 1]
        for first, length in zip(offsets[order[cuts]], lcp[cuts], strict=True)
    ]
    none = np.zeros(0, np.int32)
    return Splitters(np.concatenate([none, *parts]), ends, lcp[cuts])


@jit_without_gil
def buckets_of(tokens: Int32s, offsets: Int64s, splitters: Splitters) -> Int32s:
    """The bucket of each prompt, int32 ``[n]``: the number of splitters not after it.

    By binary search, which skips tokens that the splitters on both sides share with the prompt.
    """
    bucket = np.empty(len(offsets) - 1, np.int32)
    for i in range(len(bucket)):
        first, end = offsets[i], offsets[i + 1]
        low, high = 0, len(splitters.offsets) - 1
        low_common, high_common = 0, 0
        while low < high:
            middle = (low + high) // 2
            start = splitters.offsets[middle]
            length = splitters.offsets[middle + 1] - start
            both = min(length, end - first)
            common = min(low_common, high_common)
            while (
                common < both
                and tokens[first + common] == splitters.tokens[start + common]
            ):
                common += 1
            if common == length or (
                common < both
                and splitters.tokens[start + common] < tokens[first + common]
            ):
                low, low_common = middle + 1, common
            else:
                high, high_common = middle, common
        bucket[i] = low
    return bucket
