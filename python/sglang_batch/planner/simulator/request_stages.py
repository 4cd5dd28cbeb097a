"""Stages of a request in the simulated engine: admitted, decoding, retracted, ended."""

from __future__ import annotations

from ..compiled import jit_in_place
from . import prefix_cache as prefix
from .engine_state import NONE, Sim, in_pages
from .event_calendar import (
    join_forecast,
    join_running,
    leave_forecast,
    leave_running,
    rounded_est_decode_steps,
    schedule_next,
    unschedule,
)
from .prefix_cache import GARBAGE, IDLE, LOCKED, STATES
from .request_queue import join_first, lead, put_back, show
from .row_notes import DECODES, LEAVES, note


@jit_in_place
def kv_in_use(sim: Sim) -> int:
    """KV tokens that running requests hold.

    SGLang allocates the tokens that a step computes, the textbook engine whole prompts.
    """
    used = sim.state[0].private + sim.cache.totals[LOCKED]
    if sim.engine.as_sglang:
        for side in range(2):
            s = sim.sides[side]
            if s.partial_left > 0:
                r = sim.requests[s.partial]
                tokens = r.input_len + r.generated
                used -= in_pages(sim, tokens) - in_pages(sim, tokens - s.partial_left)
    return int(used)


@jit_in_place
def decode_kv(sim: Sim) -> int:
    """Tokens in the pages that the decodes of this step begin."""
    page_size = sim.engine.page_size
    phase = sim.state[0].step % page_size
    return int((sim.growing[0, phase] + sim.growing[1, phase]) * page_size)


@jit_in_place
def _count_growing(sim: Sim, i: int, number: int) -> None:
    r = sim.requests[i]
    phase = (r.begin + 1 - r.own - r.generated) % sim.engine.page_size
    sim.growing[r.side, phase] += number


@jit_in_place
def grow(sim: Sim) -> None:
    """Add a token of KV to each decoding request."""
    page_size = sim.engine.page_size
    phase = sim.state[0].step % page_size
    for side in range(2):
        tokens = sim.growing[side, phase] * page_size
        sim.state[0].private += tokens
        sim.sides[side].kv += tokens


@jit_in_place
def over_capacity(sim: Sim) -> bool:
    """Whether the next decodes exceed the KV."""
    if sim.engine.dense:
        cells = sim.state[0].decoding * (sim.state[0].longest + 1)
        return bool(sim.state[0].decoding > 1 and cells > sim.engine.kv_capacity)
    return kv_in_use(sim) + decode_kv(sim) > sim.engine.kv_capacity


@jit_in_place
def make_room(sim: Sim) -> None:
    """Evict until all tokens fit. Tokens of running requests always do."""
    totals = sim.cache.totals
    used = kv_in_use(sim) + totals[IDLE] + totals[GARBAGE]
    if used > sim.engine.kv_capacity:
        over = used - sim.engine.kv_capacity
        prefix.evict(sim.cache, over, sim.queue.rank, sim.requests)


@jit_in_place
def make_room_for_states(sim: Sim) -> None:
    """Drop states that no running request uses until those of all requests fit."""
    if sim.cache.keeps_states:
        over = sim.state[0].pool_held + sim.cache.totals[STATES]
        over -= sim.engine.second.capacity
        if over > 0:
            prefix.evict_states(sim.cache, over, sim.queue.rank, sim.requests)


# --- Stages


@jit_in_place
def _hold(sim: Sim, i: int, side: int, sign: int) -> None:
    """Count the pages of a request that begins (1) or ends (-1) to hold KV."""
    r = sim.requests[i]
    tokens = sign * in_pages(sim, r.own + r.generated)
    sim.state[0].private += tokens
    sim.sides[side].kv += tokens


@jit_in_place
def admit(sim: Sim, i: int, side: int) -> None:
    """Allocate KV for a request, whose prompt is computed next."""
    state = sim.state[0]
    r = sim.requests[i]
    cached = prefix.usable_depth(sim.cache, r.node)
    first = r.admitted == 0 and r.offloaded == 0
    prefix.lock(sim.cache, r.node, r.admitted == 0)
    _hold(sim, i, side, 1)
    if not sim.engine.as_sglang:
        make_room(sim)
    else:
        lead(sim.cache, i, r.node, cached)
    # Its media are encoded in this step, though its prompt may be cut.
    state.media += r.media - prefix.media_in(sim.cache, r.node, cached)
    extend = r.input_len + r.generated - cached
    known = extend == 0
    if known:  # the last prompt token is always computed, for its logits
        extend = 1
    r.admitted = 1
    if first:
        sim.lists.admitted[state.admitted] = i
        state.admitted += 1
        state.cached += cached
        state.recomputed += 1 if known else 0
        r.est_decode_steps = rounded_est_decode_steps(sim, i)
        reads = r.read_len * r.est_decode_steps_mean + r.est_decode_steps_sq / 2.0
        r.est_memory_s = sim.engine.kv_read_time_s * reads
    else:
        state.recomputed += extend
    r.side = side
    join_forecast(sim, i, r.generated)
    join_running(sim, i)
    make_room_for_states(sim)
    state.longest_joining = max(state.longest_joining, r.input_len + r.generated)
    sim.sides[side].partial = i
    sim.sides[side].partial_left = extend


@jit_in_place
def start_decoding(sim: Sim) -> None:
    """Let requests whose prompt was completed in this step decode from the next one."""
    state = sim.state[0]
    for j in range(state.starting):
        i = sim.lists.starting[j]
        r = sim.requests[i]
        if sim.engine.as_sglang:
            show(sim, i, r.input_len)
            if r.decode_steps <= r.generated:
                _end(sim, i)
                continue
        _begin_decoding(sim, i, state.step)
    state.starting = 0
    state.longest_joining = 0
    for side in range(2):
        s = sim.sides[side]
        if s.partial != NONE:
            r = sim.requests[s.partial]
            length = r.input_len + r.generated
            state.longest_joining = max(state.longest_joining, length)
            if sim.engine.as_sglang:
                show(sim, s.partial, r.input_len + r.generated - s.partial_left)
    make_room_for_states(sim)


@jit_in_place
def _begin_decoding(sim: Sim, i: int, begin: int) -> None:
    """Let a request decode from the step after ``begin``."""
    state = sim.state[0]
    r = sim.requests[i]
    r.begin = begin
    state.decoding += 1
    sim.sides[r.side].decoding += 1
    _count_growing(sim, i, 1)
    reads = r.input_len + r.more_reads + r.generated - r.begin
    state.read_base += reads
    sim.sides[r.side].read_base += reads
    if sim.engine.shared_kv_read_once:
        state.read_base -= r.input_len - r.own
        state.shared_read += prefix.change_readers(sim.cache, r.node, 1)
    schedule_next(sim, i)
    r.row_base = r.input_len + r.generated - begin
    note(sim, i, DECODES)
    if begin < state.step:
        state.longest = max(state.longest, r.row_base + state.step)
    if r.base != r.own + r.generated - state.clock:
        leave_forecast(sim, i)  # its prompt took other steps than expected
        join_forecast(sim, i, r.generated)


@jit_in_place
def _stop_decoding(sim: Sim, i: int, last_step: int) -> None:
    """Remove a request from the batch. It still holds its KV."""
    state = sim.state[0]
    r = sim.requests[i]
    generated = r.generated + last_step - r.begin
    state.decoding -= 1
    sim.sides[r.side].decoding -= 1
    _count_growing(sim, i, -1)
    reads = r.input_len + r.more_reads + r.generated - r.begin
    state.read_base -= reads
    sim.sides[r.side].read_base -= reads
    if sim.engine.shared_kv_read_once:
        state.read_base += r.input_len - r.own
        state.shared_read += prefix.change_readers(sim.cache, r.node, -1)
    r.generated = generated


@jit_in_place
def _release(sim: Sim, i: int) -> None:
    """Free the KV of a request that no longer decodes."""
    r = sim.requests[i]
    _hold(sim, i, r.side, -1)
    prefix.unlock(sim.cache, r.node)
    leave_running(sim, i)


@jit_in_place
def retract_newest(sim: Sim) -> bool:
    """Retract the newest decoding request. Returns whether there was one."""
    state = sim.state[0]
    i = state.newest
    # Requests whose prompt is partly computed are not retracted.
    while i != NONE and sim.requests[i].event == NONE:
        i = sim.requests[i].older
    if i == NONE:
        return False
    unschedule(sim, i)
    leave_forecast(sim, i)
    r = sim.requests[i]
    _stop_decoding(sim, i, state.step - 1)
    state.retractions += 1
    note(sim, i, LEAVES)
    if sim.engine.as_sglang:
        prefix.give_use_back(sim.cache, r.node)
        r.admitted = 0
        r.offloaded = 1
        offloaded = sim.lists.offloaded
        offloaded[(state.first_offloaded + state.num_offloaded) % len(offloaded)] = i
        state.num_offloaded += 1
    else:
        join_first(sim, i)
    _release(sim, i)
    return True


@jit_in_place
def park(sim: Sim, i: int) -> None:
    """Move a decoding row to the host. It waits with its present length."""
    state = sim.state[0]
    r = sim.requests[i]
    unschedule(sim, i)
    leave_forecast(sim, i)
    _stop_decoding(sim, i, state.step - 1)
    prefix.give_use_back(sim.cache, r.node)
    r.admitted = 0
    r.offloaded = 1
    _release(sim, i)
    state.parked += 1
    note(sim, i, LEAVES)
    put_back(sim, i)


@jit_in_place
def reload(sim: Sim, i: int) -> None:
    """Resume an offloaded request in this step, with its prefix still in the cache."""
    state = sim.state[0]
    r = sim.requests[i]
    prefix.lock(sim.cache, r.node, True)
    r.admitted = 1
    _hold(sim, i, r.side, 1)
    join_forecast(sim, i, r.generated)
    join_running(sim, i)
    _begin_decoding(sim, i, state.step - 1)


@jit_in_place
def _revise_est_decode_steps(sim: Sim, i: int, new: int) -> None:
    """Change a request's estimate, and with it the planned work of the job."""
    state = sim.state[0]
    r = sim.requests[i]
    reads = r.read_len * new + float(new) * (new + 1.0) / 2.0
    memory = sim.engine.kv_read_time_s * reads
    state.compute_planned += (new - r.est_decode_steps) * sim.engine.token_time_s
    state.kv_read_planned += memory - r.est_memory_s
    r.est_decode_steps = new
    r.est_memory_s = memory


@jit_in_place
def _end(sim: Sim, i: int) -> None:
    """End a request, and free its KV now or after the next step."""
    state = sim.state[0]
    r = sim.requests[i]
    state.est_total += r.est_decode_steps + 1
    state.true_total += r.generated + 1
    note(sim, i, LEAVES)
    _revise_est_decode_steps(sim, i, r.generated)
    if r.ends_in_time:
        # SGLang learns one step late that a request ended.
        sim.lists.ended[state.ended] = i
        state.ended += 1
        return
    leave_forecast(sim, i)
    # Before its prefix is unlocked, so that its own tokens are evicted first.
    _leave_garbage(sim, i)
    _release(sim, i)
    state.done += 1


@jit_in_place
def _leave_garbage(sim: Sim, i: int) -> None:
    r = sim.requests[i]
    tokens = r.own + r.generated
    prefix.leave_garbage(sim.cache, i, tokens - tokens % sim.engine.page_size)


@jit_in_place
def release_ended(sim: Sim) -> None:
    """Free the KV of requests that ended in the previous step."""
    state = sim.state[0]
    for j in range(state.ended):
        i = sim.lists.ended[j]
        leave_forecast(sim, i)
        _leave_garbage(sim, i)
        _release(sim, i)
    state.done += state.ended
    state.ended = 0


@jit_in_place
def end_of_step(sim: Sim) -> None:
    """Process this step's events: requests end or get a longer estimate."""
    state = sim.state[0]
    release_ended(sim)
    calendar = sim.lists.calendar
    i = calendar[state.step & (len(calendar) - 1)]
    while i != NONE:
        r = sim.requests[i]
        following = r.after
        unschedule(sim, i)
        generated = r.generated + state.step - r.begin
        if generated >= r.decode_steps:
            _stop_decoding(sim, i, state.step)
            _end(sim, i)
        else:
            leave_forecast(sim, i)
            longer = min(generated + generated // 2 + 16, r.max_decode_steps)
            longer = max(longer, generated + 1)
            state.est_total += r.est_decode_steps + 1
            state.true_total += longer + 1
            _revise_est_decode_steps(sim, i, longer)
            schedule_next(sim, i)
            join_forecast(sim, i, generated)
        i = following
