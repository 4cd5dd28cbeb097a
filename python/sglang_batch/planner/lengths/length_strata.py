"""Subtrees with enough answers to learn from, and mean lengths over the tree."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit
from ..requests import Bools, Floats, Int32s, Int64s

# A parent's mean counts as much as this many answers when a child's is shrunk to it.
SHRINKAGE = 2.0

Number = TypeVar("Number", np.int64, np.float64)


@jit
def strata(parent: Int32s, leaf_parent: Int32s, counted: Bools, least: float) -> Int32s:
    """Cut the tree into subtrees with at least ``least`` counted leaves each.

    From the leaves up, a node with that many counted leaves outside the strata below it
    becomes a stratum.

    Returns:
        The stratum of each leaf, int32 ``[n]``, numbered from 1. 0 is the remainder at
        the root.
    """
    waiting = np.zeros(len(parent), np.int64)
    for leaf in range(len(leaf_parent)):
        waiting[leaf_parent[leaf]] += counted[leaf]
    stratum = np.zeros(len(parent), np.int32)
    num_strata = 0
    for node in range(len(parent) - 1, 0, -1):
        if waiting[node] >= least:
            num_strata += 1
            stratum[node] = num_strata
        else:
            waiting[parent[node]] += waiting[node]
    for node in range(1, len(parent)):
        if stratum[node] == 0:
            stratum[node] = stratum[parent[node]]
    return stratum[leaf_parent]


@jit
def node_means(
    parent: Int32s,
    leaf_begin: Int64s,
    leaf_end: Int64s,
    count_before: Int64s,
    sum_before: Int64s,
    default: float,
) -> Floats:
    """Mean of the observed values below each node, shrunk to its parent's.

    Args:
        count_before, sum_before: int64 ``[n + 1]``, the number and the sum of the
            observed values before each leaf position.
        default: the mean at the root without any observed value.

    Returns:
        float64 ``[m]``.
    """
    mean = np.empty(len(parent))
    for node in range(len(parent)):
        begin, end = leaf_begin[node], leaf_end[node]
        count = count_before[end] - count_before[begin]
        total = float(sum_before[end] - sum_before[begin])
        if node > 0:
            mean[node] = (total + SHRINKAGE * mean[parent[node]]) / (count + SHRINKAGE)
        elif count > 0:
            mean[node] = total / count
        else:
            mean[node] = default
    return mean


def sums_before(values: NDArray[Number]) -> NDArray[Number]:
    """The sum of all values before each index, and of all values, ``[n + 1]``."""
    result = np.zeros(len(values) + 1, values.dtype)
    np.cumsum(values, out=result[1:])
    return result
