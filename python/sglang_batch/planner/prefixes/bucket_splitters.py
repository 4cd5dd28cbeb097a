"""Buckets of prompts that are neighbours in the sorted job, found from a sample of it.

Between two buckets is a splitter, a sequence of tokens: prompts before it are left of it, the
others right. It is just long enough to tell apart the two prompts of the sample between
which it lies. So prompts on both sides share no more than these two do.

The sorted sample is cut where neighbours share least. A cut has one prefix computed twice, which
is nothing next to the requests of a bucket.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ..compiled import jit_without_gil
from ..requests import Int32s, Int64s, sums_before
from .prefix_sort import sort_prompts

_SAMPLED_PER_BUCKET = 1000


class Splitters(NamedTuple):
    """``b - 1`` splitters in rising order, between ``b`` buckets.

    tokens: int32, all splitters one after the other.
    offsets: int64 ``[b]``. Splitter ``i`` is ``tokens[offsets[i]:offsets[i + 1]]``, and
        bucket ``i + 1`` begins with it.
    """

    tokens: Int32s
    offsets: Int64s

    @property
    def num_buckets(self) -> int:
        return len(self.offsets)


def sample_numbers(num_requests: int, num_buckets: int, seed: int) -> Int64s:
    """The requests to choose splitters by, int64 in rising order: one at random in each of as many
    equal stretches of the job as there are requests in the sample, 1,000 for each bucket."""
    size = min(num_requests, _SAMPLED_PER_BUCKET * num_buckets)
    # Exact for whole numbers of stretches, whatever the size of the job.
    stretch = np.arange(size + 1, dtype=np.int64) * num_requests // max(size, 1)
    rng = np.random.default_rng(seed)
    return rng.integers(stretch[:-1], stretch[1:], dtype=np.int64)


def choose_splitters(tokens: Int32s, offsets: Int64s, num_buckets: int) -> Splitters:
    """Splitters where prompts of a sample share least.

    A bucket has at most ``1 / num_buckets`` of the sample, and at least half as many. Equal
    prompts are always in one bucket, which may be larger for it.

    Args:
        tokens: int32, the sample's prompts, in the order of their numbers.
        offsets: int64 ``[k + 1]``, where they begin.

    Raises:
        ConfigError: ``num_buckets`` is below 1.
    """
    if num_buckets < 1:
        raise ConfigError(f"num_buckets={num_buckets!r} must be 1 or more.")
    order, lcp = sort_prompts(tokens, offsets)
    price = np.where(lcp < np.diff(offsets)[order], lcp, np.inf)
    most = max(len(order) // num_buckets, 1)
    fewest, n = (most + 1) // 2, len(price)
    cuts: list[int] = []
    start = 0
    # Cuts are where the price is lowest, and of equal prices in the middle. Where it is
    # infinite, a piece continues.
    while n - start > most:
        near = price[start + fewest : min(start + most, n - fewest) + 1]
        least = np.flatnonzero(near == near.min())
        cut = start + fewest + int(least[abs(least - (most - fewest) // 2).argmin()])
        if price[cut] == np.inf:
            later = np.flatnonzero(price[start + most : n - fewest + 1] < np.inf)
            if not len(later):
                break
            cut = start + most + int(later[0])
        cuts.append(cut)
        start = cut
    at = np.array(cuts, np.int64)
    parts = [
        tokens[first : first + length + 1]
        for first, length in zip(offsets[order[at]], lcp[at], strict=True)
    ]
    none = np.zeros(0, np.int32)
    return Splitters(np.concatenate([none, *parts]), sums_before(lcp[at] + 1))


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
