"""The sample of a job's requests that runs first, to learn output lengths from."""

from __future__ import annotations

import numpy as np

from ...errors import InputError
from ..prefixes.prefix_tree import PrefixTree
from ..requests import UNKNOWN, Int64s, PlanRequests
from .length_strata import strata


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

    Raises:
        InputError: ``share`` is not in (0, 1] or ``min_per_subtree`` is below 1.
    """
    if not 0 < share <= 1:
        raise InputError(f"share={share!r} of a sample must be above 0 and at most 1.")
    if min_per_subtree < 1:
        raise InputError(f"min_per_subtree={min_per_subtree!r} must be 1 or more.")
    unknown = requests.known_output_len[tree.order] == UNKNOWN
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
    nth = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    step = np.repeat(size, taken) / np.repeat(taken, taken)
    begin = np.repeat(np.cumsum(size) - size, taken)
    chosen = begin + ((nth + start_place) * step).astype(np.int64)
    sample: Int64s = tree.order[np.sort(positions[chosen])]
    return sample
