"""Offloading in the simulator: when KV is short, requests are moved to the host.

As in the scheduler inside SGLang, the newest requests are offloaded, none of their KV
is computed again, and no other request is admitted before they have resumed.
"""

from __future__ import annotations

from ..compiled import jit_in_place, jit_inlined
from . import prefix_cache as prefix
from .engine_state import Sim, in_pages
from .prefix_cache import LOCKED
from .request_queue import put_back
from .request_stages import (
    decode_kv,
    kv_in_use,
    release_ended,
    reload,
    retract_newest,
)
from .row_notes import COMES_BACK, note
from .step_admission import fits

# Decode steps that fit after requests were offloaded.
_STEPS_FREED = 8
# When KV runs out despite the forecast, admission leaves a larger share of it free.
_MARGIN_UP, _MARGIN_MAX = 2.0, 0.2


@jit_inlined
def offload_for_decodes(sim: Sim) -> bool:
    """Free KV for the next decodes. Returns whether any request was offloaded."""
    state = sim.state[0]
    capacity = sim.engine.kv_capacity
    if kv_in_use(sim) + decode_kv(sim) <= capacity:
        return False
    release_ended(sim)
    if kv_in_use(sim) + decode_kv(sim) <= capacity:
        return False
    state.margin = min(_MARGIN_MAX, state.margin * _MARGIN_UP)
    wanted = state.decoding * max(_STEPS_FREED, sim.engine.page_size)
    offloaded = False
    while capacity - kv_in_use(sim) < wanted and state.decoding > 1:
        if not retract_newest(sim):
            break
        offloaded = True
    return offloaded


@jit_inlined
def resume(sim: Sim) -> None:
    """Resume offloaded requests, in the order in which they were offloaded."""
    state = sim.state[0]
    offloaded = sim.lists.offloaded
    while state.num_offloaded > 0:
        i = offloaded[state.first_offloaded]
        r = sim.requests[i]
        node = r.node
        gone = prefix.cached_depth(sim.cache, node) < sim.cache.nodes[node].depth
        if not gone and not (_has_room(sim, i) and fits(sim, i, 0)):
            break
        state.first_offloaded = (state.first_offloaded + 1) % len(offloaded)
        state.num_offloaded -= 1
        if gone:  # its prefix was evicted: it waits, and computes its prompt again
            put_back(sim, i)
        else:
            reload(sim, i)
            note(sim, i, COMES_BACK)


@jit_in_place
def _has_room(sim: Sim, i: int) -> bool:
    state = sim.state[0]
    r = sim.requests[i]
    needed = in_pages(sim, r.own + r.generated)
    needed += prefix.newly_locked(sim.cache, r.node)
    needed += decode_kv(sim) + sim.engine.page_size
    return bool(
        state.private + sim.cache.totals[LOCKED] + needed <= sim.engine.kv_capacity
    )
