"""Requests that wait or run, and the batches of similar KV length that they are in.

Counted here is who waits, joins, leaves and comes back, in decode steps. Which request is
next, and when batches are switched, is for ``batch_switch``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit_in_place
from ..requests import Int32s, Int64s
from .length_groups import LengthGroups, make_groups
from .length_tree import COUNT, NEVER, NONE, LengthTree, insert, make_tree, take_out

# Rules by which requests join, see ``batch_switch``.
TREE, GROUPS = 1, 2
# Ticks after which groups of lengths are looked for again.
CHECK_TICKS = 16

STATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "rule",
            "clock",  # decode steps
            "limit",  # ticks that a request may wait
            "batch",  # number of the running batch
            "since",  # tick at which it began
            "low",  # its range of lengths at that tick
            "high",  # with GROUPS the longest of the first group, at the last look
            "rows_old",  # running rows of earlier batches, and of this one
            "rows_new",
            "next",  # of the ring of candidates: the first, and their number
            "num_next",
            "next_low",  # the range of the candidate batch
            "next_high",
            "next_since",  # since when its first request waits
            "family",  # of the request that joined last
            "family_length",
            "checked",  # tick at which the groups were last looked for
            "num_batches",
            "mixed_ticks",  # ticks with rows of more than one batch
            "first_row",  # of the running ones, linked by the tree's ``before`` and ``after``
            "cuts",  # whether all rows are to be parked before the next batch begins
        )
    ],
    align=True,
)


class LengthBatches(NamedTuple):
    """The requests that wait or run, and the batches that they are in.

    tree: waiting requests but those of the candidate batch.
    key: int32 ``[n]``, the length with which a request was added.
    family: int32 ``[n]``, requests of one family share a prefix and have one length in
        the tree. They join one after the other. NONE for those without.
    batch_of: int64 ``[n]``, number of the batch in which a request runs.
    is_next: uint8 ``[n]``, whether a request is in the candidate batch.
    ring: int32 ``[n]``, the candidate batch. Requests that left it are still in it.
    groups: scratch of ``first_group``.
    state: ``STATE [1]``.
    """

    tree: LengthTree
    key: Int32s
    family: Int32s
    batch_of: Int64s
    is_next: NDArray[np.uint8]
    ring: Int32s
    groups: LengthGroups
    state: NDArray[Any]


class RunningRows(NamedTuple):
    """The rows that decode, and those whose prompt is computed.

    rows: their number.
    total: tokens of KV that they read.
    longest: tokens that the longest of them reads.
    """

    rows: int
    total: float
    longest: int


def make_batches(
    num_requests: int, rule: int, limit: int | None = None
) -> LengthBatches:
    """No requests yet, numbered from 0 when they come.

    Args:
        rule: TREE or GROUPS.
        limit: ticks after which a waiting request joins before all others. None: never.
    """
    state = np.zeros(1, STATE)
    state["rule"] = rule
    state["limit"] = NEVER // 2 if limit is None else min(limit, NEVER // 2)
    state["family"] = NONE
    state["first_row"] = NONE
    state["checked"] = -CHECK_TICKS
    return LengthBatches(
        tree=make_tree(num_requests),
        key=np.zeros(num_requests, np.int32),
        family=np.full(num_requests, NONE, np.int32),
        batch_of=np.zeros(num_requests, np.int64),
        is_next=np.zeros(num_requests, np.uint8),
        ring=np.zeros(max(1, num_requests), np.int32),
        groups=make_groups(),
        state=state,
    )


@jit_in_place
def add(batches: LengthBatches, i: int, length: int, tokens: int, family: int) -> None:
    """A request waits from now on.

    Args:
        length: of its KV when it joins, or that of its family.
        tokens: of KV that it takes.
        family: NONE for a request without.
    """
    batches.key[i] = length
    batches.family[i] = family
    insert(batches.tree, i, length, tokens, batches.state[0].clock)


@jit_in_place
def add_to_next(
    batches: LengthBatches, i: int, length: int, tokens: int, family: int
) -> None:
    """A request that left the candidate batch for a moment waits in it again."""
    state = batches.state[0]
    batches.key[i] = length
    batches.family[i] = family
    batches.tree.length[i] = length
    batches.tree.tokens[i] = tokens
    batches.tree.since[i] = state.clock
    batches.is_next[i] = 1
    state.num_next += 1
    state.next_since = min(state.next_since, state.clock)
    for at in range(state.next, len(batches.ring)):
        if batches.ring[at] == i:
            return
    if state.next > 0:
        state.next -= 1
        batches.ring[state.next] = i
        return
    at = 0
    while batches.is_next[batches.ring[at]]:
        at += 1
    batches.ring[at] = i


@jit_in_place
def remove(batches: LengthBatches, i: int) -> None:
    """A waiting request leaves for good."""
    state = batches.state[0]
    since = batches.tree.since[i]
    was_first = batches.is_next[i] and since == state.next_since
    _take(batches, i)
    if was_first:
        # The candidate batch waits since its next oldest request does.
        state.next_since = NEVER
        seen, at = 0, state.next
        while seen < state.num_next and state.next_since > since:
            other = batches.ring[at]
            if batches.is_next[other]:
                seen += 1
                state.next_since = min(state.next_since, batches.tree.since[other])
            at += 1


@jit_in_place
def _take(batches: LengthBatches, i: int) -> None:
    """A request waits no longer."""
    if batches.is_next[i]:
        batches.is_next[i] = 0
        batches.state[0].num_next -= 1
        batches.tree.length[i] = 0
    elif batches.tree.length[i] > 0:
        take_out(batches.tree, i)


@jit_in_place
def join(batches: LengthBatches, i: int) -> None:
    """The request that :func:`propose` named joins the running rows."""
    state = batches.state[0]
    state.family = batches.family[i]
    state.family_length = batches.key[i]
    if batches.is_next[i] and state.batch != state.num_batches:  # a switch begins
        state.batch = state.num_batches
        state.since = state.clock
        state.low, state.high = state.next_low, state.next_high
        state.rows_old += state.rows_new
        state.rows_new = 0
    _take(batches, i)
    _begin_row(batches, i)
    batches.batch_of[i] = state.batch
    state.rows_new += 1


@jit_in_place
def _begin_row(batches: LengthBatches, i: int) -> None:
    state, tree = batches.state[0], batches.tree
    tree.since[i] = state.clock
    tree.before[i] = NONE
    tree.after[i] = state.first_row
    if state.first_row != NONE:
        tree.before[state.first_row] = i
    state.first_row = i


@jit_in_place
def _end_row(batches: LengthBatches, i: int) -> None:
    state, tree = batches.state[0], batches.tree
    before, after = tree.before[i], tree.after[i]
    if before == NONE:
        state.first_row = after
    else:
        tree.after[before] = after
    if after != NONE:
        tree.before[after] = before
    batches.key[i] += state.clock - tree.since[i]


@jit_in_place
def come_back(batches: LengthBatches, i: int) -> None:
    """A request that left while it ran, and was not added again, continues."""
    state = batches.state[0]
    _begin_row(batches, i)
    batches.batch_of[i] = state.batch
    state.rows_new += 1


@jit_in_place
def leave(batches: LengthBatches, i: int) -> None:
    """A row has ended, or gives its KV up for a while and is added again."""
    state = batches.state[0]
    _end_row(batches, i)
    if batches.batch_of[i] == state.batch:
        state.rows_new -= 1
    else:
        state.rows_old -= 1


@jit_in_place
def tick(batches: LengthBatches) -> None:
    """A decode step was taken."""
    state = batches.state[0]
    state.clock += 1
    if state.rows_old > 0 and state.rows_new > 0:
        state.mixed_ticks += 1


@jit_in_place
def is_of_old_batch(batches: LengthBatches, i: int) -> bool:
    """Whether a row is one of those that leave first: the batch is being switched."""
    state = batches.state[0]
    return bool(state.rows_old > 0 and batches.batch_of[i] != state.batch)


@jit_in_place
def num_waiting(batches: LengthBatches) -> int:
    """Requests that wait."""
    return int(batches.tree.nodes[0, COUNT] + batches.state[0].num_next)
