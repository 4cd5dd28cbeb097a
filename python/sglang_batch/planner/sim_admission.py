"""What joins a step of the simulator, and how many prompt tokens are computed in it."""

from __future__ import annotations

from . import kv_forecast as kv
from . import sim_cache as prefix
from .dual_scanner import ScanState, budgets, next_pace, steady_prefill_tokens
from .jit import jit_in_place
from .sim_cache import LOCKED
from .sim_calendar import whole_estimate
from .sim_queue import MOST_FOLLOWERS, candidate, follows, take
from .sim_requests import admit, kv_in_use
from .sim_state import LEFT, NONE, RIGHT, Sim

# A request that did not fit is tried again when something ended, or after this many
# steps, for what it is weighed against moves slowly with the budgets.
_RETRY_STEPS = 32
# Share by which a step may exceed its target where nothing on the right needs company.
_RAMP = 1.5


@jit_in_place
def fits(sim: Sim, i: int, reserved: int) -> bool:
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
    known = r.admitted or r.parked
    estimate = r.estimate if known else whole_estimate(sim, i)
    remaining = max(estimate - r.generated, 1)
    peak = kv.peak(sim.forecast, state.clock, held, remaining) + locked
    return bool(peak + reserved <= sim.engine.kv_capacity * (1.0 - state.margin))


@jit_in_place
def _overtakes(sim: Sim, i: int) -> bool:
    """Whether a request would compute a prefix in room that followers need before."""
    claimed = sim.state[0].followers_kv
    node = sim.requests[i].node
    if (
        claimed == 0
        or prefix.cached_depth(sim.cache, node) == sim.cache.nodes[node].depth
    ):
        return False
    return not fits(sim, i, claimed)


@jit_in_place
def _waits(sim: Sim, side: int) -> bool:
    """Whether a side's next request was found not to fit, and nothing changed."""
    state = sim.state[0]
    if sim.engine.as_sglang:  # it tries at every step
        return False
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
def compute(sim: Sim, side: int, tokens: int) -> tuple[int, float]:
    """Compute up to ``tokens`` tokens of the prompt that a side has begun.

    Returns:
        Tokens computed, and seconds of attention over them.
    """
    state = sim.state[0]
    s = sim.sides[side]
    i = s.partial
    if i == NONE:
        return 0, 0.0
    some = min(s.partial_left, tokens)
    if sim.engine.as_sglang:  # decodes may have taken the KV it counted on
        room = sim.engine.kv_capacity - kv_in_use(sim) - state.decoding
        some = max(0, min(some, room))
    attention = 0.0
    if sim.engine.attention_time_s > 0.0:
        r = sim.requests[i]
        # The one token computed of an empty prompt has none before it.
        before = max(0.0, float(r.input_len + r.generated - s.partial_left))
        attention = sim.engine.attention_time_s * some * (2.0 * before + some)
    s.partial_left -= some
    if s.partial_left == 0:
        sim.lists.starting[state.starting] = i
        state.starting += 1
        s.partial = NONE
    state.prefilled += some
    return int(some), attention


@jit_in_place
def _prefill(sim: Sim, side: int, tokens: int, reserved: int) -> tuple[int, float]:
    """Compute up to ``tokens`` prompt tokens of a side, admitting as needed.

    Args:
        reserved: KV that has to stay free for the other side.

    Returns:
        Tokens computed, and seconds of attention over them.
    """
    s = sim.sides[side]
    done = 0
    attention = 0.0
    s.blocked = 0
    while done < tokens:
        if s.partial == NONE:
            i = candidate(sim, side)
            if i == NONE:
                break
            if sim.engine.as_sglang and follows(sim, side, i):
                if sim.state[0].set_aside > MOST_FOLLOWERS:
                    break
                continue
            if sim.engine.as_sglang and _overtakes(sim, i):
                break
            if _waits(sim, side) or not fits(sim, i, reserved):
                s.blocked = 1
                break
            s.retry_at = 0
            take(sim, side, i)
            admit(sim, i, side)
        some, over = compute(sim, side, tokens - done)
        done += some
        attention += over
        if some == 0:
            break
    return done, attention


@jit_in_place
def compute_begun(sim: Sim, tokens: int) -> tuple[int, float]:
    """Go on with the prompt that was begun on either side."""
    side = LEFT if sim.sides[LEFT].partial != NONE else RIGHT
    return compute(sim, side, tokens)


@jit_in_place
def kv_read_time(sim: Sim) -> float:
    """Seconds to read the KV of all that decode in this step."""
    state = sim.state[0]
    tokens = state.read_base + state.decoding * state.step + state.shared_read
    return float(tokens * sim.engine.kv_read_time_s)


@jit_in_place
def side_reads(sim: Sim, side: int) -> int:
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
    i = candidate(sim, side)
    if i == NONE:
        return 0.0
    r = sim.requests[i]
    return steady_prefill_tokens(float(kv_budget), float(r.own), r.estimate_mean)


@jit_in_place
def _prompt_token_time(sim: Sim) -> float:
    """Compute time of a token of the prompt that the left side computes next."""
    i = sim.sides[LEFT].partial
    if i == NONE:
        i = candidate(sim, LEFT)
    if i == NONE:
        return sim.engine.token_time_s
    r = sim.requests[i]
    # In the mean, its own tokens attend to half of themselves and to all before them;
    # a pair costs attention_time_s twice.
    attended = 2 * r.input_len - r.own
    return float(sim.engine.token_time_s + sim.engine.attention_time_s * attended)


@jit_in_place
def dual_prefill(sim: Sim, target: float) -> tuple[int, float]:
    """Admit from both sides by the dual scanner's budgets."""
    state = sim.state[0]
    left_blocked = sim.sides[LEFT].blocked != 0
    state.pace = next_pace(state.pace, left_blocked)
    left_open = candidate(sim, LEFT) != NONE
    right_open = candidate(sim, RIGHT) != NONE
    used = sim.engine.kv_capacity  # the papers' engine does not fill up by itself
    if sim.engine.as_sglang:
        used = state.private + sim.cache.totals[LOCKED]
    allowed = budgets(
        ScanState(
            sim.engine.kv_capacity,
            used,
            _density_ahead(sim, LEFT),
            _density_ahead(sim, RIGHT),
            left_open,
            right_open,
            target,
            state.decoding,
            kv_read_time(sim),
            side_reads(sim, LEFT),
            side_reads(sim, RIGHT),
            sim.engine.token_time_s,
            _prompt_token_time(sim),
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
    may_join = not left_blocked
    if not sim.engine.as_sglang:
        may_join = may_join and side_reads(sim, RIGHT) < allowed.right_reads
    right = min(limit, max(tokens, sim.engine.min_step_tokens))
    left_kv = sim.sides[LEFT].kv
    if sim.engine.as_sglang:
        left_kv += sim.cache.totals[LOCKED]
    kept = max(0, allowed.left_kv - left_kv)
    if sim.engine.as_sglang:
        # The prompt that was begun goes on first, with all that the step has.
        more = may_join or sim.sides[RIGHT].partial != NONE
        done, attention = compute_begun(sim, right if more else min(limit, tokens))
        sim.sides[LEFT].blocked = 0
    elif not may_join:  # the prompt that was begun goes on, no other begins
        kept = sim.engine.kv_capacity
        may_join = sim.sides[RIGHT].partial != NONE
    if may_join:
        more, over = _prefill(sim, RIGHT, _whole(sim, right - done), kept)
        done += more
        attention += over
    alone = sim.sides[RIGHT].decoding == 0
    if alone and done == 0:
        tokens = max(int(tokens * _RAMP), sim.engine.min_step_tokens)
        if sim.engine.as_sglang:
            done, attention = compute_begun(sim, min(limit, tokens))
    tokens = min(limit, tokens) - done
    if tokens > 0:
        more, over = _prefill(sim, LEFT, _whole(sim, tokens), 0)
        done += more
        attention += over
    if sim.engine.as_sglang and done + state.decoding == 0:
        done, attention = compute_begun(sim, limit)
    for side in (RIGHT, LEFT):
        if done + state.decoding == 0:  # whatever the budgets, something goes on
            done, attention = _prefill(sim, side, limit, 0)
    return done, attention


@jit_in_place
def static_prefill(sim: Sim) -> tuple[int, float]:
    """Fill the step with the prompts next in order."""
    limit = max(0, sim.engine.step_tokens - sim.state[0].decoding)
    return _prefill(sim, LEFT, _whole(sim, limit), 0)
