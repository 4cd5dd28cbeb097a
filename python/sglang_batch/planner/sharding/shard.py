"""A shard of a job as a job of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..compiled import jit
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Int32s, Int64s, PlanRequests


@dataclass(frozen=True, slots=True)
class ShardJob:
    """A shard as a job of its own, whose requests are numbered 0..len(index)-1.

    index: int64, the number of each request in the whole job, in ascending order.
        ``values[index]`` selects the shard's values of an array by request, and
        ``index[order]`` translates the shard's order to numbers in the whole job.
    tree: the prefix tree of the shard's requests.
    requests: the shard's requests, with their prompts.
    """

    index: Int64s
    tree: PrefixTree
    requests: PlanRequests


def shard_jobs(
    tree: PrefixTree, requests: PlanRequests, indices: Sequence[Int64s]
) -> list[ShardJob]:
    """Shards as jobs that can be planned alone. Prompts are copied.

    Args:
        indices: int64 arrays, the numbers of each shard's requests in ascending order.
    """
    position = np.empty_like(tree.order)
    position[tree.order] = np.arange(tree.num_requests)
    return [
        _shard_job(tree, requests, index, np.sort(position[index])) for index in indices
    ]


def _shard_job(
    tree: PrefixTree, requests: PlanRequests, index: Int64s, leaves: Int64s
) -> ShardJob:
    offsets = np.zeros(len(index) + 1, np.int64)
    np.cumsum(requests.offsets[index + 1] - requests.offsets[index], out=offsets[1:])
    return ShardJob(
        index=index,
        tree=tree.restricted_to(leaves).renumbered(),
        requests=PlanRequests(
            tokens=_copy_prompts(requests.tokens, requests.offsets, index, offsets),
            offsets=offsets,
            max_new_tokens=requests.max_new_tokens[index],
            known_output_len=requests.known_output_len[index],
            adapter=None if requests.adapter is None else requests.adapter[index],
        ),
    )


@jit
def _copy_prompts(
    tokens: Int32s, offsets: Int64s, index: Int64s, new_offsets: Int64s
) -> Int32s:
    copied = np.empty(new_offsets[-1], np.int32)
    for i in range(len(index)):
        begin, end = offsets[index[i]], offsets[index[i] + 1]
        copied[new_offsets[i] : new_offsets[i + 1]] = tokens[begin:end]
    return copied
