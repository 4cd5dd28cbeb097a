"""Parking in the simulator: KV is short, requests go to the host and come back.

As the scheduler inside SGLang does it: the newest are parked, nothing of them is
computed again, and no other request is admitted before they are back.
"""

from __future__ import annotations

from . import sim_cache as prefix
from .jit import jit_in_place
from .sim_admission import fits
from .sim_cache import LOCKED
from .sim_queue import put_back
from .sim_requests import kv_in_use, release_ended, retract_newest, unpark
from .sim_state import Sim

# Decode steps that there is room for after requests were parked.
_STEPS_FREED = 8
# When KV ran out although the forecast said it would not, more of it is left free.
_MARGIN_UP, _MARGIN_MAX = 2.0, 0.2


@jit_in_place
def park_for_decodes(sim: Sim) -> bool:
    """Make sure that the running requests can decode; whether any were parked."""
    state = sim.state[0]
    capacity = sim.engine.kv_capacity
    if kv_in_use(sim) + state.decoding <= capacity:
        return False
    release_ended(sim)
    if kv_in_use(sim) + state.decoding <= capacity:
        return False
    state.margin = min(_MARGIN_MAX, state.margin * _MARGIN_UP)
    wanted = state.decoding * _STEPS_FREED
    parked = False
    while capacity - kv_in_use(sim) < wanted and state.decoding > 1:
        if not retract_newest(sim):
            break
        parked = True
    return parked


@jit_in_place
def resume(sim: Sim) -> None:
    """Bring parked requests back, in the order in which they were parked."""
    state = sim.state[0]
    parked = sim.lists.parked
    while state.num_parked > 0:
        i = parked[state.first_parked]
        r = sim.requests[i]
        node = r.node
        gone = prefix.cached_depth(sim.cache, node) < sim.cache.nodes[node].depth
        if not gone and not (_has_room(sim, i) and fits(sim, i, 0)):
            break
        state.first_parked = (state.first_parked + 1) % len(parked)
        state.num_parked -= 1
        if gone:  # a prefix of it had to go: it is computed again in its turn
            put_back(sim, i)
        else:
            unpark(sim, i)


@jit_in_place
def _has_room(sim: Sim, i: int) -> bool:
    state = sim.state[0]
    r = sim.requests[i]
    needed = r.own + r.generated + prefix.newly_locked(sim.cache, r.node)
    needed += state.decoding + 1
    return bool(
        state.private + sim.cache.totals[LOCKED] + needed <= sim.engine.kv_capacity
    )
