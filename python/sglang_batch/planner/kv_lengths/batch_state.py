"""Which request joins next, so that requests with KV of similar length run together.

A state machine without an engine: the simulator, the scheduler and the dense engine tell it
who waits, joins, leaves and comes back, and ask it for the next request. Ticks are decode
steps, so all ranks of an engine answer alike. There are two rules.

``TREE`` is AlignedServe's Algorithm 2 (section 3.4). Requests of the running batch's
lengths, which grow with it, join first: the *candidate requests*. When there are none, those
of the *candidate batch* do, which was formed by Algorithm 1, and the *switch* begins: rows
of two batches run. If KV is short meanwhile, the longest row of the old batch leaves.

Algorithm 1 searches from the root of the quad-tree. A node whose requests fit is the batch. If
they do not fit, the search continues in the child with most requests. If they fit but are too
few, the nearest requests of the neighbouring nodes are added.

``GROUPS`` is ours. All lengths, of those that wait and those that run, are divided into the
groups that cost least (``length_groups``). The requests of the first group join, shortest
first. Rows that have outgrown it are parked when they cause much padding. If rows are not
padded, or cannot be parked, the shortest request joins.

With either rule, requests that wait too long join before all others (section 3.5).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit_in_place
from ..requests import Int32s, Int64s
from .length_groups import (
    BatchLaw,
    LengthGroups,
    first_group,
    length_now,
    make_groups,
    step_s,
    usual_rows,
)
from .length_tree import (
    COUNT,
    LEAVES,
    MAX_LENGTH,
    NEVER,
    NONE,
    OLDEST,
    TOKENS,
    LengthTree,
    count_up_to,
    insert,
    longest_up_to,
    longest_waiting,
    make_tree,
    shortest_from,
    take_out,
    take_out_first,
)

# Rules by which requests join.
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


def doubled(batches: LengthBatches) -> LengthBatches:
    """The same batches with room for twice as many requests."""
    size = len(batches.key)
    new = make_batches(2 * size, 0)
    for name in ("key", "family", "batch_of", "is_next", "ring"):
        getattr(new, name)[:size] = getattr(batches, name)
    for name in ("before", "after", "length", "tokens", "since"):
        getattr(new.tree, name)[:size] = getattr(batches.tree, name)
    for name in ("nodes", "first", "last"):
        np.copyto(getattr(new.tree, name), getattr(batches.tree, name))
    np.copyto(new.state, batches.state)
    return new


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
    return int(batches.tree.nodes[0, COUNT] + batches.state[0].num_next)


# Who is next


class LengthRange(NamedTuple):
    """Requests of a range of lengths.

    shortest, longest: both ends of the range, 0 if it is empty.
    at_shortest, at_longest: requests of these two lengths that belong to it, the first
        ones. Of lengths in between all do.
    rows: their number, and ``tokens`` of KV in all.
    """

    shortest: int
    longest: int
    at_shortest: int
    at_longest: int
    rows: int
    tokens: int


@jit_in_place
def _first_that_fit(
    tree: LengthTree, length: int, most_rows: int, most_tokens: int
) -> tuple[int, int]:
    """How many of the first requests of a length fit, and their tokens."""
    rows, tokens = 0, 0
    i = tree.first[length - 1]
    while i != NONE and rows < most_rows:
        if tokens + tree.tokens[i] > most_tokens:
            break
        tokens += tree.tokens[i]
        rows += 1
        i = tree.after[i]
    return rows, tokens


@jit_in_place
def densest_node(tree: LengthTree, max_tokens: int) -> tuple[int, int]:
    """The node at which the way down ends, and its level.

    It fits, or it is a leaf.
    """
    nodes = tree.nodes
    node, level = 0, 0
    while nodes[node, TOKENS] > max_tokens and node < LEAVES:
        best = 4 * node + 1
        for child in range(4 * node + 2, 4 * node + 5):
            if nodes[child, COUNT] > nodes[best, COUNT]:
                best = child
        node, level = best, level + 1
    return node, level


@jit_in_place
def first_length(node: int, level: int) -> int:
    begin = (4**level - 1) // 3
    return int((node - begin) * 4 ** (8 - level) + 1)


@jit_in_place
def density_first_search(
    tree: LengthTree, max_tokens: int, min_rows: int
) -> LengthRange:
    """A batch of at most ``max_tokens`` of KV, with ``min_rows`` requests if they fit. If
    nothing fits, it has one request. Algorithm 1 of AlignedServe, section 3.3."""
    nodes = tree.nodes
    if nodes[0, COUNT] == 0:
        return LengthRange(0, 0, 0, 0, 0, 0)
    node, level = densest_node(tree, max_tokens)
    begin = first_length(node, level)
    width = 4 ** (8 - level)
    low = shortest_from(tree, begin)
    if nodes[node, TOKENS] > max_tokens:  # a leaf, of which some fit
        rows, tokens = _first_that_fit(tree, low, nodes[node, COUNT], max_tokens)
        if rows == 0:
            rows, tokens = 1, tree.tokens[tree.first[low - 1]]
        return LengthRange(low, low, rows, rows, rows, tokens)
    high = longest_up_to(tree, begin + width - 1)
    at_low = nodes[LEAVES + low - 1, COUNT]
    at_high = nodes[LEAVES + high - 1, COUNT]
    rows, tokens = nodes[node, COUNT], nodes[node, TOKENS]
    if rows >= min_rows or level == 0:
        return LengthRange(low, high, at_low, at_high, rows, tokens)
    # Requests of neighbouring nodes with the same parent: first shorter ones, then longer ones.
    first = first_length((node - 1) // 4, level - 1)
    last = first + 4 * width - 1
    for longer in (False, True):
        length = begin + width if longer else begin - 1
        while rows < min_rows:
            if longer:
                length = shortest_from(tree, length)
            else:
                length = longest_up_to(tree, length)
            if not first <= length <= last:
                break
            most = max_tokens - tokens
            some, more = _first_that_fit(tree, length, min_rows - rows, most)
            if some == 0:
                break
            if longer:
                high, at_high = length, some
            else:
                low, at_low = length, some
            rows, tokens = rows + some, tokens + more
            if some < nodes[LEAVES + length - 1, COUNT]:
                break
            length += 1 if longer else -1
    return LengthRange(low, high, at_low, at_high, rows, tokens)


# AlignedServe, section 4.1: share of the KV that a candidate batch may take, and its rows.
BATCH_SHARE = 0.4
MIN_ROWS = 36
# A batch with less than this share of the KV leaves the device idle.
_SMALL = 0.25
# Share of the steps in which rows of two batches may run: the paper's, section 4.4, is 8.61 %
# (ShareGPT) and 12.37 % (LongBench) at most.
MAX_MIXED = 0.08
# How much better the first group must use a step than the running batch does, or how many
# times its rows a candidate batch must have, as rows that are parked move to the host and
# back.
_GROUP_GAIN = 1.2
_GAIN = 1.5


@jit_in_place
def propose(batches: LengthBatches, law: BatchLaw, now: RunningRows) -> int:
    """The request that is to join next, NONE if nobody should. If it does not fit, nobody
    joins before it does: ask again when a row has left."""
    state = batches.state[0]
    tree = batches.tree
    due = state.clock - state.limit
    oldest = tree.nodes[0, OLDEST]
    if state.num_next > 0 and state.next_since < due and state.next_since <= oldest:
        return _first_next(batches)
    if oldest < due:
        return longest_waiting(tree)
    if state.rule == TREE:
        return _by_tree(batches, law, now)
    return _by_groups(batches, law, now)


@jit_in_place
def upcoming(
    batches: LengthBatches, law: BatchLaw, now: RunningRows, found: Int32s
) -> int:
    """Fill ``found`` (int32) with the requests that are proposed next if no other comes or
    leaves, and return their number.

    These are the candidate batch, and from the proposal on those of falling length with
    ``TREE``, of rising length with ``GROUPS``. If nobody is proposed now, they are those of
    the batch that would be formed, or the shortest.
    """
    state = batches.state[0]
    tree = batches.tree
    number = 0
    at, left = state.next, state.num_next
    while left > 0 and number < len(found):
        i = batches.ring[at]
        at += 1
        if batches.is_next[i]:
            found[number] = i
            number += 1
            left -= 1
    first = propose(batches, law, now)
    length, last = 0, MAX_LENGTH
    falls = state.rule == TREE
    if first != NONE and not batches.is_next[first]:
        length = min(int(tree.length[first]), MAX_LENGTH)
    elif first == NONE and state.rule == GROUPS:
        length = shortest_from(tree, 1)
    elif first == NONE and state.num_next == 0:
        chosen = density_first_search(tree, _budget(law), MIN_ROWS)
        length, last, falls = chosen.shortest, chosen.longest, False
    while 0 < length <= last and number < len(found):
        i = tree.first[length - 1]
        while i != NONE and number < len(found):
            found[number] = i
            number += 1
            i = tree.after[i]
        if falls:
            length = longest_up_to(tree, length - 1)
        else:
            length = shortest_from(tree, length + 1)
    return number


@jit_in_place
def _first_next(batches: LengthBatches) -> int:
    """Of the candidate batch, which is not empty."""
    state = batches.state[0]
    while not batches.is_next[batches.ring[state.next]]:
        state.next += 1
    return int(batches.ring[state.next])


@jit_in_place
def _by_tree(batches: LengthBatches, law: BatchLaw, now: RunningRows) -> int:
    """Algorithm 2: candidate requests, then the candidate batch. The rest of the running
    batch joins before them. While batches are switched, no other one is formed before the
    rows of the old one have left."""
    state = batches.state[0]
    tree = batches.tree
    switching = state.rows_old > 0
    if state.num_next > 0 and state.batch == state.num_batches:
        return _first_next(batches)  # the rest of the running batch
    if state.rows_new > 0:
        grown = state.clock - state.since
        length = longest_up_to(tree, state.high + grown)
        if length > 0 and length >= min(state.low + grown, MAX_LENGTH):
            return int(tree.first[length - 1])
    if switching and state.rows_new > 0:
        return NONE
    used = float(now.rows * now.longest) if law.padded else now.total
    if now.rows > 0 and used >= _SMALL * law.capacity:
        return NONE
    may_mix = now.rows == 0 or not law.parks or not _mixed_share_reached(batches)
    if state.num_next == 0:
        chosen = density_first_search(tree, _budget(law), MIN_ROWS)
        if may_mix or chosen.rows > _GAIN * now.rows:
            _form(batches, chosen)
    if state.num_next == 0:
        return NONE
    if may_mix:
        return _first_next(batches)
    # The rows are parked for a batch that has been formed without them: they would
    # come back at once if they were in the tree.
    state.cuts = int(state.num_next > _GAIN * now.rows)
    return NONE


@jit_in_place
def _mixed_share_reached(batches: LengthBatches) -> bool:
    state = batches.state[0]
    return bool(state.mixed_ticks >= MAX_MIXED * state.clock)


@jit_in_place
def _budget(law: BatchLaw) -> int:
    return int(BATCH_SHARE * law.capacity)


@jit_in_place
def _form(batches: LengthBatches, chosen: LengthRange) -> None:
    """Make a range of waiting requests the candidate batch, shortest first."""
    state = batches.state[0]
    tree = batches.tree
    if chosen.rows == 0:
        return
    state.next = state.num_next = 0
    state.next_low, state.next_high = chosen.shortest, chosen.longest
    state.next_since = NEVER
    state.num_batches += 1
    length = chosen.shortest
    while 0 < length <= chosen.longest:
        left = int(tree.nodes[0, COUNT])  # more than there are of this length
        if length == chosen.shortest:
            left = chosen.at_shortest
        elif length == chosen.longest:
            left = chosen.at_longest
        begin = state.num_next
        i = tree.first[length - 1]
        while i != NONE and left > 0:
            batches.is_next[i] = 1
            batches.ring[state.num_next] = i
            state.num_next += 1
            state.next_since = min(state.next_since, tree.since[i])
            i = tree.after[i]
            left -= 1
        take_out_first(tree, length, state.num_next - begin)
        length = shortest_from(tree, length + 1)


@jit_in_place
def _by_groups(batches: LengthBatches, law: BatchLaw, now: RunningRows) -> int:
    state = batches.state[0]
    tree = batches.tree
    if state.family != NONE and state.family_length > 0 and now.rows > 0:
        # Siblings continue while their prefix is there.
        i = tree.first[min(state.family_length, MAX_LENGTH) - 1]
        if i != NONE and batches.family[i] == state.family:
            return int(i)
    length = shortest_from(tree, 1)
    if length == 0:
        return NONE
    if law.padded and law.parks:
        if now.rows == 0 or (length > state.high and state.checked != state.clock):
            _look(batches, law)
        if now.rows > 0 and length > state.high:
            return NONE
    return int(tree.first[length - 1])


@jit_in_place
def _look(batches: LengthBatches, law: BatchLaw) -> None:
    state = batches.state[0]
    state.checked = state.clock
    state.high = first_group(
        batches.groups, batches.tree, law, state.first_row, batches.key, state.clock
    )


@jit_in_place
def wants_switch(batches: LengthBatches, law: BatchLaw, now: RunningRows) -> bool:
    """Whether rows should be parked now: those that :func:`is_parked` names.

    With ``GROUPS`` those that are longer than the first group, because a step is used much
    better without them. With ``TREE`` those of the old batch, because there were too many
    mixed steps, or all of them for a larger candidate batch. Ask once in a step, before
    :func:`propose`. After it the caller parks rows: ``leave`` and ``add`` for each.
    """
    state = batches.state[0]
    if not law.parks or now.rows == 0:
        state.cuts = 0
        return False
    if state.rule == TREE:
        if state.cuts:
            state.cuts = 0
            return bool(batches.tree.nodes[0, COUNT] + state.num_next > 0)
        mixed = state.rows_old > 0 and state.rows_new > 0
        return bool(mixed and _mixed_share_reached(batches))
    if not law.padded or batches.tree.nodes[0, COUNT] == 0:
        return False
    if state.clock % CHECK_TICKS:
        return False
    _look(batches, law)
    if now.longest <= state.high:
        return False
    rows = count_up_to(batches.tree, state.high)
    row = state.first_row
    while row != NONE:
        rows += length_now(batches.tree, batches.key, row, state.clock) <= state.high
        row = batches.tree.after[row]
    longest = float(state.high)
    kept = min(float(rows), usual_rows(law, longest))
    without = _use(law, kept, kept * longest, longest)
    return bool(
        without
        > _GROUP_GAIN * _use(law, float(now.rows), now.total, float(now.longest))
    )


@jit_in_place
def _use(law: BatchLaw, rows: float, total: float, longest: float) -> float:
    """Share of a step that would be left without padding, in a batch as large as usual.
    Rows that are long but alike use it as well as short ones: they have to run some day."""
    mean = max(total, 1.0) / rows
    least = rows * (law.weight_s / usual_rows(law, mean) + mean * law.read_s)
    return least / step_s(law, rows, total, longest)


@jit_in_place
def is_parked(batches: LengthBatches, i: int) -> bool:
    """Whether a row is one of those that leave in a switch."""
    state = batches.state[0]
    if state.rule == GROUPS:
        return bool(length_now(batches.tree, batches.key, i, state.clock) > state.high)
    mixed = state.rule == TREE and state.rows_old > 0 and state.rows_new > 0
    return bool(not mixed or is_of_old_batch(batches, i))
