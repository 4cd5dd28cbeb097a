"""Admission to a step of the simulator, and the prompt tokens computed in it.

The order of the questions is that of ``scheduling.next_step``, whose requests are objects of a
running engine, with rows, pages, chunks and adapters. Here they are compiled rows of arrays.
So the two share the rules that are numbers, which are in ``planner.admission_rules``: whether
KV fits, the dual scanner's budgets, and how many followers are looked past.

Functions that compute prompts return the tokens computed and the seconds of attention.
"""

from __future__ import annotations

from ..admission_rules import kv_forecast as kv
from ..admission_rules.dual_scanner import (
    RAMP,
    ScanBudgets,
    ScanState,
    budgets,
    next_pace,
    steady_prefill_tokens,
)
from ..admission_rules.followers import MOST_FOLLOWERS
from ..compiled import jit_in_place
from ..costs.cost_model import mixing_loss_s, tokens_read
from ..machine_model import has_room, share
from ..requests import LEFT, RIGHT
from . import prefix_cache as prefix
from .engine_state import NONE, Sim, in_pages
from .prefix_cache import LOCKED, NODES
from .request_stages import (
    admit,
    candidate,
    decode_kv,
    follows,
    growth,
    kv_in_use,
    leads,
    rounded_est_decode_steps,
    take,
)

# A request that did not fit is tried again when a request has ended, or after this many
# steps, because the budgets change slowly.
_RETRY_STEPS = 32


@jit_in_place
def fits(sim: Sim, i: int, reserved: int) -> bool:
    """Whether a row is free and the KV of a request fits, as :func:`_kv_fits` says."""
    if sim.state.running >= sim.engine.max_running:
        return False
    return _kv_fits(sim, i, reserved)


@jit_in_place
def _kv_fits(sim: Sim, i: int, reserved: int) -> bool:
    """Whether a request's KV fits now and, by the forecast, until it ends, next to
    ``reserved`` tokens."""
    state = sim.state
    if state.running == 0:
        return True
    r = sim.requests[i]
    tokens, number = prefix.newly_locked(sim.cache, r.node)
    known = r.admitted or r.offloaded
    steps = r.est_decode_steps if known else rounded_est_decode_steps(sim, i)
    if sim.engine.second.capacity > 0:
        number += sim.cache.totals[NODES]
        units = share(sim.engine.second, r.own, steps)
        held = state.pool_held
        if not has_room(sim.engine.second, held, units, number, state.margin):
            return False
    held, remaining = growth(sim, i, r.generated, steps)
    most = sim.engine.kv_capacity * (1.0 - state.margin)
    others = sim.cache.totals[LOCKED] + tokens + reserved
    return bool(kv.fits(sim.forecast, state.clock, held, remaining, others, most))


@jit_in_place
def overtakes(sim: Sim, i: int) -> bool:
    """Whether a request would compute a prefix in KV that followers need first."""
    claimed = sim.state.followers_kv
    node = sim.requests[i].node
    if (
        claimed == 0
        or prefix.kept_depth(sim.cache, node) == sim.cache.nodes[node].depth
    ):
        return False
    return not _kv_fits(sim, i, claimed)


@jit_in_place
def _waits(sim: Sim, side: int) -> bool:
    """Whether a side's next request did not fit, and nothing has changed since."""
    state = sim.state
    if sim.engine.as_sglang:  # which tries in every step
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
def _count_prompt(sim: Sim, tokens: int) -> None:
    """A prompt is computed in this step, up to so many of its tokens."""
    state = sim.state
    state.prompts += 1
    state.context += tokens
    state.squares += float(tokens) ** 2


@jit_in_place
def compute(sim: Sim, side: int, tokens: int) -> tuple[int, float]:
    """Compute up to ``tokens`` tokens of a side's partly computed prompt."""
    state = sim.state
    s = sim.sides[side]
    i = s.partial
    if i == NONE:
        return 0, 0.0
    r = sim.requests[i]
    begin = r.input_len + r.generated - s.partial_left
    some = min(s.partial_left, tokens)
    stop = prefix.next_stop(sim.cache, i, r.node, begin)
    if begin < stop < begin + some:
        some = stop - begin
        state.cut = 1
    if sim.engine.as_sglang:  # decodes may have taken the KV
        if some < s.partial_left:
            some = min(in_pages(sim, some), s.partial_left)
        free = sim.engine.kv_capacity - kv_in_use(sim) - decode_kv(sim)
        some = max(0, min(some, free))
    s.partial_left -= some
    if s.partial_left == 0:
        s.partial = NONE
        _prompt_done(sim, i)
    state.prefilled += some
    if some > 0:
        _count_prompt(sim, begin + some)
    return int(some), _attention_time(sim, begin, some)


@jit_in_place
def _attention_time(sim: Sim, begin: int, tokens: int) -> float:
    """Seconds of attention of prompt tokens from ``begin`` on."""
    # Of an empty prompt one token is computed, with none before it.
    before = max(0.0, float(begin))
    return float(sim.engine.attention_time_s * tokens * (2.0 * before + tokens))


@jit_in_place
def _prompt_done(sim: Sim, i: int) -> None:
    state = sim.state
    sim.places[state.starting].starting = i
    state.starting += 1


@jit_in_place
def _joins_whole(sim: Sim, i: int, tokens: int) -> bool:
    """Whether a request can join next to a prompt that was cut: as SGLang knows one prompt
    that is partly computed, with all of its own, and without prefixes for others."""
    r = sim.requests[i]
    kept = prefix.kept_depth(sim.cache, r.node)
    extend = max(1, r.input_len + r.generated - kept)
    free = sim.engine.kv_capacity - kv_in_use(sim) - decode_kv(sim)
    return bool(extend <= min(tokens, free) and not leads(sim.cache, r.node, kept))


@jit_in_place
def _join_whole(sim: Sim, i: int, side: int) -> tuple[int, float]:
    """Admit a request and compute its prompt, next to the one that was cut."""
    s, r = sim.sides[side], sim.requests[i]
    partial, partial_left = s.partial, s.partial_left
    admit(sim, i, side)
    some = s.partial_left
    s.partial, s.partial_left = partial, partial_left
    _prompt_done(sim, i)
    sim.state.prefilled += some
    begin = r.input_len + r.generated - some
    _count_prompt(sim, begin + some)
    return int(some), _attention_time(sim, begin, some)


@jit_in_place
def _prefill(sim: Sim, side: int, tokens: int, reserved: int) -> tuple[int, float]:
    """Compute up to ``tokens`` prompt tokens of a side, admitting as needed, and keep ``reserved``
    tokens of KV free for the other side."""
    s, state = sim.sides[side], sim.state
    whole = int(state.whole_tokens)
    done = 0
    attention = 0.0
    s.blocked = 0
    while done < tokens:
        if s.partial == NONE or state.cut:
            i = candidate(sim, side)
            if i == NONE:
                break
            if sim.engine.as_sglang and follows(sim, side, i):
                if state.held_back > MOST_FOLLOWERS:
                    break
                continue
            if sim.engine.as_sglang and overtakes(sim, i):
                break
            if _waits(sim, side) or not fits(sim, i, reserved):
                s.blocked = 1
                break
            if state.cut and not _joins_whole(sim, i, max(tokens, whole) - done):
                s.blocked = 1
                break
            s.retry_at = 0
            take(sim, side, i)
            # The plan does not know of these tokens, so that they come on top.
            tokens += prefix.without_state(sim.cache, sim.requests[i].node)
            if state.cut:
                some, over = _join_whole(sim, i, side)
                done += some
                attention += over
                continue
            admit(sim, i, side)
        some, over = compute(sim, side, max(tokens, whole) - done)
        done += some
        attention += over
        if some == 0:
            break
    return done, attention


@jit_in_place
def compute_begun(sim: Sim, tokens: int) -> tuple[int, float]:
    """Continue the partly computed prompt of either side."""
    side = LEFT if sim.sides[LEFT].partial != NONE else RIGHT
    return compute(sim, side, tokens)


@jit_in_place
def kv_reads(sim: Sim) -> float:
    """Tokens of KV whose reading takes as long as that of all requests that decode."""
    state = sim.state
    tokens = float(state.read_base + state.decoding * state.step + state.shared_read)
    longest, rows, engine = float(state.longest), float(state.decoding), sim.engine
    return float(tokens_read(tokens, longest, rows, engine.row_share, engine.padded))


@jit_in_place
def side_reads(sim: Sim, side: int) -> int:
    """KV tokens that a side's decodes read, shared ones once per request."""
    s = sim.sides[side]
    return int(s.read_base + s.decoding * sim.state.step)


@jit_in_place
def _density_ahead(sim: Sim, side: int) -> float:
    state = sim.state
    position = state.next_left if side == LEFT else state.next_right
    return float(sim.places[min(max(position, 0), len(sim.places) - 1)].density)


@jit_in_place
def _steady_tokens(sim: Sim, side: int, kv_budget: int) -> float:
    """A side's prefill budget by BlendServe's Algorithm 3, for its next request."""
    i = candidate(sim, side)
    if i == NONE:
        return 0.0
    r = sim.requests[i]
    return steady_prefill_tokens(
        float(kv_budget), float(r.own), r.est_decode_steps_mean
    )


@jit_in_place
def _prompt_token_time(sim: Sim) -> float:
    """Seconds to compute a token of the left side's next prompt."""
    i = sim.sides[LEFT].partial
    if i == NONE:
        i = candidate(sim, LEFT)
    if i == NONE:
        return sim.engine.token_time_s
    r = sim.requests[i]
    # On average, its own tokens attend to half of themselves and to all tokens before
    # them. A pair costs attention_time_s twice.
    attended = 2 * r.input_len - r.own
    return float(sim.engine.token_time_s + sim.engine.attention_time_s * attended)


@jit_in_place
def _scan_budgets(sim: Sim, target: float) -> ScanBudgets:
    """The dual scanner's budgets for this step."""
    state = sim.state
    left_open = candidate(sim, LEFT) != NONE
    right_open = candidate(sim, RIGHT) != NONE
    # The papers' engine has no rule to fill a half-empty KV cache: count it as full.
    used = sim.engine.kv_capacity
    if sim.engine.as_sglang:
        used = state.private + sim.cache.totals[LOCKED]
    return budgets(
        ScanState(
            sim.engine.kv_capacity,
            used,
            _density_ahead(sim, LEFT),
            _density_ahead(sim, RIGHT),
            left_open,
            right_open,
            target,
            state.decoding,
            kv_reads(sim) * sim.engine.kv_read_time_s,
            sim.engine.kv_capacity * sim.engine.kv_read_time_s,
            sim.engine.weight_read_time_s,
            max(sim.engine.interference_exponent, sim.engine.split_exponent),
            side_reads(sim, LEFT),
            side_reads(sim, RIGHT),
            sim.engine.token_time_s,
            _prompt_token_time(sim),
            state.pace,
        )
    )


@jit_in_place
def _prefill_tokens(sim: Sim, allowed: ScanBudgets) -> int:
    """Prompt tokens that the budgets allow in this step."""
    if sim.engine.closed_loop:
        return allowed.prefill_tokens
    left_tokens = _steady_tokens(sim, LEFT, allowed.left_kv)
    return int(left_tokens + _steady_tokens(sim, RIGHT, allowed.right_kv))


@jit_in_place
def _prefill_right(
    sim: Sim, allowed: ScanBudgets, tokens: int, right: int, limit: int,
    left_blocked: bool,
) -> tuple[int, float]:  # fmt: skip
    """Continue the partly computed prompt as in SGLang, then prefill the right side.

    Args:
        tokens: prompt tokens that the budgets allow.
        right: prompt tokens that the right side may have.
        limit: prompt tokens that the step can hold.
    """
    done, attention = 0, 0.0
    # A left side without KV has precedence.
    may_join = not left_blocked
    if not sim.engine.as_sglang:
        may_join = may_join and side_reads(sim, RIGHT) < allowed.right_reads
    left_kv = sim.sides[LEFT].kv
    if sim.engine.as_sglang:
        left_kv += sim.cache.totals[LOCKED]
    kept = max(0, allowed.left_kv - left_kv)
    if sim.engine.as_sglang:
        # The partly computed prompt is first, with all tokens of the step.
        whole_step = may_join or sim.sides[RIGHT].partial != NONE
        some = right if whole_step else min(limit, tokens)
        done, attention = compute_begun(sim, max(some, int(sim.state.whole_tokens)))
        sim.sides[LEFT].blocked = 0
    elif not may_join:  # continue the partly computed prompt, begin no other
        kept = sim.engine.kv_capacity
        may_join = sim.sides[RIGHT].partial != NONE
    if may_join:
        more, over = _prefill(sim, RIGHT, right - done, kept)
        done += more
        attention += over
    return done, attention


@jit_in_place
def apart(sim: Sim, tokens: int) -> bool:
    """Whether a step with so many tokens of prompts leaves the decodes to the next one."""
    decoding = sim.state.decoding
    if tokens <= 0 or decoding == 0:
        return False
    loss = mixing_loss_s(
        sim.engine.mixing, float(tokens), float(decoding), kv_reads(sim)
    )
    return bool(loss > 0.0)


@jit_in_place
def prompt_begun(sim: Sim) -> bool:
    """Whether a prompt is partly computed."""
    return bool(sim.sides[LEFT].partial != NONE or sim.sides[RIGHT].partial != NONE)


@jit_in_place
def _nobody_can_join(sim: Sim) -> bool:
    """Whether no row is free. Then the scheduler does not look at the next requests."""
    return bool(not prompt_begun(sim) and sim.state.running >= sim.engine.max_running)


@jit_in_place
def dual_prefill(sim: Sim, target: float) -> tuple[int, float]:
    """Admit from both sides by the dual scanner's budgets."""
    state = sim.state
    if sim.engine.as_sglang and _nobody_can_join(sim):
        return 0, 0.0
    left_blocked = sim.sides[LEFT].blocked != 0
    state.pace = next_pace(state.pace, left_blocked)
    allowed = _scan_budgets(sim, target)
    tokens = _prefill_tokens(sim, allowed)
    limit = max(0, sim.engine.step_tokens - state.decoding)
    # Whatever the density of the step.
    least = int(sim.engine.min_step_tokens)
    if sim.engine.closed_loop:
        least = max(least, allowed.least_tokens)
    right = min(limit, max(tokens, least))
    whole = sim.engine.as_sglang and apart(sim, right)
    if sim.engine.as_sglang:
        # The decodes wait until prompts have ended: in one step rather than in several.
        state.whole_tokens = limit if whole else 0
    if whole:
        tokens -= state.ahead_tokens
        least -= state.ahead_tokens
        right -= state.ahead_tokens
    done, attention = _prefill_right(sim, allowed, tokens, right, limit, left_blocked)
    alone = sim.sides[RIGHT].decoding == 0
    if alone and done == 0:
        tokens = max(int(tokens * RAMP), least)
        if sim.engine.as_sglang:
            done, attention = compute_begun(sim, min(limit, tokens))
    tokens = min(limit, tokens) - done
    if tokens > 0:
        more, over = _prefill(sim, LEFT, tokens, 0)
        done += more
        attention += over
    if whole:
        state.ahead_tokens = max(0, done - right)
    if sim.engine.as_sglang and done + state.decoding == 0:
        done, attention = compute_begun(sim, limit)
    for side in (RIGHT, LEFT):
        if done + state.decoding == 0:  # an empty step would stall the job
            done, attention = _prefill(sim, side, limit, 0)
    return done, attention


@jit_in_place
def static_prefill(sim: Sim) -> tuple[int, float]:
    """Fill the step with the next prompts of the order."""
    limit = max(0, sim.engine.step_tokens - sim.state.decoding)
    return _prefill(sim, LEFT, limit, 0)
