"""A request's way through the simulated engine: admitted, decoding, retracted, ended.

What happens to a request later (it ends, or outlives its estimate) is kept in a
calendar of steps, so a step costs what changes in it and not the number of running
requests.
"""

from __future__ import annotations

from . import kv_forecast as kv
from . import sim_cache as prefix
from .jit import jit_in_place
from .sim_state import NONE, Sim

# The calendar -------------------------------------------------------------------------


@jit_in_place
def _schedule(sim: Sim, i: int, step: int) -> None:
    calendar = sim.lists.calendar
    slot = step & (len(calendar) - 1)
    first = calendar[slot]
    r = sim.requests[i]
    r.event = step
    r.before = NONE
    r.after = first
    if first != NONE:
        sim.requests[first].before = i
    calendar[slot] = i


@jit_in_place
def _unschedule(sim: Sim, i: int) -> None:
    r = sim.requests[i]
    if r.before == NONE:
        calendar = sim.lists.calendar
        calendar[r.event & (len(calendar) - 1)] = r.after
    else:
        sim.requests[r.before].after = r.after
    if r.after != NONE:
        sim.requests[r.after].before = r.before
    r.event = NONE


@jit_in_place
def _schedule_next(sim: Sim, i: int) -> None:
    """The end of a request, or the step at which it has outlived its estimate."""
    r = sim.requests[i]
    end = min(r.output_len, r.estimate)
    _schedule(sim, i, r.begin + end - r.generated)


# Lists and forecasts ------------------------------------------------------------------


@jit_in_place
def whole_estimate(tokens: float) -> int:
    """An estimated output length as the whole number that admission counts with."""
    return max(1, int(tokens + 0.5))


@jit_in_place
def _join_forecast(sim: Sim, i: int, generated: int) -> None:
    now = sim.state[0].step
    r = sim.requests[i]
    held = r.own + generated
    remaining = max(r.estimate - generated, 1)
    r.base = held - now
    r.final = held + remaining
    r.bucket = kv.add(sim.forecast, now, held, remaining)


@jit_in_place
def _leave_forecast(sim: Sim, i: int) -> None:
    r = sim.requests[i]
    sim.state[0].changes += 1
    kv.remove(sim.forecast, r.bucket, r.base, r.final)


@jit_in_place
def _join_running(sim: Sim, i: int) -> None:
    state = sim.state[0]
    r = sim.requests[i]
    r.older = state.newest
    r.newer = NONE
    if state.newest != NONE:
        sim.requests[state.newest].newer = i
    state.newest = i
    state.running += 1


@jit_in_place
def _leave_running(sim: Sim, i: int) -> None:
    state = sim.state[0]
    r = sim.requests[i]
    if r.older != NONE:
        sim.requests[r.older].newer = r.newer
    if r.newer != NONE:
        sim.requests[r.newer].older = r.older
    else:
        state.newest = r.older
    state.running -= 1


@jit_in_place
def make_room(sim: Sim) -> None:
    """Evict until what is in use fits; the locked part always does."""
    totals = sim.cache.totals
    used = totals[0] + totals[1] + totals[2] + sim.state[0].private
    if used > sim.engine.kv_capacity:
        over = used - sim.engine.kv_capacity
        prefix.evict(sim.cache, over, sim.queue.rank, sim.requests)


# Stages -------------------------------------------------------------------------------


@jit_in_place
def admit(sim: Sim, i: int, side: int) -> None:
    """Give a request its KV; its prompt is computed next."""
    state = sim.state[0]
    r = sim.requests[i]
    cached = prefix.cached_depth(sim.cache, r.node)
    first = r.admitted == 0
    prefix.lock(sim.cache, r.node, first)
    state.private += r.own + r.generated
    sim.sides[side].kv += r.own + r.generated
    make_room(sim)
    extend = r.input_len + r.generated - cached
    known = extend == 0
    if known:  # the last prompt token is always computed, for its logits
        extend = 1
    if first:
        r.admitted = 1
        sim.lists.admitted[state.admitted] = i
        state.admitted += 1
        state.cached += cached
        state.recomputed += 1 if known else 0
        r.estimate = whole_estimate(r.estimate_mean)
        reads = r.read_len * r.estimate_mean + r.estimate_sq / 2.0
        r.memory_estimate = sim.engine.kv_read_time_s * reads
    else:
        state.recomputed += extend
    r.side = side
    _join_forecast(sim, i, r.generated)
    _join_running(sim, i)
    sim.sides[side].partial = i
    sim.sides[side].partial_left = extend


@jit_in_place
def start_decoding(sim: Sim) -> None:
    """Requests whose prompt this step completed decode from the next one on."""
    state = sim.state[0]
    for j in range(state.starting):
        i = sim.lists.starting[j]
        r = sim.requests[i]
        r.begin = state.step
        state.decoding += 1
        sim.sides[r.side].decoding += 1
        state.read_base += r.input_len + r.generated - r.begin
        sim.sides[r.side].read_base += r.input_len + r.generated - r.begin
        if sim.engine.shared_kv_read_once:
            state.read_base -= r.input_len - r.own
            state.shared_read += prefix.change_readers(sim.cache, r.node, 1)
        _schedule_next(sim, i)
    state.starting = 0


@jit_in_place
def _stop_decoding(sim: Sim, i: int, last_step: int) -> int:
    """Take a request out of the batch; returns the tokens it has generated."""
    state = sim.state[0]
    r = sim.requests[i]
    generated = r.generated + last_step - r.begin
    state.decoding -= 1
    sim.sides[r.side].decoding -= 1
    state.read_base -= r.input_len + r.generated - r.begin
    sim.sides[r.side].read_base -= r.input_len + r.generated - r.begin
    if sim.engine.shared_kv_read_once:
        state.read_base += r.input_len - r.own
        state.shared_read += prefix.change_readers(sim.cache, r.node, -1)
    state.private -= r.own + generated
    sim.sides[r.side].kv -= r.own + generated
    prefix.unlock(sim.cache, r.node)
    _leave_running(sim, i)
    return int(generated)


@jit_in_place
def retract_newest(sim: Sim) -> bool:
    """Give back the KV of the request that decodes for the shortest time."""
    state = sim.state[0]
    i = state.newest
    # Prompts that are being computed stay.
    while i != NONE and sim.requests[i].event == NONE:
        i = sim.requests[i].older
    if i == NONE:
        return False
    _unschedule(sim, i)
    _leave_forecast(sim, i)
    r = sim.requests[i]
    r.generated = _stop_decoding(sim, i, state.step - 1)
    side = sim.sides[r.side]
    sim.lists.retry[r.side, side.num_retry] = i
    side.num_retry += 1
    state.retractions += 1
    return True


@jit_in_place
def _revise_estimate(sim: Sim, i: int, new: int) -> None:
    """A request turned out to be longer, or ended: the planned work changes."""
    state = sim.state[0]
    r = sim.requests[i]
    reads = r.read_len * new + float(new) * (new + 1.0) / 2.0
    memory = sim.engine.kv_read_time_s * reads
    state.compute_planned += (new - r.estimate) * sim.engine.token_time_s
    state.kv_read_planned += memory - r.memory_estimate
    r.estimate = new
    r.memory_estimate = memory


@jit_in_place
def end_of_step(sim: Sim) -> None:
    """Requests whose event falls on this step end, or get a longer estimate."""
    state = sim.state[0]
    calendar = sim.lists.calendar
    i = calendar[state.step & (len(calendar) - 1)]
    while i != NONE:
        r = sim.requests[i]
        following = r.after
        _unschedule(sim, i)
        _leave_forecast(sim, i)
        generated = r.generated + state.step - r.begin
        if generated >= r.output_len:
            _revise_estimate(sim, i, generated)
            # Before its prefix is given up: what hangs below is evicted first.
            prefix.leave_garbage(sim.cache, i, r.own + generated)
            _stop_decoding(sim, i, state.step)
            state.done += 1
        else:
            longer = min(generated + generated // 2 + 16, r.max_new_tokens)
            _revise_estimate(sim, i, max(longer, generated + 1))
            _join_forecast(sim, i, generated)
            _schedule_next(sim, i)
        i = following
