"""A shard of a job as a job of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..prefixes.prefix_tree import PrefixTree
from ..requests import Int64s, PlanRequests


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
    position = tree.position
    return [
        ShardJob(
            index,
            tree.restricted_to(np.sort(position[index])).renumbered(),
            requests.take(index),
        )
        for index in indices
    ]
