"""The steps of the simulator: admission, prompts, decodes, and the time they take."""

from __future__ import annotations

from . import kv_forecast as kv
from . import sim_cache as prefix
from .cost_model import overlapped
from .dual_scanner import ScanState, budgets, next_pace, steady_prefill_tokens
from .jit import jit_in_place
from .requests import Floats
from .sim_cache import GARBAGE, IDLE, LOCKED
from .sim_requests import (
    admit,
    end_of_step,
    make_room,
    retract_newest,
    start_decoding,
    whole_estimate,
)
from .sim_state import LEFT, NONE, RIGHT, Sim

# Beyond this, more of one kind of work than of the other makes no difference.
_DENSITY_RANGE = 1e6
# The density of the remaining work is taken anew after so many steps.
_RETARGET_STEPS = 64
# A request that did not fit is tried again when something ended, or after this many
# steps, for what it is weighed against moves slowly with the budgets.
_RETRY_STEPS = 32
# KV kept free for requests that outlive their estimates.
_KV_MARGIN = 0.01
# Share by which a step may exceed its target where nothing on the right needs company.
_RAMP = 1.5


@jit_in_place
def _fits(sim: Sim, i: int, reserved: int) -> bool:
    """Whether a request can join, now and by the forecast."""
    state = sim.state[0]
    if state.running >= sim.engine.max_running:
        return False
    if state.running == 0:
        return True
    r = sim.requests[i]
    held = r.own + r.generated
    locked = sim.cache.totals[LOCKED] + prefix.newly_locked(sim.cache, r.node)
    if state.private + held + locked + state.decoding > sim.engine.kv_capacity:
        return False
    estimate = r.estimate if r.admitted else whole_estimate(r.estimate_mean)
    remaining = max(estimate - r.generated, 1)
    peak = kv.peak(sim.forecast, state.step, held, remaining) + locked
    return bool(peak + reserved <= sim.engine.kv_capacity * (1.0 - _KV_MARGIN))


@jit_in_place
def _waits(sim: Sim, side: int) -> bool:
    """Whether a side's next request was found not to fit, and nothing changed."""
    state = sim.state[0]
    s = sim.sides[side]
    if (
        state.step < s.retry_at
        and state.changes == s.changes_seen
        and state.running > 0
    ):
        return True
    s.retry_at = state.step + _RETRY_STEPS
    s.changes_seen = state.changes
    return False


@jit_in_place
def _candidate(sim: Sim, side: int) -> int:
    """The request next in turn on a side; NONE where there is none."""
    s = sim.sides[side]
    if s.num_retry > 0:
        return int(sim.lists.retry[side, s.num_retry - 1])
    state = sim.state[0]
    if state.next_left > state.next_right:
        return NONE
    if side == RIGHT and state.next_right < sim.queue.num_left:
        return NONE
    return int(sim.queue.order[state.next_left if side == LEFT else state.next_right])


@jit_in_place
def _take(sim: Sim, side: int) -> None:
    if sim.sides[side].num_retry > 0:
        sim.sides[side].num_retry -= 1
    elif side == LEFT:
        sim.state[0].next_left += 1
    else:
        sim.state[0].next_right -= 1


@jit_in_place
def _prefill(sim: Sim, side: int, tokens: int, reserved: int) -> tuple[int, float]:
    """Compute up to ``tokens`` prompt tokens of a side, admitting as needed.

    Args:
        reserved: KV that has to stay free for the other side.

    Returns:
        Tokens computed, and seconds of attention over them.
    """
    state = sim.state[0]
    s = sim.sides[side]
    done = 0
    attention = 0.0
    s.blocked = 0
    while done < tokens:
        if s.partial == NONE:
            i = _candidate(sim, side)
            if i == NONE:
                break
            if _waits(sim, side) or not _fits(sim, i, reserved):
                s.blocked = 1
                break
            s.retry_at = 0
            _take(sim, side)
            admit(sim, i, side)
        i = s.partial
        some = min(s.partial_left, tokens - done)
        if sim.engine.attention_time_s > 0.0:
            r = sim.requests[i]
            # The one token computed of an empty prompt has none before it.
            before = max(0.0, float(r.input_len + r.generated - s.partial_left))
            attention += sim.engine.attention_time_s * some * (2.0 * before + some)
        done += some
        s.partial_left -= some
        if s.partial_left == 0:
            sim.lists.starting[state.starting] = i
            state.starting += 1
            s.partial = NONE
    state.prefilled += done
    return done, attention


@jit_in_place
def _kv_read_time(sim: Sim) -> float:
    """Seconds to read the KV of all that decode in this step."""
    state = sim.state[0]
    tokens = state.read_base + state.decoding * state.step + state.shared_read
    return float(tokens * sim.engine.kv_read_time_s)


@jit_in_place
def _reads(sim: Sim, side: int) -> int:
    """KV tokens that a side's decodes read in this step, shared ones each time."""
    s = sim.sides[side]
    return int(s.read_base + s.decoding * sim.state[0].step)


@jit_in_place
def _whole(sim: Sim, tokens: int) -> int:
    """``tokens``, such that with the decodes they make a multiple if they can."""
    excess = (tokens + sim.state[0].decoding) % sim.engine.batch_multiple
    return int(tokens - excess if excess < tokens else tokens)


@jit_in_place
def _density_ahead(sim: Sim, side: int) -> float:
    state = sim.state[0]
    place = state.next_left if side == LEFT else state.next_right
    return float(sim.queue.density[min(max(place, 0), len(sim.queue.density) - 1)])


@jit_in_place
def _steady_tokens(sim: Sim, side: int, kv_budget: int) -> float:
    """Algorithm 3's prefill budget of a side, by the request next in turn."""
    i = _candidate(sim, side)
    if i == NONE:
        return 0.0
    r = sim.requests[i]
    return steady_prefill_tokens(float(kv_budget), float(r.own), r.estimate_mean)


@jit_in_place
def _dual_prefill(sim: Sim, target: float) -> tuple[int, float]:
    """Admit from both sides by the dual scanner's budgets."""
    state = sim.state[0]
    left_blocked = sim.sides[LEFT].blocked != 0
    state.pace = next_pace(state.pace, left_blocked)
    allowed = budgets(
        ScanState(
            sim.engine.kv_capacity,
            _density_ahead(sim, LEFT),
            _density_ahead(sim, RIGHT),
            _candidate(sim, LEFT) != NONE,
            _candidate(sim, RIGHT) != NONE,
            target,
            state.decoding,
            _kv_read_time(sim),
            _reads(sim, LEFT),
            sim.engine.token_time_s,
            state.pace,
        )
    )
    limit = max(0, sim.engine.step_tokens - state.decoding)
    if sim.engine.closed_loop:
        tokens = allowed.prefill_tokens
    else:
        left_tokens = _steady_tokens(sim, LEFT, allowed.left_kv)
        tokens = int(left_tokens + _steady_tokens(sim, RIGHT, allowed.right_kv))
    done, attention = 0, 0.0
    # A left side without room goes first.
    may_join = not left_blocked and _reads(sim, RIGHT) < allowed.right_reads
    if may_join or sim.sides[RIGHT].partial != NONE:
        right = min(limit, max(tokens, sim.engine.min_step_tokens))
        kept = max(0, allowed.left_kv - sim.sides[LEFT].kv)
        if not may_join:  # the prompt that was begun goes on, no other begins
            kept = sim.engine.kv_capacity
        done, attention = _prefill(sim, RIGHT, _whole(sim, right), kept)
    if sim.sides[RIGHT].decoding == 0 and done == 0:
        tokens = max(int(tokens * _RAMP), sim.engine.min_step_tokens)
    tokens = min(limit, tokens) - done
    if tokens > 0:
        more, over = _prefill(sim, LEFT, _whole(sim, tokens), 0)
        done += more
        attention += over
    for side in (RIGHT, LEFT):
        if done + state.decoding == 0:  # whatever the budgets, something goes on
            done, attention = _prefill(sim, side, limit, 0)
    return done, attention


@jit_in_place
def _static_prefill(sim: Sim) -> tuple[int, float]:
    """Fill the step with the prompts next in order."""
    limit = max(0, sim.engine.step_tokens - sim.state[0].decoding)
    return _prefill(sim, LEFT, _whole(sim, limit), 0)


@jit_in_place
def _remaining_density(sim: Sim) -> float:
    """Compute over KV read time of what is left of the job, by the estimates."""
    state = sim.state[0]
    reads = max(state.kv_read_planned - state.kv_read, 1e-9)
    density = max(state.compute_planned - state.compute, 0.0) / reads
    return float(min(max(density, 1.0 / _DENSITY_RANGE), _DENSITY_RANGE))


@jit_in_place
def _grow(sim: Sim) -> None:
    """One more token of KV for every decoding request; retracts where it is short."""
    state = sim.state[0]
    totals = sim.cache.totals
    while state.private + state.decoding + totals[LOCKED] > sim.engine.kv_capacity:
        if not retract_newest(sim):
            break
    state.private += state.decoding
    for side in range(2):
        sim.sides[side].kv += sim.sides[side].decoding
    make_room(sim)
    used = state.private + totals[LOCKED]
    state.peak_kv = max(state.peak_kv, used + totals[IDLE] + totals[GARBAGE])
    state.kv_steps += used


@jit_in_place
def _sample(
    samples: Floats, stride: int, step: int, seconds: float, compute: float,
    memory: float,
) -> int:  # fmt: skip
    """Add a step to its column; where there is none left, columns are joined in pairs.

    Returns:
        Steps per column.
    """
    if step >= samples.shape[1] * stride:
        half = samples.shape[1] // 2
        for row in range(3):
            for j in range(half):
                samples[row, j] = samples[row, 2 * j] + samples[row, 2 * j + 1]
            for j in range(half, samples.shape[1]):
                samples[row, j] = 0.0
        stride *= 2
    column = step // stride
    samples[0, column] += seconds
    samples[1, column] += compute
    samples[2, column] += memory
    return stride


@jit_in_place
def run_steps(sim: Sim, samples: Floats) -> int:
    """Run the job to its end.

    Args:
        samples: float64 ``[3, s]`` of zeros, ``s`` even; filled with the seconds, the
            compute and the memory time of the job's steps.

    Returns:
        The steps per column of ``samples``.
    """
    engine = sim.engine
    state = sim.state[0]
    multiple = engine.batch_multiple
    stride = 1
    target = 1.0
    while state.done < len(sim.requests):
        if sim.queue.dual:
            if state.step % _RETARGET_STEPS == 1:
                target = _remaining_density(sim)
            tokens, attention = _dual_prefill(sim, target)
        else:
            tokens, attention = _static_prefill(sim)
        _grow(sim)
        charged = -(-(tokens + state.decoding) // multiple) * multiple
        compute = charged * engine.token_time_s + attention
        kv_read = _kv_read_time(sim)
        memory = kv_read + engine.weight_read_time_s
        seconds = overlapped(compute, memory, engine.interference_exponent)
        state.compute += compute
        state.memory += memory
        state.kv_read += kv_read
        state.seconds += seconds
        stride = _sample(samples, stride, state.step - 1, seconds, compute, memory)
        end_of_step(sim)
        start_decoding(sim)
        state.step += 1
    return stride
