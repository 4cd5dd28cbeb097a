"""A range of a job's prompts dealt to buckets.

Every range is dealt by itself, on any machine. The parts of all ranges, one after the
other, are the buckets, whatever the ranges were.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compiled import jit_without_gil
from ..requests import Int32s, Int64s, PlanRequests
from .splitters import Splitters, buckets_of


class DealtPrompts(NamedTuple):
    """The requests of a range of a job, one bucket after the other.

    requests: those of a bucket are in the order of the job.
    numbers: int64 ``[n]``, the number of each in the job.
    begin: int64 ``[b + 1]``. Bucket ``i`` has ``requests`` from ``begin[i]`` to
        ``begin[i + 1]``.
    """

    requests: PlanRequests
    numbers: Int64s
    begin: Int64s


def deal_prompts(
    requests: PlanRequests, first: int, splitters: Splitters
) -> DealtPrompts:
    """The requests of a range, bucket by bucket.

    Most of the work releases the GIL. The result takes as much memory as ``requests``.

    Args:
        first: number in the job of the first of ``requests``.
    """
    bucket = buckets_of(requests.tokens, requests.offsets, splitters)
    order, begin = _grouped(bucket, splitters.num_buckets)
    tokens, offsets = _copied(requests.tokens, requests.offsets, order)
    adapter = requests.adapter
    dealt = PlanRequests(
        tokens=tokens,
        offsets=offsets,
        max_new_tokens=requests.max_new_tokens[order],
        known_output_len=requests.known_output_len[order],
        adapter=None if adapter is None else adapter[order],
    )
    return DealtPrompts(dealt, first + order, begin)


@jit_without_gil
def _grouped(bucket: Int32s, num_buckets: int) -> tuple[Int64s, Int64s]:
    """The requests sorted by bucket, int64 ``[n]``, and where each bucket begins."""
    begin = np.zeros(num_buckets + 1, np.int64)
    for each in bucket:
        begin[each + 1] += 1
    begin[:] = np.cumsum(begin)
    place = begin[:-1].copy()
    order = np.empty(len(bucket), np.int64)
    for i in range(len(bucket)):
        order[place[bucket[i]]] = i
        place[bucket[i]] += 1
    return order, begin


@jit_without_gil
def _copied(tokens: Int32s, offsets: Int64s, order: Int64s) -> tuple[Int32s, Int64s]:
    """The prompts in another order, and where they begin, int64 ``[n + 1]``."""
    copied = np.zeros(len(order) + 1, np.int64)
    for k in range(len(order)):
        i = order[k]
        copied[k + 1] = copied[k] + offsets[i + 1] - offsets[i]
    moved = np.empty(copied[-1], np.int32)
    for k in range(len(order)):
        begin = offsets[order[k]]
        for j in range(copied[k + 1] - copied[k]):
            moved[copied[k] + j] = tokens[begin + j]
    return moved, copied
