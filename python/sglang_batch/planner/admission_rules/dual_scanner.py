"""The dual scanner: admission budgets that give every step the job's density.

The order of a dual-scan plan runs from the most compute-intensive requests (left) to
the most memory-intensive ones (right), and requests are taken from both ends at once. One
step, :func:`budgets`, is a pure function from the state of the engine to KV for either side
and tokens to prefill, which the simulator and the scheduler inside SGLang both call.

From BlendServe (ASPLOS'26): the KV split of section 5.3 and the prefill budgets of
Algorithm 3, which are the prompt tokens that a step needs *on average* at the estimated
lengths. Our ``closed_loop`` takes as many as *this* step needs to reach the target density,
given the KV that its decodes really read. The target is the density of the remaining work,
the root's as in the paper while the plan holds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..compiled import jit
from ..costs.cost_model import overlapped

# A step without KV for the left side lowers the pace by this share of it. Any other step
# raises it by this much.
_PACE_DOWN = 0.02
_PACE_UP = 0.001
MIN_PACE = 0.3
# Factor by which a step may exceed its target while no request of the right side decodes.
RAMP = 1.5
# Share of the KV cache that steps read at most if compute is nearly all of the work, and how
# much more they may read at a density of 1.
_LEAST_FULL = 0.35
_MORE_FULL = 1.25
# Share of the job's compute time that is lost for each KV cache that steps read, if compute
# and reads overlap completely. Fitted to simulated jobs with prompts of 10,000 to 100,000
# tokens (``benchmark/bench_order.py``).
_UNEVEN = 0.025
_NO_LIMIT = 1e9
# With densities that differ by less than this factor, there is nothing to blend.
_SIMILAR = 1.25


class ScanState(NamedTuple):
    """The engine at the start of a step.

    kv_capacity: KV cache size in tokens.
    kv_used: KV tokens that running requests hold.
    left_density, right_density: compute density of the next requests of each side.
    left_open, right_open: whether that side has waiting requests.
    target_density: compute density that the step should have.
    decode_tokens: requests that decode in this step.
    kv_read_time_s, full_read_time_s, weight_read_time_s: seconds to read the KV of this step's
        decodes, ``kv_capacity`` tokens of KV, and the weights.
    interference_exponent: k of the overlap law, see ``cost_model.overlapped``.
    left_reads, right_reads: KV tokens that a side's decodes read, shared ones once per
        request.
    token_time_s, prompt_token_time_s: compute time of one token, and of one of the left side's
        next prompt with attention over the tokens before it, in seconds.
    pace: see :func:`next_pace`.
    """

    kv_capacity: int
    kv_used: int
    left_density: float
    right_density: float
    left_open: bool
    right_open: bool
    target_density: float
    decode_tokens: int
    kv_read_time_s: float
    full_read_time_s: float
    weight_read_time_s: float
    interference_exponent: float
    left_reads: int
    right_reads: int
    token_time_s: float
    prompt_token_time_s: float
    pace: float


class ScanBudgets(NamedTuple):
    """Limits after this step's admissions.

    left_kv, right_kv: KV tokens for the requests of each side.
    right_reads: KV tokens that the right side's decodes may read in a step: a long prefix
        with many readers takes little KV and much time.
    prefill_tokens: prompt tokens to compute in this step.
    least_tokens: prompt tokens that the right side may always compute in a step, and
        either side while nobody decodes on the right.
    """

    left_kv: int
    right_kv: int
    right_reads: int
    prefill_tokens: int
    least_tokens: int


@jit
def split_kv(
    kv_capacity: float, left_density: float, right_density: float, target: float
) -> tuple[float, float]:
    """KV for the left and the right side, in the unit of ``kv_capacity``.

    Solves ``M_L + M_R = M`` and ``M_L rho_L + M_R rho_R = M rho`` (BlendServe 5.3). If
    the target is not between the two densities, the nearer side takes all.
    """
    if left_density <= right_density or target >= left_density:
        return kv_capacity, 0.0
    if target <= right_density:
        return 0.0, kv_capacity
    share = (target - right_density) / (left_density - right_density)
    return kv_capacity * share, kv_capacity * (1.0 - share)


@jit
def steady_prefill_tokens(kv: float, input_len: float, output_len: float) -> float:
    """Prompt tokens per step that keep ``kv`` tokens of KV filled.

    With ``N = kv / (p + d/2)`` requests decoding, ``N / d`` of them end in a step and
    as many prompts of ``p`` tokens take their place (BlendServe, Algorithm 3: C_x).
    """
    if output_len <= 0.0:
        return kv
    return kv / (input_len + output_len / 2.0) * input_len / output_len


@jit
def next_pace(pace: float, left_blocked: bool) -> float:
    """The factor of the left side's prefill rate after a step, 0.3 to 1.

    Without it, a left side that has filled its KV would alternate: prompts at the full
    rate until none fits, then none until a request ends.
    """
    if left_blocked:
        return max(MIN_PACE, pace * (1.0 - _PACE_DOWN))
    return min(1.0, pace + _PACE_UP)


@jit
def full_step(
    target: float, full_read_time_s: float, weight_read_time_s: float, k: float
) -> float:
    """Memory time to which steps grow, as a share of ``full_read_time_s``.

    If nothing limits them, the requests of a side grow in number until the KV is full, and then
    no prompt fits for many steps. Where decodes hold the KV for long, that is rare, and the KV is
    best filled. Where most of the work is compute, a few long prompts fill the KV, and half of it
    is best left free.

    Smaller steps are more, and each reads the weights. That is worth it if reading is
    hidden behind compute, and not without overlap.
    """
    share = _LEAST_FULL + _MORE_FULL / max(target * target, 1e-9)
    if weight_read_time_s == 0.0:
        return share
    # Seconds by which the job takes longer for each second of reading.
    felt = (1.0 / max(1.0, overlapped(target, 1.0, k))) ** (k - 1.0)
    weights = felt * weight_read_time_s / max(full_read_time_s, 1e-30)
    uneven = _UNEVEN * (1.0 - 1.0 / k) * target
    # The share at which weights / share + uneven * share is least.
    if weights > uneven * share * share:
        return math.sqrt(weights / uneven) if uneven > 0.0 else _NO_LIMIT
    return share


@jit
def _only_to_fill(state: ScanState) -> bool:
    """Whether there is nothing to blend while the KV cache is half empty.

    With requests of one density, the density of a step does not depend on their number,
    and the budgets would keep them few. The same holds for requests of the left side
    that cannot reach the target: the KV they read limits how many are admitted.
    """
    if 2 * state.kv_used >= state.kv_capacity:
        return False
    if not state.right_open:
        return state.right_reads == 0
    if not state.left_open:
        return True
    if state.target_density >= state.left_density:
        return True
    return state.left_density <= _SIMILAR * state.right_density


@jit
def budgets(state: ScanState) -> ScanBudgets:
    capacity = float(state.kv_capacity)
    if state.left_open and state.right_open:
        left, right = split_kv(
            capacity, state.left_density, state.right_density, state.target_density
        )
    elif state.left_open:
        left, right = capacity, 0.0
    else:
        left, right = 0.0, capacity
    amplified = max(1.0, state.left_reads / max(1.0, left))
    tokens = 1e9
    least_tokens = 0.0
    right_reads = right * amplified
    full = full_step(
        state.target_density,
        state.full_read_time_s,
        state.weight_read_time_s,
        state.interference_exponent,
    )
    most_read_time_s = full * state.full_read_time_s
    pace = state.pace
    read_time_s = min(state.kv_read_time_s, most_read_time_s)
    if _only_to_fill(state):
        right_reads, pace, read_time_s = 1e18, 1.0, most_read_time_s
    if state.token_time_s > 0.0:
        compute_s = state.target_density * read_time_s
        compute_s -= state.decode_tokens * state.token_time_s
        tokens = compute_s / state.prompt_token_time_s * pace
        least_s = state.target_density * min(
            most_read_time_s / 2.0, state.full_read_time_s
        )
        least_tokens = least_s / state.prompt_token_time_s
    return ScanBudgets(
        int(left),
        int(right),
        int(min(right_reads, 1e18)),
        int(max(0.0, min(tokens, 1e9))),
        int(max(0.0, min(least_tokens, 1e9))),
    )
