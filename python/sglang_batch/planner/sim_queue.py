"""Whose turn it is in the simulator, and who follows a leader.

In our scheduler a request whose prefix another one, its leader, is computing is set
aside until the step after that prefix is complete.
"""

from __future__ import annotations

from .jit import jit_in_place
from .sim_cache import SimCache
from .sim_state import LEFT, NONE, RIGHT, Sim

# Followers set aside in one step at most: a large group must not hold a step up.
MOST_FOLLOWERS = 256


@jit_in_place
def candidate(sim: Sim, side: int) -> int:
    """The request next in turn on a side; NONE where there is none."""
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
    """The candidate of a side does not wait any longer."""
    if sim.sides[side].num_retry > 0:
        sim.sides[side].num_retry -= 1
    else:
        sim.lists.waiting[sim.queue.place[i]] = 0


@jit_in_place
def put_back(sim: Sim, i: int) -> None:
    """A request waits for its turn again."""
    state = sim.state[0]
    place = sim.queue.place[i]
    sim.lists.waiting[place] = 1
    state.next_left = min(state.next_left, place)
    state.next_right = max(state.next_right, place)


# Leaders and followers ----------------------------------------------------------------


@jit_in_place
def lead(cache: SimCache, i: int, node: int, cached: int) -> None:
    """A request computes those of its prefixes that are missing and needed again."""
    while node > 0 and cache.nodes[node].depth > cached:
        at = cache.nodes[node]
        if at.uses_left > 0 and at.leader == NONE:
            at.leader = i
        node = at.parent


@jit_in_place
def _whole_kv(sim: Sim, i: int) -> int:
    """Tokens of KV that a request is expected to hold in the end, shared ones aside."""
    r = sim.requests[i]
    return int(r.own + min(int(r.estimate_mean + 0.5), r.max_new_tokens))


@jit_in_place
def show(sim: Sim, i: int, computed: int) -> None:
    """The first tokens of a leader's prompt are in the cache: followers go on."""
    node = sim.requests[i].node
    while node > 0:
        at = sim.cache.nodes[node]
        if at.leader == i and at.depth <= computed:
            at.leader = NONE
            follower = at.followers
            at.followers = NONE
            while follower != NONE:
                put_back(sim, follower)
                sim.state[0].followers_kv -= _whole_kv(sim, follower)
                follower = sim.requests[follower].next_follower
        node = at.parent


@jit_in_place
def follows(sim: Sim, side: int, i: int) -> bool:
    """Set the candidate of a side aside if another request computes its prefix."""
    state = sim.state[0]
    node = sim.requests[i].node
    while node > 0 and sim.cache.nodes[node].leader == NONE:
        node = sim.cache.nodes[node].parent
    if node <= 0:
        return False
    state.set_aside += 1
    if state.set_aside <= MOST_FOLLOWERS:
        take(sim, side, i)
        sim.requests[i].next_follower = sim.cache.nodes[node].followers
        sim.cache.nodes[node].followers = i
        state.followers_kv += _whole_kv(sim, i)
    return True
