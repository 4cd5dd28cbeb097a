"""Prompts sorted by token id, with the number of tokens that neighbours share.

Most of the time is spent on random reads of tokens from memory, not on comparing them.
Prompts are therefore sorted in ever smaller groups with equal beginnings, the tokens
that a whole group shares are skipped at once, and all keys of a group are read first, so
that these reads do not wait for each other.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit, jit_without_gil
from ..requests import Int32s, Int64s

UInt64s = NDArray[np.uint64]


class Sorting(NamedTuple):
    """The result and the working memory, all by position in the order.

    order: int64 ``[n]``, the prompt at each position.
    lcp: int32 ``[n]``, tokens in common with the prompt before it.
    keys: uint64 ``[n]``, the next two tokens of the prompt at each position.
    spare_order, spare_keys: int64 and uint64 ``[n]``, buffers for sorting.
    """

    order: Int64s
    lcp: Int32s
    keys: UInt64s
    spare_order: Int64s
    spare_keys: UInt64s


# Number of prompts from which threads are faster.
_MANY = 200_000
_NUM_THREADS = 8
_MOST_ROUNDS = 8
_INSERTION_MAX = 64
_DIGIT_BITS = 8
_TOKEN_BITS = np.uint64(32)
_KEY_BITS = np.uint64(64)


def sort_prompts(tokens: Int32s, offsets: Int64s) -> tuple[Int64s, Int32s]:
    """The depth-first order, int64 ``[n]``, and its ``lcp``, int32 ``[n]``.

    Groups of prompts with the same first ``depth`` tokens are sorted by the next two tokens, and
    equal keys are a new group. Groups of large jobs are divided among threads.
    """
    n = len(offsets) - 1
    sorting = Sorting(
        order=np.arange(n),
        lcp=np.zeros(n, np.int32),
        keys=np.empty(n, np.uint64),
        spare_order=np.empty(n, np.int64),
        spare_keys=np.empty(n, np.uint64),
    )
    groups = np.array([[0, n, 0]], np.int64)[: n > 1]
    if n >= _MANY:
        # The first rounds split the prompts until there is work for every thread.
        size = np.array([n])
        for _ in range(_MOST_ROUNDS):
            if len(size) == 0 or size.max() * _NUM_THREADS <= size.sum():
                break
            groups = _sort_groups(tokens, offsets, sorting, groups, True)
            size = groups[:, 1] - groups[:, 0]
        size = np.cumsum(size)
        cuts = size[-1:].sum() * np.arange(1, _NUM_THREADS) // _NUM_THREADS
        parts = np.split(groups, np.searchsorted(size, cuts))
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            work = [
                threads.submit(_sort_groups, tokens, offsets, sorting, part, False)
                for part in parts
            ]
            for part in work:
                part.result()
    else:
        _sort_groups(tokens, offsets, sorting, groups, False)
    return sorting.order, sorting.lcp


@jit_without_gil
def _sort_groups(
    tokens: Int32s, offsets: Int64s, sorting: Sorting, groups: Int64s, once: bool
) -> Int64s:
    """Sort disjoint groups, int64 ``[g, 3]`` of begin, end and depth, in place. With ``once``, stop
    and return the groups that these were split into."""
    order, lcp, keys = sorting.order, sorting.lcp, sorting.keys
    # Waiting groups are disjoint and have at least two prompts each.
    most = len(groups)
    for g in range(len(groups)):
        most += (groups[g, 1] - groups[g, 0]) // 2 + 1
    waiting = np.empty((most, 3), np.int64)
    for g in range(len(groups)):
        _put(waiting, g, groups[g, 0], groups[g, 1], groups[g, 2])
    num_waiting = len(groups)
    num_found = 0
    found = np.empty((most if once else 0, 3), np.int64)
    while num_waiting:
        num_waiting -= 1
        row = waiting[num_waiting]
        begin, end, depth = row[0], row[1], row[2]
        group = order[begin:end]
        varying = _fill_keys(tokens, offsets, group, depth, keys[begin:end])
        if varying == 0:
            depth += _common_prefix(tokens, offsets, group, depth)
            varying = _fill_keys(tokens, offsets, group, depth, keys[begin:end])
        _sort_by_key(
            keys[begin:end],
            group,
            sorting.spare_keys[begin:end],
            sorting.spare_order[begin:end],
            varying,
        )
        run = begin
        for j in range(begin + 1, end + 1):
            key = keys[run]
            if j < end and keys[j] == key:
                continue
            if j < end:
                one_more = keys[j] >> _TOKEN_BITS == key >> _TOKEN_BITS
                lcp[j] = depth + one_more
            if np.uint32(key) == 0:  # these prompts end here, so they are equal
                for equal in range(run + 1, j):
                    lcp[equal] = depth + (key != 0)
            elif j - run > 1:
                if once:
                    _put(found, num_found, run, j, depth + 2)
                    num_found += 1
                else:
                    _put(waiting, num_waiting, run, j, depth + 2)
                    num_waiting += 1
            run = j
    return found[:num_found].copy()


@jit
def _put(groups: Int64s, at: int, begin: int, end: int, depth: int) -> None:
    # By element, as elsewhere here: numba takes far longer to compile assignments of slices.
    groups[at, 0], groups[at, 1], groups[at, 2] = begin, end, depth


@jit
def _fill_keys(
    tokens: Int32s, offsets: Int64s, group: Int64s, depth: int, keys: UInt64s
) -> np.uint64:
    """Fill ``keys`` with the tokens after the first ``depth``. Returns the bits in which
    they differ."""
    varying = np.uint64(0)
    for j in range(len(group)):
        i = group[j]
        keys[j] = _key(tokens, offsets[i] + depth, offsets[i + 1])
        varying |= keys[j] ^ keys[0]
    return varying


@jit
def _common_prefix(tokens: Int32s, offsets: Int64s, group: Int64s, depth: int) -> int:
    """Tokens after the first ``depth`` that all prompts of a group share."""
    first = offsets[group[0]] + depth
    common: int = offsets[group[0] + 1] - first
    for i in group[1:]:
        start = offsets[i] + depth
        end = min(common, offsets[i + 1] - start)
        common = 0
        while common < end and tokens[first + common] == tokens[start + common]:
            common += 1
    return common


@jit
def _key(tokens: Int32s, at: int, end: int) -> np.uint64:
    """Two tokens as one number with the same order. A prompt's end sorts first."""
    first = np.uint64(tokens[at]) + np.uint64(1) if at < end else np.uint64(0)
    second = np.uint64(tokens[at + 1]) + np.uint64(1) if at + 1 < end else np.uint64(0)
    return first << _TOKEN_BITS | second


@jit
def _sort_by_key(
    keys: UInt64s,
    order: Int64s,
    spare_keys: UInt64s,
    spare_order: Int64s,
    varying: np.uint64,
) -> None:
    """Sort ``keys`` stably in place, and ``order`` with them: few by insertion, many by digits from
    the lowest, without the bits that all keys have in common, those not in ``varying``."""
    n = len(keys)
    if n <= _INSERTION_MAX:
        for j in range(1, n):
            key, i, k = keys[j], order[j], j
            while k > 0 and keys[k - 1] > key:
                keys[k], order[k] = keys[k - 1], order[k - 1]
                k -= 1
            keys[k], order[k] = key, i
        return
    place = np.empty(1 << _DIGIT_BITS, np.int64)
    mask = np.uint64(len(place) - 1)
    in_spare = False
    shift = np.uint64(0)
    while shift < _KEY_BITS and varying >> shift != 0:
        if varying >> shift & np.uint64(1) == 0:
            shift += np.uint64(1)
            continue
        for digit in range(len(place)):
            place[digit] = 0
        for key in keys:
            place[key >> shift & mask] += 1
        total = 0
        for digit in range(len(place)):
            total, place[digit] = total + place[digit], total
        for j in range(n):
            to = place[keys[j] >> shift & mask]
            place[keys[j] >> shift & mask] = to + 1
            spare_keys[to] = keys[j]
            spare_order[to] = order[j]
        keys, spare_keys = spare_keys, keys
        order, spare_order = spare_order, order
        in_spare = not in_spare
        shift += np.uint64(_DIGIT_BITS)
    if in_spare:
        for j in range(n):
            spare_keys[j], spare_order[j] = keys[j], order[j]
