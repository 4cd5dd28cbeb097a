"""The sample of a job's requests that runs first, to learn output lengths from."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ...errors import InputError
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Bools, Int64s, PlanRequests
from .estimates import strata

# Most prompt tokens that the sample may cause to be computed twice, as a share of the job's.
# A prefix that the sample computes is out of the cache when its other requests run.
MOST_REPEATED = 0.002
# Requests that are chosen of each large subtree.
_MIN_PER_SUBTREE = 5
# Neighbours that are chosen together to avoid it, and rows of them that are left at least:
# lengths of one family say little about others.
_IN_A_ROW = (1, 2, 4, 8, 16, 32)
_FEWEST_ROWS = 3
# Rows where they are cheap may make the sample larger than it was to be by this factor.
_MOST_LARGER = 1.5


def choose_sample(
    tree: PrefixTree, requests: PlanRequests, *, share: float = 0.01, seed: int
) -> Int64s:
    """Requests of unknown output length to run first, int64 indices in DFS order.

    They are evenly spaced along the leaves from a random start, so that every subtree
    is represented. Of a large subtree at least five are chosen. It is large when, not
    counting large subtrees below it, it has 1/256 of all requests of unknown length, and
    enough of them that five are at most twice their share. The sample is therefore at most
    three times ``share``. Of a job too small for that, five requests are chosen in all.

    Where their prefixes would take more than 0.2 % of the job's tokens to compute again,
    neighbours are chosen instead, which share prefixes: up to 32 in a row and the rows
    evenly spaced, or where they share least with others. Where no three rows are so cheap, the
    sample is the beginning of the depth-first order up to the end of a family. If even that
    is dear or takes over a quarter of the job, there is no sample.

    Raises:
        InputError: ``share`` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise InputError(f"share={share!r} of a sample must be above 0 and at most 1.")
    unknown = requests.without_estimate[tree.order]
    positions = np.flatnonzero(unknown)
    large = max(len(positions) / 256, _MIN_PER_SUBTREE / (2 * share))
    stratum = strata(tree.parent, tree.leaf_parent, unknown, large)[positions]
    positions = positions[np.argsort(stratum, kind="stable")]
    size = np.bincount(stratum)
    start_size, start_place = np.random.default_rng(seed).random(2)
    # Rounding the running total keeps the sum at the share of the whole.
    wanted = np.diff(np.floor(share * np.cumsum(size) + start_size), prepend=0.0)
    needed = np.where(size >= min(large, len(positions)), _MIN_PER_SUBTREE, 0)
    taken = np.minimum(np.maximum(wanted, needed), size).astype(np.int64)
    most_repeated = MOST_REPEATED * tree.num_unique_tokens
    for in_a_row in _IN_A_ROW:
        rows = -(-taken // in_a_row)
        if in_a_row > 1 and rows.sum() < _FEWEST_ROWS:
            break
        chosen = np.sort(positions[_spaced(size, taken, in_a_row, start_place)])
        if _repeated_tokens(tree, chosen) <= most_repeated:
            return tree.order[chosen]
    total = int(taken.sum())
    for in_a_row in _IN_A_ROW:
        chosen = _cheapest(tree, unknown, -(-total // in_a_row), in_a_row)
        is_small = len(chosen) <= _MOST_LARGER * total
        if is_small and _repeated_tokens(tree, chosen) <= most_repeated:
            return tree.order[chosen]
    # The shortest beginning of the depth-first order that is as large and so cheap.
    first = int(np.searchsorted(np.cumsum(unknown), total)) + 1
    ends = np.arange(first, tree.num_requests // 4 + 1)
    # What all prompts begin with stays in the cache.
    whole = tree.leaf_end - tree.leaf_begin == tree.num_requests
    common = int(tree.depth[whole].max(initial=0))
    # A leaf and the one before it share the tokens that would be computed twice.
    cheap = ends[tree.lcp[ends] - common <= most_repeated]
    end = int(cheap[0]) if total and len(cheap) else 0
    return tree.order[:end][unknown[:end]]


def _cheapest(tree: PrefixTree, unknown: Bools, num_rows: int, in_a_row: int) -> Int64s:
    """A row of neighbours in each equal stretch of the depth-first order, where it shares
    least with those around it: the leaves of unknown length, int64 in rising order.

    Args:
        num_rows: rows, three or more are chosen.
        in_a_row: leaves of a row, which has half to twice as many.
    """
    chosen = np.zeros(tree.num_requests, np.bool_)
    shared = np.append(tree.lcp, 0).astype(np.int64)
    shortest = -(-in_a_row // 2)
    num_rows = max(num_rows, _FEWEST_ROWS)
    edges = np.arange(num_rows + 1) * tree.num_requests // num_rows
    for first, end in pairwise(edges.tolist()):
        begins = np.arange(first, end - shortest + 1)
        if not len(begins):
            continue
        ends = begins[:, None] + np.arange(shortest, 2 * in_a_row + 1)
        price = shared[begins][:, None] + shared[np.minimum(ends, end)]
        best, length = np.unravel_index(int(np.argmin(price)), price.shape)
        begin = int(begins[best])
        chosen[begin : min(begin + shortest + int(length), end)] = True
    return np.flatnonzero(chosen & unknown)


def _spaced(size: Int64s, taken: Int64s, in_a_row: int, start: float) -> Int64s:
    """Places of the ``taken`` requests of each stratum, all strata one after the other.

    Args:
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
    """Tokens of the prefixes that some leaves share with others, each once. A beginning of all
    prompts stays in the cache."""
    chosen = np.zeros(tree.num_requests)
    chosen[leaves] = 1.0
    number = tree.subtree_sums(chosen)
    below = tree.leaf_end - tree.leaf_begin
    shared = (number > 0) & (number < below) & (below < tree.num_requests)
    return int(tree.own_len[shared].sum(dtype=np.int64))
