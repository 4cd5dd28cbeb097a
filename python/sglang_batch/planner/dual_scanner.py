"""The dual scanner: what to admit next so that every step has the job's density.

The order of a dual-scan plan runs from the most compute-intensive requests (left) to
the most memory-intensive ones (right). The scanner takes requests from both ends at
once. One step of it, :func:`budgets`, is a pure function from the state of the engine
to what may be admitted: KV for either side and tokens to prefill. The simulator and
the scheduler inside SGLang both drive this same function.

From BlendServe (ASPLOS'26): the KV split of section 5.3 and the prefill budgets of
Algorithm 3. Ours: the prefill budget is closed by feedback. Where Algorithm 3 computes
how many prompt tokens a step needs *on average* at the planned lengths,
``closed_loop`` takes as many as *this* step needs: with the KV its decodes really read,
its compute time comes to the target density. The target is the density of what remains
of the job; while the plan holds that is the root's density, as in the paper.
"""

from __future__ import annotations

from typing import NamedTuple

from .jit import jit

# A step without room for the left side lowers the pace by this share of it, any other
# step raises it by this much.
_PACE_DOWN = 0.02
_PACE_UP = 0.001
MIN_PACE = 0.3
# Sides whose densities differ by less than this factor have nothing to blend.
_SIMILAR = 1.25


class ScanState(NamedTuple):
    """The engine at the start of a step.

    kv_capacity: tokens of KV there is room for.
    kv_used: those that running requests hold.
    left_density, right_density: compute density of the requests next in turn on
        either side.
    left_open, right_open: whether that side has requests waiting.
    target_density: compute density that the step should have.
    decode_tokens: requests that decode in this step.
    kv_read_time_s: time this step's decodes need to read their KV.
    left_reads, right_reads: tokens of KV that a side's decodes read, shared ones each
        time.
    token_time_s: compute time of one token.
    prompt_token_time_s: that of the left side's next prompt tokens, attention over what
        comes before them included.
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
    left_reads: int
    right_reads: int
    token_time_s: float
    prompt_token_time_s: float
    pace: float


class ScanBudgets(NamedTuple):
    """What may be in use after this step's admissions.

    left_kv, right_kv: tokens of KV for the requests of either side.
    right_reads: tokens of KV that the right side's decodes may read in a step. The
        sides share memory time as they share KV; a long prefix that many read takes
        little KV and much time.
    prefill_tokens: prompt tokens to compute in this step.
    """

    left_kv: int
    right_kv: int
    right_reads: int
    prefill_tokens: int


@jit
def split_kv(
    kv_capacity: float, left_density: float, right_density: float, target: float
) -> tuple[float, float]:
    """KV for the left and the right side, in the unit of ``kv_capacity``.

    Solves ``M_L + M_R = M`` and ``M_L rho_L + M_R rho_R = M rho`` (BlendServe 5.3).
    Where the target does not lie between the two sides, the nearer one takes all.
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
    """How fast the left side goes, 0.3 to 1, after a step.

    A left side that has filled its KV would otherwise go in fits: prompts at the full
    rate until nothing fits, then none until something ends. Slower, its requests find
    room as they come, and the steps keep one density.
    """
    if left_blocked:
        return max(MIN_PACE, pace * (1.0 - _PACE_DOWN))
    return min(1.0, pace + _PACE_UP)


@jit
def _only_to_fill(state: ScanState) -> bool:
    """Whether there is nothing to blend, and KV is half empty.

    Requests of one density keep the density of a step whatever their number, and
    would stay as few as they are. So would those of the left side that cannot reach
    the target by themselves: what they read decides how many of them may come.
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
    """One step of the scanner."""
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
    right_reads = right * amplified
    if _only_to_fill(state):
        right_reads = 1e18
    elif state.token_time_s > 0.0:
        compute_s = state.target_density * state.kv_read_time_s
        compute_s -= state.decode_tokens * state.token_time_s
        tokens = compute_s / state.prompt_token_time_s * state.pace
    return ScanBudgets(
        int(left),
        int(right),
        int(min(right_reads, 1e18)),
        int(max(0.0, min(tokens, 1e9))),
    )
