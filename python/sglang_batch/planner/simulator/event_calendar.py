"""Running requests in the simulator: their next events, KV forecast and age.

The next event of a request (it ends, or runs longer than estimated) is an entry in a
calendar of steps. The time of a simulated step is thus proportional to the requests
that change in it, not to all running requests.
"""

from __future__ import annotations

from ..admission_rules import kv_forecast as kv
from ..compiled import jit_in_place
from ..costs.pool_shares import share
from .engine_state import NONE, Sim

# Most by which requests that ran longer than estimated raise the next estimates.
_BIAS_MAX = 16.0

# --- Calendar


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
def unschedule(sim: Sim, i: int) -> None:
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
    state = sim.state[0]
    bias = min(max(1.0, state.true_total / state.est_total), _BIAS_MAX)
    return int(min(int(rounded * bias + 0.5), r.max_decode_steps))


@jit_in_place
def growth(sim: Sim, i: int, generated: int, est_decode_steps: int) -> tuple[int, int]:
    """A request's KV in tokens as if it grew from now on, and its steps to the end.

    In SGLang, it begins to grow in the step after that which computes its prompt.
    """
    r = sim.requests[i]
    waits = 1 if sim.engine.as_sglang and r.event == NONE else 0
    remaining = max(est_decode_steps - generated, 1)
    return r.own + generated - waits, remaining + waits


@jit_in_place
def join_forecast(sim: Sim, i: int, generated: int) -> None:
    now = sim.state[0].clock
    r = sim.requests[i]
    held, remaining = growth(sim, i, generated, r.est_decode_steps)
    r.base = held - now
    r.final = held + remaining
    r.bucket = kv.add(sim.forecast, now, held, remaining)


@jit_in_place
def leave_forecast(sim: Sim, i: int) -> None:
    r = sim.requests[i]
    sim.state[0].changes += 1
    kv.remove(sim.forecast, r.bucket, r.base, r.final)


@jit_in_place
def join_running(sim: Sim, i: int) -> None:
    state = sim.state[0]
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
    state = sim.state[0]
    r = sim.requests[i]
    if r.older != NONE:
        sim.requests[r.older].newer = r.newer
    if r.newer != NONE:
        sim.requests[r.newer].older = r.older
    else:
        state.newest = r.older
    state.running -= 1
    state.pool_held -= r.pool_share
