"""Stages of a request in the simulated engine: waiting, admitted, decoding, retracted, ended.

A request whose prefix is being computed by another one, its leader, is a follower. It is held
back until the step after that prefix is complete.

The next event of a running request (it ends, or runs longer than estimated) is an entry in a
calendar of steps, so that a step costs time only for the requests that change in it.
"""

from __future__ import annotations

from ..admission_rules import kv_forecast as kv
from ..admission_rules.followers import MOST_FOLLOWERS, SHORTEST_AWAITED
from ..compiled import jit_in_place
from ..machine_model import share
from ..requests import LEFT, RIGHT
from . import prefix_cache as prefix
from .engine_state import DECODES, LEAVES, NONE, WAITS, Sim, in_pages, note
from .prefix_cache import (
    GARBAGE,
    IDLE,
    LOCKED,
    STATES,
    SimCache,
    keep_state,
    kept_depth,
    mark_stops,
)


@jit_in_place
def candidate(sim: Sim, side: int) -> int:
    """The next request on a side, or NONE."""
    state = sim.state
    places, last = sim.places, state.next_right
    if side == LEFT:
        while state.next_left <= last and places[state.next_left].waits == 0:
            state.next_left += 1
    else:
        first = state.next_left
        while first <= state.next_right and places[state.next_right].waits == 0:
            state.next_right -= 1
    s = sim.sides[side]
    if s.num_retry > 0:
        return int(places[s.num_retry - 1].retry[side])
    if state.next_left > state.next_right:
        return NONE
    if side == RIGHT and state.next_right < sim.queue.num_left:
        return NONE
    return int(places[state.next_left if side == LEFT else state.next_right].leaf)


@jit_in_place
def take(sim: Sim, side: int, i: int) -> None:
    """Remove a side's candidate from the waiting requests."""
    if sim.sides[side].num_retry > 0:
        sim.sides[side].num_retry -= 1
    else:
        sim.places[sim.requests[i].position].waits = 0


@jit_in_place
def put_back(sim: Sim, i: int) -> None:
    """Return a request to its position among the waiting ones."""
    state = sim.state
    position = sim.requests[i].position
    sim.places[position].waits = 1
    note(sim, i, WAITS)
    state.next_left = min(state.next_left, position)
    state.next_right = max(state.next_right, position)


@jit_in_place
def join_first(sim: Sim, i: int) -> None:
    """Let a request join before those that wait."""
    side = sim.sides[sim.requests[i].side]
    sim.places[side.num_retry].retry[sim.requests[i].side] = i
    side.num_retry += 1


# --- Leaders and followers


@jit_in_place
def lead(cache: SimCache, i: int, node: int, cached: int) -> None:
    """Make a request the leader of its missing prefixes that will be used again."""
    above = node
    while above > 0 and cache.nodes[above].depth > cached:
        at = cache.nodes[above]
        has_state = cache.keeps_states and at.has_state
        if at.uses_left > 0 and at.leader == NONE and not has_state:
            at.leader = i
        above = at.parent
    mark_stops(cache, i, node)


@jit_in_place
def leads(cache: SimCache, node: int, kept: int) -> bool:
    """Whether a waiting request would compute prefixes for others; ``kept`` tokens are in
    the cache."""
    while node > 0 and cache.nodes[node].depth > kept:
        if cache.nodes[node].uses_left > 1 and cache.nodes[node].leader == NONE:
            return True
        node = cache.nodes[node].parent
    return False


@jit_in_place
def _whole_kv(sim: Sim, i: int) -> int:
    """Estimated KV tokens of a request when it ends, without shared prefixes."""
    r = sim.requests[i]
    steps = min(int(r.est_decode_steps_mean + 0.5), r.max_decode_steps)
    return in_pages(sim, r.own + steps)


@jit_in_place
def show(sim: Sim, i: int, computed: int) -> None:
    """Release followers of a leader: its first ``computed`` tokens are in the cache."""
    node = sim.requests[i].node
    while node > 0:
        at = sim.cache.nodes[node]
        if at.leader == i and at.depth <= computed:
            at.leader = NONE
            keep_state(sim.cache, node)
            follower = at.followers
            at.followers = NONE
            while follower != NONE:
                if sim.queue.rule > 0:
                    join_first(sim, follower)
                else:
                    put_back(sim, follower)
                sim.state.followers_kv -= _whole_kv(sim, follower)
                follower = sim.requests[follower].next_follower
        node = at.parent


@jit_in_place
def follows(sim: Sim, side: int, i: int) -> bool:
    """Hold a side's candidate back if another request computes its prefix. Returns whether
    it does."""
    state = sim.state
    node = sim.requests[i].node
    while node > 0 and sim.cache.nodes[node].leader == NONE:
        node = sim.cache.nodes[node].parent
    if node <= 0:
        return False
    kept = kept_depth(sim.cache, sim.requests[i].node)
    if sim.cache.nodes[node].depth - kept < SHORTEST_AWAITED:
        return False
    state.held_back += 1
    if state.held_back <= MOST_FOLLOWERS:
        take(sim, side, i)
        sim.requests[i].next_follower = sim.cache.nodes[node].followers
        sim.cache.nodes[node].followers = i
        state.followers_kv += _whole_kv(sim, i)
    return True


@jit_in_place
def kv_in_use(sim: Sim) -> int:
    """KV tokens that running requests hold.

    SGLang allocates the tokens that a step computes, the textbook engine whole prompts.
    """
    used = sim.state.private + sim.cache.totals[LOCKED]
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
    phase = sim.state.step % page_size
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
    phase = sim.state.step % page_size
    for side in range(2):
        tokens = sim.growing[side, phase] * page_size
        sim.state.private += tokens
        sim.sides[side].kv += tokens


@jit_in_place
def over_capacity(sim: Sim) -> bool:
    """Whether the next decodes exceed the KV."""
    if sim.engine.dense:
        cells = sim.state.decoding * (sim.state.longest + 1)
        return bool(sim.state.decoding > 1 and cells > sim.engine.kv_capacity)
    return kv_in_use(sim) + decode_kv(sim) > sim.engine.kv_capacity


@jit_in_place
def make_room(sim: Sim) -> None:
    """Evict until all tokens fit. Tokens of running requests always do."""
    totals = sim.cache.totals
    used = kv_in_use(sim) + totals[IDLE] + totals[GARBAGE]
    if used > sim.engine.kv_capacity:
        over = used - sim.engine.kv_capacity
        prefix.evict(sim.cache, over, sim.requests)


@jit_in_place
def make_room_for_states(sim: Sim) -> None:
    """Drop states that no running request uses until those of all requests fit."""
    if sim.cache.keeps_states:
        over = sim.state.pool_held + sim.cache.totals[STATES]
        over -= sim.engine.second.capacity
        if over > 0:
            prefix.evict_states(sim.cache, over, sim.requests)


# --- Stages


@jit_in_place
def _hold(sim: Sim, i: int, side: int, sign: int) -> None:
    """Count the pages of a request that begins (1) or ends (-1) to hold KV."""
    r = sim.requests[i]
    tokens = sign * in_pages(sim, r.own + r.generated)
    sim.state.private += tokens
    sim.sides[side].kv += tokens


@jit_in_place
def admit(sim: Sim, i: int, side: int) -> None:
    """Allocate KV for a request, whose prompt is computed next."""
    state = sim.state
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
        sim.places[state.admitted].admitted = i
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
    state = sim.state
    for j in range(state.starting):
        i = sim.places[j].starting
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
    state = sim.state
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
    state = sim.state
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
    state = sim.state
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
        last = (state.first_offloaded + state.num_offloaded) % len(sim.places)
        sim.places[last].offloaded = i
        state.num_offloaded += 1
    else:
        join_first(sim, i)
    _release(sim, i)
    return True


@jit_in_place
def park(sim: Sim, i: int) -> None:
    """Move a decoding row to the host. It waits with its present length."""
    state = sim.state
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
    state = sim.state
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
    state = sim.state
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
    state = sim.state
    r = sim.requests[i]
    state.est_total += r.est_decode_steps + 1
    state.true_total += r.generated + 1
    note(sim, i, LEAVES)
    _revise_est_decode_steps(sim, i, r.generated)
    if r.ends_in_time:
        # SGLang learns one step late that a request ended.
        sim.places[state.ended].ended = i
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
    state = sim.state
    for j in range(state.ended):
        i = sim.places[j].ended
        leave_forecast(sim, i)
        _leave_garbage(sim, i)
        _release(sim, i)
    state.done += state.ended
    state.ended = 0


@jit_in_place
def end_of_step(sim: Sim) -> None:
    """Process this step's events: requests end or get a longer estimate."""
    state = sim.state
    release_ended(sim)
    calendar = sim.calendar
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


# Most by which requests that ran longer than estimated raise the next estimates.
_BIAS_MAX = 16.0

# --- Calendar


@jit_in_place
def _schedule(sim: Sim, i: int, step: int) -> None:
    calendar = sim.calendar
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
def unschedule(sim: Sim, i: int) -> None:
    r = sim.requests[i]
    if r.before == NONE:
        calendar = sim.calendar
        calendar[r.event & (len(calendar) - 1)] = r.after
    else:
        sim.requests[r.before].after = r.after
    if r.after != NONE:
        sim.requests[r.after].before = r.before
    r.event = NONE


@jit_in_place
def schedule_next(sim: Sim, i: int) -> None:
    """Enter the end of a request, or the step in which it exceeds its estimate."""
    r = sim.requests[i]
    exceeded = r.est_decode_steps
    if sim.engine.as_sglang:  # noticed after one step more than estimated
        exceeded = max(r.est_decode_steps, r.generated) + 1
    end = min(r.decode_steps, exceeded)
    _schedule(sim, i, r.begin + end - r.generated)


# --- Estimates, KV forecast, running requests


@jit_in_place
def rounded_est_decode_steps(sim: Sim, i: int) -> int:
    """A request's estimate before admission, as a whole number of decode steps."""
    r = sim.requests[i]
    if not sim.engine.as_sglang:
        return max(1, int(r.est_decode_steps_mean + 0.5))
    rounded = int(r.est_decode_steps_mean + 0.5)
    if rounded >= r.max_decode_steps:
        return int(r.max_decode_steps)
    state = sim.state
    bias = min(max(1.0, state.true_total / state.est_total), _BIAS_MAX)
    return int(min(int(rounded * bias + 0.5), r.max_decode_steps))


@jit_in_place
def growth(sim: Sim, i: int, generated: int, est_decode_steps: int) -> tuple[int, int]:
    """A request's KV in tokens as if it grew from now on, and its steps to the end. In SGLang, it
    begins to grow in the step after that which computes its prompt."""
    r = sim.requests[i]
    waits = 1 if sim.engine.as_sglang and r.event == NONE else 0
    return kv.growth(r.own, generated, est_decode_steps, waits)


@jit_in_place
def join_forecast(sim: Sim, i: int, generated: int) -> None:
    now = sim.state.clock
    r = sim.requests[i]
    held, remaining = growth(sim, i, generated, r.est_decode_steps)
    r.base = held - now
    r.final = held + remaining
    r.bucket = kv.add(sim.forecast, now, held, remaining)


@jit_in_place
def leave_forecast(sim: Sim, i: int) -> None:
    r = sim.requests[i]
    sim.state.changes += 1
    kv.remove(sim.forecast, r.bucket, r.base, r.final)


@jit_in_place
def join_running(sim: Sim, i: int) -> None:
    state = sim.state
    r = sim.requests[i]
    r.older = state.newest
    r.newer = NONE
    if state.newest != NONE:
        sim.requests[state.newest].newer = i
    state.newest = i
    state.running += 1
    r.pool_share = share(sim.engine.second, r.own, r.est_decode_steps)
    state.pool_held += r.pool_share


@jit_in_place
def leave_running(sim: Sim, i: int) -> None:
    state = sim.state
    r = sim.requests[i]
    if r.older != NONE:
        sim.requests[r.older].newer = r.newer
    if r.newer != NONE:
        sim.requests[r.newer].older = r.older
    else:
        state.newest = r.older
    state.running -= 1
    state.pool_held -= r.pool_share
