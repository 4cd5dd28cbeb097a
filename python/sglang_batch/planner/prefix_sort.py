"""Prompts sorted by token id, with the tokens that neighbours share.

Reading tokens from all over the memory is what takes the time, not comparing them. So
prompts are sorted in ever smaller groups that agree so far, what a whole group shares is
passed over in one go, and the keys of a group are read before anything else: these
reads do not wait for each other.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .jit import jit, jit_without_gil
from .requests import Int32s, Int64s

UInt64s = NDArray[np.uint64]


class Sorting(NamedTuple):
    """The result and what it takes to get there, all by place in the order.

    order: int64 ``[n]``. lcp: int32 ``[n]``. keys: uint64 ``[n]``, the next tokens of
    the prompt at each place. spare_order, spare_keys: as large, for moving things.
    """

    order: Int64s
    lcp: Int32s
    keys: UInt64s
    spare_order: Int64s
    spare_keys: UInt64s


# From so many prompts on, threads pay.
_MANY = 200_000
_NUM_THREADS = 8
_MOST_ROUNDS = 8
_INSERTION_MAX = 64
_DIGIT_BITS = 8
_TOKEN_BITS = np.uint64(32)
_KEY_BITS = np.uint64(64)


def sort_prompts(tokens: Int32s, offsets: Int64s) -> tuple[Int64s, Int32s]:
    """The depth-first order and each prompt's tokens in common with the one before.

    Sorts groups of prompts that agree in their first ``depth`` tokens by the next two
    tokens; those that agree in these too are a new group. Of many prompts, the groups
    are shared out to threads: each waits for memory most of the time.
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
        # The first rounds part the prompts, until there is work for every thread.
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
    """Sort disjoint groups, rows of begin, end and depth; the ranges are changed.

    Args:
        once: whether to stop after these groups and return those they fall into.
    """
    order, lcp, keys = sorting.order, sorting.lcp, sorting.keys
    # Groups that wait are disjoint and of two or more.
    most = len(groups)
    for g in range(len(groups)):
        most += (groups[g, 1] - groups[g, 0]) // 2 + 1
    waiting = np.empty((most, 3), np.int64)
    waiting[: len(groups)] = groups
    num_waiting = len(groups)
    num_found = 0
    found = np.empty((most if once else 0, 3), np.int64)
    while num_waiting:
        num_waiting -= 1
        begin, end, depth = waiting[num_waiting]
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
            if np.uint32(key) == 0:  # these prompts end here: they are equal
                lcp[run + 1 : j] = depth + (key != 0)
            elif j - run > 1:
                if once:
                    found[num_found] = run, j, depth + 2
                    num_found += 1
                else:
                    waiting[num_waiting] = run, j, depth + 2
                    num_waiting += 1
            run = j
    return found[:num_found].copy()


@jit
def _fill_keys(
    tokens: Int32s, offsets: Int64s, group: Int64s, depth: int, keys: UInt64s
) -> np.uint64:
    """Key of each prompt's tokens after the first ``depth``; bits in which keys differ."""
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
    """Two tokens as one number that sorts as they do; a prompt's end sorts first."""
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
    """Stable sort of ``keys`` and with them ``order``; keys differ in bits ``varying``.

    Insertion for few, else by digits from the lowest on, constant bits left out.
    """
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
        place[:] = 0
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
        spare_keys[:] = keys
        spare_order[:] = order
