"""Which request joins next, so that requests with KV of similar length run together.

A state machine without an engine: the simulator, the scheduler and the dense engine tell it
who waits, joins and leaves (``batch_state``), and ask it for the next request. Ticks are
decode steps, so all ranks of an engine answer alike.

Two rules:

``TREE`` is AlignedServe's Algorithm 2 (section 3.4). Requests of the running batch's
lengths, which grow with it, join first: the *candidate requests*. When there are none, those
of the *candidate batch* do, which was formed by Algorithm 1, and the *switch* begins: rows
of two batches run. If KV is short meanwhile, the longest row of the old batch leaves.

Algorithm 1 searches from the root of the quad-tree. A node whose requests fit is the batch. If
they do not fit, the search continues in the child with most requests: that is the densest
range. If they fit but are too few, nearest requests of the nodes beside it are added,
first those to the left, then those to the right.

``GROUPS`` is ours. All lengths, of those that wait and those that run, are divided into the
groups that cost least (``length_groups``). The requests of the first group join, shortest
first. Rows that have outgrown it are parked when they cause much padding. If rows are not
padded, or cannot be parked, the shortest request joins.

With either rule, requests that wait too long join before all others (section 3.5).
"""

from __future__ import annotations

from typing import NamedTuple

from ..compiled import jit_in_place
from ..requests import Int32s
from .batch_state import (
    CHECK_TICKS,
    GROUPS,
    TREE,
    LengthBatches,
    RunningRows,
    is_of_old_batch,
)
from .length_groups import BatchLaw, first_group, length_now, step_s, usual_rows
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
    longest_up_to,
    longest_waiting,
    shortest_from,
    take_out_first,
)


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
    """The shortest length of a node."""
    begin = (4**level - 1) // 3
    return int((node - begin) * 4 ** (8 - level) + 1)


@jit_in_place
def density_first_search(
    tree: LengthTree, max_tokens: int, min_rows: int
) -> LengthRange:
    """A batch of at most ``max_tokens`` of KV, with ``min_rows`` requests if they fit.

    If nothing fits, it has one request. Algorithm 1 of AlignedServe, section 3.3.
    """
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
    first = first_length((node - 1) // 4, level - 1)
    last = first + 4 * width - 1
    length = longest_up_to(tree, begin - 1)
    while length >= first and rows < min_rows:
        some, more = _first_that_fit(tree, length, min_rows - rows, max_tokens - tokens)
        if some == 0:
            break
        low, at_low = length, some
        rows, tokens = rows + some, tokens + more
        if some < nodes[LEAVES + length - 1, COUNT]:
            break
        length = longest_up_to(tree, length - 1)
    length = shortest_from(tree, begin + width)
    while 0 < length <= last and rows < min_rows:
        some, more = _first_that_fit(tree, length, min_rows - rows, max_tokens - tokens)
        if some == 0:
            break
        high, at_high = length, some
        rows, tokens = rows + some, tokens + more
        if some < nodes[LEAVES + length - 1, COUNT]:
            break
        length = shortest_from(tree, length + 1)
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
    """The request that is to join next, NONE if nobody should.

    If it does not fit, nobody joins before it does: ask again when a row has left.
    """
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
    """Find the requests that are proposed next if no other comes or leaves.

    These are the candidate batch, and from the proposal on those of falling length with
    ``TREE``, of rising length with ``GROUPS``. If nobody is proposed now, they are those of
    the batch that would be formed, or the shortest.

    Args:
        found: int32, filled with them.

    Returns:
        Their number.
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
    """The first request of the candidate batch, which is not empty."""
    state = batches.state[0]
    while not batches.is_next[batches.ring[state.next]]:
        state.next += 1
    return int(batches.ring[state.next])


@jit_in_place
def _by_tree(batches: LengthBatches, law: BatchLaw, now: RunningRows) -> int:
    """Algorithm 2: candidate requests, then the candidate batch.

    The rest of the running batch joins before them. While batches are switched, no other
    one is formed before the rows of the old one have left.
    """
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
    if now.rows > 0 and not _is_small(law, now):
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
def _is_small(law: BatchLaw, now: RunningRows) -> bool:
    """Whether the running batch leaves the device idle, so that another joins it."""
    used = now.total
    if law.padded:
        used = float(now.rows * now.longest)
    return bool(used < _SMALL * law.capacity)


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
    """Find the first group of lengths."""
    state = batches.state[0]
    state.checked = state.clock
    state.high = first_group(
        batches.groups, batches.tree, law, state.first_row, batches.key, state.clock
    )


@jit_in_place
def wants_switch(batches: LengthBatches, law: BatchLaw, now: RunningRows) -> bool:
    """Whether rows should be parked now: those that :func:`is_parked` names.

    With ``GROUPS`` those that are longer than the first group, because a step is used much
    better without them. With ``TREE`` those of the old batch, because there were too many mixed
    steps, or all of them for a larger candidate batch. Ask once in a step, before
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

    Rows that are long but alike use it as well as short ones: they have to run some day.
    """
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
