"""Buckets of prompts that are neighbours in the sorted job, found from a sample of it.

Between two buckets is a splitter, a sequence of tokens: prompts before it in the order of
the tokens are left of it, the others right. It is as long as it takes to tell apart the
two prompts of the sample between which it lies. So prompts on both sides share no more
than these two do, and a system prompt that all requests begin with does no harm.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ..compiled import jit_without_gil
from ..prefixes.prefix_sort import sort_prompts
from ..requests import Int32s, Int64s
from .order_cuts import MAX_REPEATED, check_max_repeated, cut_order

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
    """The requests to choose splitters by, int64 in rising order.

    One at random in each of as many equal stretches of the job as there are requests in
    the sample, 1,000 for each bucket. Every request of a small job.
    """
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
    max_repeated: float = MAX_REPEATED,
) -> Splitters:
    """Splitters where prompts of a sample share least.

    A bucket has about ``1 / num_buckets`` of the requests at most, and about half as many
    at least. It has more if it has a family that is larger and must not be cut: where the
    family's prefix has over ``max_repeated`` of the tokens that its requests on either side
    have for themselves, with one of each answer. Equal prompts are always in one bucket.

    Args:
        tokens: int32, the sample's prompts, in the order of their numbers.
        offsets: int64 ``[k + 1]``, where they begin.
        num_requests: of the whole job.

    Raises:
        ConfigError: a setting is out of range.
    """
    if num_buckets < 1:
        raise ConfigError(f"num_buckets={num_buckets!r} must be 1 or more.")
    check_max_repeated(max_repeated)
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

    By binary search. All splitters between two that have been compared share with the
    prompt what both of them do, so these tokens are skipped.
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
