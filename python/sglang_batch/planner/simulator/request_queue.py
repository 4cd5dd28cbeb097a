"""The next request to admit in the simulator; leaders and followers.

A request whose prefix is being computed by another one, its leader, is a follower. As
in the scheduler inside SGLang, it is held back until the step after that prefix is
complete.
"""

from __future__ import annotations

from ..admission_rules.followers import MOST_FOLLOWERS, SHORTEST_AWAITED
from ..compiled import jit_in_place
from ..requests import LEFT, RIGHT
from .engine_state import NONE, Sim, in_pages
from .prefix_cache import SimCache, keep_state, kept_depth, mark_stops
from .row_notes import WAITS, note


@jit_in_place
def candidate(sim: Sim, side: int) -> int:
    """The next request on a side, or NONE."""
    state = sim.state[0]
    waiting = sim.lists.waiting
    if side == LEFT:
        while state.next_left <= state.next_right and waiting[state.next_left] == 0:
            state.next_left += 1
    else:
        while state.next_left <= state.next_right and waiting[state.next_right] == 0:
            state.next_right -= 1
    s = sim.sides[side]
    if s.num_retry > 0:
        return int(sim.lists.retry[side, s.num_retry - 1])
    if state.next_left > state.next_right:
        return NONE
    if side == RIGHT and state.next_right < sim.queue.num_left:
        return NONE
    return int(sim.queue.order[state.next_left if side == LEFT else state.next_right])


@jit_in_place
def take(sim: Sim, side: int, i: int) -> None:
    """Remove a side's candidate from the waiting requests."""
    if sim.sides[side].num_retry > 0:
        sim.sides[side].num_retry -= 1
    else:
        sim.lists.waiting[sim.queue.position[i]] = 0


@jit_in_place
def put_back(sim: Sim, i: int) -> None:
    """Return a request to its position among the waiting ones."""
    state = sim.state[0]
    position = sim.queue.position[i]
    sim.lists.waiting[position] = 1
    note(sim, i, WAITS)
    state.next_left = min(state.next_left, position)
    state.next_right = max(state.next_right, position)


@jit_in_place
def join_first(sim: Sim, i: int) -> None:
    """Let a request join before those that wait."""
    side = sim.sides[sim.requests[i].side]
    sim.lists.retry[sim.requests[i].side, side.num_retry] = i
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
    """Whether a waiting request would compute prefixes for others.

    Args:
        kept: tokens of its prompt that the cache holds.
    """
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
                sim.state[0].followers_kv -= _whole_kv(sim, follower)
                follower = sim.requests[follower].next_follower
        node = at.parent


@jit_in_place
def follows(sim: Sim, side: int, i: int) -> bool:
    """Hold a side's candidate back if another request computes its prefix.

    Returns:
        Whether the candidate is a follower.
    """
    state = sim.state[0]
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
