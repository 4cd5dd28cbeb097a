"""The sample of a job's requests that runs first, to learn output lengths from."""

from __future__ import annotations

import numpy as np

from ...errors import InputError
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Int64s, PlanRequests
from .length_strata import strata

# Most prompt tokens that the sample may cause to be computed twice, as a share of the job's.
# A prefix that the sample computes is out of the cache when its other requests run.
_MOST_REPEATED = 0.002
# Neighbours that are chosen together to avoid it, and rows of them that are left at least.
_IN_A_ROW = (1, 2, 4, 8)
_FEWEST_ROWS = 4


def choose_sample(
    tree: PrefixTree,
    requests: PlanRequests,
    *,
    share: float = 0.01,
    min_per_subtree: int = 5,
    seed: int,
) -> Int64s:
    """Requests of unknown output length to run first, int64 indices in DFS order.

    They are evenly spaced along the leaves from a random start, so that every subtree
    is represented. Of a large subtree at least ``min_per_subtree`` are chosen. It is
    large when, not counting large subtrees below it, it has 1/256 of all requests of
    unknown length, and enough of them that ``min_per_subtree`` is at most twice their
    share. The sample is therefore at most three times ``share``. Of a job too small for
    that, ``min_per_subtree`` requests are chosen in all.

    Where their prefixes would take more than 0.2 % of the job's tokens to compute again,
    neighbours are chosen instead, which share prefixes: two, four or eight in a row, and
    the rows evenly spaced.

    Raises:
        InputError: ``share`` is not in (0, 1] or ``min_per_subtree`` is below 1.
    """
    if not 0 < share <= 1:
        raise InputError(f"share={share!r} of a sample must be above 0 and at most 1.")
    if min_per_subtree < 1:
        raise InputError(f"min_per_subtree={min_per_subtree!r} must be 1 or more.")
    unknown = requests.without_estimate[tree.order]
    positions = np.flatnonzero(unknown)
    large = max(len(positions) / 256, min_per_subtree / (2 * share))
    stratum = strata(tree.parent, tree.leaf_parent, unknown, large)[positions]
    positions = positions[np.argsort(stratum, kind="stable")]
    size = np.bincount(stratum)
    start_size, start_place = np.random.default_rng(seed).random(2)
    # Rounding the running total keeps the sum at the share of the whole.
    wanted = np.diff(np.floor(share * np.cumsum(size) + start_size), prepend=0.0)
    needed = np.where(size >= min(large, len(positions)), min_per_subtree, 0)
    taken = np.minimum(np.maximum(wanted, needed), size).astype(np.int64)
    most_repeated = _MOST_REPEATED * tree.num_unique_tokens
    for in_a_row in _IN_A_ROW:
        if in_a_row > 1 and (-(-taken // in_a_row)).sum() < _FEWEST_ROWS:
            break
        places = _spaced(size, taken, in_a_row, start_place)
        chosen = np.sort(positions[places])
        if _repeated_tokens(tree, chosen) <= most_repeated:
            break
    sample: Int64s = tree.order[chosen]
    return sample


def _spaced(size: Int64s, taken: Int64s, in_a_row: int, start: float) -> Int64s:
    """Places of the chosen, all strata one after the other.

    Args:
        size, taken: requests of each stratum, and how many of them are chosen.
        in_a_row: how many neighbours are chosen together.
        start: place of a row in its stretch of the stratum, 0 to 1.
    """
    nth = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    begin = np.repeat(np.cumsum(size) - size, taken)
    num_rows = np.repeat(-(-taken // in_a_row), taken)
    free = np.repeat(size if in_a_row == 1 else size - taken, taken)
    before = (nth // in_a_row + start) * (free / np.maximum(num_rows, 1))
    places: Int64s = begin + before.astype(np.int64)
    return places if in_a_row == 1 else places + nth


def _repeated_tokens(tree: PrefixTree, leaves: Int64s) -> int:
    """Tokens of the prefixes that some leaves share with others, each once."""
    chosen = np.zeros(tree.num_requests)
    chosen[leaves] = 1.0
    number = tree.subtree_sums(chosen)
    shared = (number > 0) & (number < tree.leaf_end - tree.leaf_begin)
    length = tree.depth - np.where(tree.parent >= 0, tree.depth[tree.parent], 0)
    return int(length[shared].sum(dtype=np.int64))
