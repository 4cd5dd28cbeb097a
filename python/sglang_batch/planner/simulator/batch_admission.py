"""Admission in the simulator where the lengths of rows matter.

Requests join in batches of similar KV length, which ``kv_lengths.batch_state`` forms. In
a dense engine, the KV is the rows times the longest of them, whatever the order.
"""

from __future__ import annotations

from ..admission_rules.followers import MOST_FOLLOWERS
from ..admission_rules.kv_forecast import add_row, peak_cells_with
from ..compiled import jit_in_place
from ..kv_lengths.batch_state import (
    TREE,
    RunningRows,
    add,
    come_back,
    is_of_old_batch,
    is_parked,
    join,
    leave,
    propose,
    remove,
    wants_switch,
)
from ..requests import LEFT
from . import prefix_cache as prefix
from .engine_state import (
    COMES_BACK,
    LEAVES,
    NONE,
    WAITS,
    RowHeap,
    RowLengths,
    Sim,
    find_longest,
    note,
)
from .request_stages import (
    admit,
    candidate,
    follows,
    growth,
    park,
    reload,
    rounded_est_decode_steps,
    take,
)
from .step_admission import compute, fits, overtakes


@jit_in_place
def batch_prefill(sim: Sim, heap: RowHeap, lengths: RowLengths) -> tuple[int, float]:
    state = sim.state
    if sim.queue.rule > 0 and wants_switch(
        lengths.batches, lengths.law, _running_rows(sim)
    ):
        _switch(sim, heap, lengths)
    tokens = max(0, sim.engine.step_tokens - state.decoding)
    s = sim.sides[LEFT]
    done, attention = 0, 0.0
    s.blocked = 0
    while done < tokens:
        if s.partial == NONE:
            i = _next(sim, lengths)
            if i == NONE:
                break
            if sim.engine.as_sglang and _waits_for_prefix(sim, lengths, i):
                if s.blocked:
                    break
                continue
            if sim.engine.as_sglang and overtakes(sim, i):
                break
            if not _has_room(sim, lengths, i):
                if _make_way(sim, heap, lengths, i):
                    continue
                s.blocked = 1
                break
            if _join(sim, lengths, i):
                continue
        some, over = compute(sim, LEFT, tokens - done)
        done += some
        attention += over
        if some == 0 or state.cut:
            break
    return done, attention


@jit_in_place
def _running_rows(sim: Sim) -> RunningRows:
    state = sim.state
    total = float(state.read_base + state.decoding * state.step + state.shared_read)
    longest = max(state.longest, state.longest_joining)
    return RunningRows(int(state.running), total, int(longest))


# Who waits


@jit_in_place
def take_notes(sim: Sim, heap: RowHeap, lengths: RowLengths) -> None:
    """Carry out the notes, and find the longest row."""
    for at in range(sim.state.num_notes if sim.queue.rule > 0 else 0):
        i, kind = sim.notes[at] // 4, sim.notes[at] % 4
        if kind == WAITS:
            _add(sim, lengths, i)
        elif kind == LEAVES:
            leave(lengths.batches, i)
        elif kind == COMES_BACK:
            come_back(lengths.batches, i)
    find_longest(sim, heap)


@jit_in_place
def add_all(sim: Sim, lengths: RowLengths) -> None:
    """All requests of the job wait from now on."""
    for at in range(len(sim.places)):
        i = sim.places[at].leaf
        _add(sim, lengths, i)


@jit_in_place
def _add(sim: Sim, lengths: RowLengths, i: int) -> None:
    r = sim.requests[i]
    length = max(r.key, r.input_len + r.generated)
    tokens = length if sim.engine.dense else r.own + r.generated
    add(lengths.batches, i, length, tokens, r.family)


@jit_in_place
def _next(sim: Sim, lengths: RowLengths) -> int:
    if sim.queue.rule == 0 or sim.sides[LEFT].num_retry > 0:
        return candidate(sim, LEFT)
    return propose(lengths.batches, lengths.law, _running_rows(sim))


@jit_in_place
def _waits_for_prefix(sim: Sim, lengths: RowLengths, i: int) -> bool:
    """Whether a request waits until another one has computed its prefix."""
    is_retry = sim.sides[LEFT].num_retry > 0
    if not follows(sim, LEFT, i):
        return False
    if sim.state.held_back > MOST_FOLLOWERS:
        sim.sides[LEFT].blocked = 1
    elif sim.queue.rule > 0 and not is_retry:
        remove(lengths.batches, i)
    return True


# Rows that leave


@jit_in_place
def _switch(sim: Sim, heap: RowHeap, lengths: RowLengths) -> None:
    """Park the rows that leave before the next batch joins."""
    i = sim.state.newest
    while i != NONE:
        older = sim.requests[i].older
        if sim.requests[i].event != NONE and is_parked(lengths.batches, i):
            park(sim, i)
        i = older
    take_notes(sim, heap, lengths)


@jit_in_place
def _make_way(sim: Sim, heap: RowHeap, lengths: RowLengths, i: int) -> bool:
    """Park the longest row of the old batch for a request, if it is longer. Returns whether
    there was one. Not on SGLang, where rows leave between steps only."""
    if sim.queue.rule != TREE or not lengths.law.parks or sim.engine.as_sglang:
        return False
    state = sim.state
    longest, most = NONE, int(sim.requests[i].key)
    row = state.newest
    while row != NONE:
        r = sim.requests[row]
        length = r.input_len + r.generated + state.step - 1 - r.begin
        old = r.event != NONE and is_of_old_batch(lengths.batches, row)
        if old and length > most:
            longest, most = row, length
        row = r.older
    if longest == NONE:
        return False
    park(sim, longest)
    take_notes(sim, heap, lengths)
    return True


# Who joins


@jit_in_place
def _has_room(sim: Sim, lengths: RowLengths, i: int) -> bool:
    if not sim.engine.dense:
        return fits(sim, i, 0)
    state = sim.state
    if state.running >= sim.engine.max_running:
        return False
    if state.running == 0:
        return True
    _sort_rows(sim, lengths)
    r = sim.requests[i]
    known = r.admitted or r.offloaded
    steps = r.est_decode_steps if known else rounded_est_decode_steps(sim, i)
    held, remaining = growth(sim, i, r.generated, steps)
    base = held + r.input_len - r.own - state.clock
    cells = peak_cells_with(lengths.cells, state.clock, base, state.clock + remaining)
    return bool(cells <= sim.engine.kv_capacity * (1.0 - state.margin))


@jit_in_place
def _sort_rows(sim: Sim, lengths: RowLengths) -> None:
    """Bring the forecast of cells up to date, if requests have left or joined."""
    state = sim.state
    seen = state.changes + (state.running << 32)
    if state.cells_seen == seen:
        return
    state.cells_seen = seen
    lengths.cells.number[0] = 0
    i = state.newest
    while i != NONE:
        r = sim.requests[i]
        held = r.base + r.input_len - r.own
        add_row(lengths.cells, held, r.final - r.base)
        i = r.older


@jit_in_place
def _join(sim: Sim, lengths: RowLengths, i: int) -> bool:
    """Let a request join. Returns whether it decodes at once: the host has its KV."""
    r = sim.requests[i]
    sim.sides[LEFT].retry_at = 0
    is_retry = sim.sides[LEFT].num_retry > 0
    if sim.queue.rule == 0 or is_retry:
        take(sim, LEFT, i)
        admit(sim, i, LEFT)
        note(sim, i, COMES_BACK)
        return False
    sim.places[sim.requests[i].position].waits = 0
    join(lengths.batches, i)
    whole = prefix.cached_depth(sim.cache, r.node) >= sim.cache.nodes[r.node].depth
    if r.offloaded and r.generated > 0 and whole:
        reload(sim, i)
        return True
    admit(sim, i, LEFT)
    return False
