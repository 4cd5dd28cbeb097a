"""What is noted of running requests in the simulator: events, forecasts, their order.

What happens to a request later (it ends, or outlives its estimate) is kept in a
calendar of steps, so a step costs what changes in it and not the number of running
requests.
"""

from __future__ import annotations

from . import kv_forecast as kv
from .jit import jit_in_place
from .sim_state import NONE, Sim

# Requests that outlived their estimates raise those of the next, by at most this much.
_BIAS_MAX = 16.0

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
    """The end of a request, or the step at which it has outlived its estimate."""
    r = sim.requests[i]
    outlived = r.estimate
    if sim.engine.as_sglang:  # noted when a step more than expected was taken
        outlived = max(r.estimate, r.generated) + 1
    end = min(r.output_len, outlived)
    _schedule(sim, i, r.begin + end - r.generated)


# Lists and forecasts ------------------------------------------------------------------


@jit_in_place
def whole_estimate(sim: Sim, i: int) -> int:
    """An estimated output length as the whole number that admission counts with."""
    r = sim.requests[i]
    if not sim.engine.as_sglang:
        return max(1, int(r.estimate_mean + 0.5))
    expected = int(r.estimate_mean + 0.5)
    if expected >= r.max_new_tokens:
        return int(r.max_new_tokens)
    state = sim.state[0]
    bias = min(max(1.0, state.came_out / state.estimated), _BIAS_MAX)
    return int(min(int(expected * bias + 0.5), r.max_new_tokens))


@jit_in_place
def join_forecast(sim: Sim, i: int, generated: int) -> None:
    now = sim.state[0].clock
    r = sim.requests[i]
    held = r.own + generated
    remaining = max(r.estimate - generated, 1)
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
