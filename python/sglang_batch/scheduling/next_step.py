"""Chooses the requests that join the next step, and the number of prompt tokens.

A step has the decodes of all running requests, and prompt tokens. Orders that are
followed fill every step up to its limit (``step_filling``). The dual scanner takes requests
from both ends of an order, so that every step has the compute density of the remaining
work; its state machine, ``planner.admission_rules.dual_scanner``, is shared with the simulator.

The jobs of one priority are scanned together. The next request is that of the job with the
least work, done or begun (``job_work``). Nobody overtakes it until it fits, so a request
that needs much KV does not starve. Then the other jobs join until they had as much. If
one of the jobs is taken from both ends, there is one budget of density for all. A job
that it puts behind the others by the prompts of a full step catches up without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..planner.admission_rules.dual_scanner import (
    ScanBudgets,
    ScanState,
    budgets,
    next_pace,
)
from ..planner.requests import LEFT, RIGHT
from .job_plan import StepCost
from .job_state import JobState
from .job_work import density_of
from .kv_accounting import KvAccounting
from .open_jobs import ScanPace
from .scheduled_request import ScheduledRequest
from .step_filling import Choice, EngineNow, Filling


def choose(
    jobs: Sequence[JobState],
    kv_accounting: KvAccounting,
    now: EngineNow,
    scan: ScanPace,
) -> Choice:
    """Fill the next step from the jobs of one priority.

    The chosen requests leave the backlog and count as running. :func:`put_back` reverts
    that for a request that could not join after all.
    """
    filling = Filling(jobs, kv_accounting, now)
    limit = now.prompt_tokens
    waiting = [job for job in jobs if job.backlog.count]
    if any(job.dual for job in waiting or jobs):
        take_from_both_ends(filling, limit, scan)
    else:
        filling.continue_chunk(limit)
        filling.take(LEFT, limit, 0)
        filling.take_ahead(limit)
    choice = filling.choice
    if choice.tokens == 0 and now.decode_rows == 0:
        filling.continue_chunk(max(limit, now.page_size))
    filling.release_held()
    return choice


def put_back(
    job: JobState, kv_accounting: KvAccounting, request: ScheduledRequest
) -> None:
    """Return a chosen request that could not join to the backlog."""
    kv_accounting.undo_admit(request)
    if request.leaf >= 0:
        job.leave(request, offloaded=True)
    job.backlog.add(request)


# Factor by which a step may exceed its target while no request of the right side runs.
_RAMP = 1.5


def take_from_both_ends(filling: Filling, limit: int, scan: ScanPace) -> None:
    """Fill a step by the dual scanner's budgets.

    Args:
        limit: most prompt tokens of the step.
    """
    kv_accounting, now = filling.kv_accounting, filling.now
    if _catches_up(filling, limit, scan):
        return
    scan.pace = next_pace(scan.pace, scan.left_blocked)
    allowed = _budgets(filling, scan)
    tokens = allowed.prefill_tokens
    least = max(filling.jobs[0].plan.min_step_tokens, allowed.least_tokens)
    if not now.mixed:
        tokens = _saved_up(scan, now, tokens)
        if not tokens and now.decode_rows:
            return
    right = min(limit, max(tokens, least))
    if now.apart(right):
        # The decodes wait until prompts have ended: in one step rather than in several.
        filling.whole_tokens = limit
        tokens -= scan.ahead_tokens
        least -= scan.ahead_tokens
        right -= scan.ahead_tokens
    # If the left side did not fit last time, it goes first. Otherwise the right side
    # goes first: the more it reads, the more prompt tokens the left side may compute.
    may_join = not scan.left_blocked
    if now.chunk is not None:
        more = may_join or now.chunk.side == RIGHT
        filling.continue_chunk(right if more else min(limit, tokens))
    if may_join:
        filling.take(RIGHT, right, _left_kv(filling, allowed))
    # While no request of the right side decodes, the left side need not hold back.
    if kv_accounting.decoding[RIGHT] == 0 and filling.choice.tokens == 0:
        tokens = max(int(tokens * _RAMP), least)
        filling.continue_chunk(min(limit, tokens))
    scan.left_blocked = filling.take(LEFT, min(limit, tokens), 0)
    if filling.whole_tokens:
        scan.ahead_tokens = max(0, filling.choice.tokens - right)
    for side in (RIGHT, LEFT):
        # A step must not be empty, whatever the budgets.
        if filling.choice.tokens == 0 and now.decode_rows == 0 and now.chunk is None:
            filling.take(side, limit, 0)


def _catches_up(filling: Filling, limit: int, scan: ScanPace) -> bool:
    """Let a job that is behind the others join at the full rate.

    Returns:
        Whether it found no room, so that nobody else may join.
    """
    if len(filling.jobs) == 1:
        return False
    turn = filling.in_turn()
    if len(turn) > 1 or not any(
        job.backlog.count for job in filling.jobs if job not in turn
    ):
        return False
    (behind,) = turn
    filling.continue_chunk(limit)
    if behind.dual:
        filling.take(RIGHT, limit, _left_kv(filling, _budgets(filling, scan)), behind)
    return filling.take(LEFT, limit, 0, behind)


def _left_kv(filling: Filling, allowed: ScanBudgets) -> int:
    """KV that has to stay free for requests of the left side, in tokens."""
    # Most shared prefixes are those of the left side.
    left_kv = filling.kv_accounting.kv[LEFT] + filling.locked_tokens
    return max(0, allowed.left_kv - left_kv)


def _saved_up(scan: ScanPace, now: EngineNow, tokens: int) -> int:
    """Prompt tokens of this step if a step has either prompts or decodes.

    The tokens that each step may take are saved up until they fill a step.
    """
    scan.saved_tokens = min(scan.saved_tokens + tokens, now.prompt_tokens)
    if scan.saved_tokens < now.prompt_tokens and now.decode_rows:
        return 0
    saved, scan.saved_tokens = scan.saved_tokens, 0
    return saved


def _budgets(filling: Filling, scan: ScanPace) -> ScanBudgets:
    """The budgets of a step, for the jobs whose turn it is."""
    kv_accounting, now = filling.kv_accounting, filling.now
    jobs = filling.in_turn() or [*filling.jobs]
    cost = jobs[0].plan.cost
    left = _density(jobs, LEFT)
    right = _density(jobs, RIGHT)
    on_left = now.chunk if now.chunk is not None and now.chunk.side == LEFT else None
    return budgets(
        ScanState(
            kv_accounting.capacity,
            sum(kv_accounting.kv) + filling.locked_tokens,
            1.0 if left is None else left,
            1.0 if right is None else right,
            left is not None,
            right is not None,
            density_of([job.work for job in jobs]),
            now.decode_rows,
            cost.kv_read_time_s * sum(kv_accounting.reads),
            cost.kv_read_time_s * kv_accounting.capacity,
            cost.weight_read_time_s,
            cost.interference_exponent,
            kv_accounting.reads[LEFT],
            kv_accounting.reads[RIGHT],
            cost.token_time_s,
            _prompt_token_time(cost, on_left or jobs[0].backlog.first()),
            scan.pace,
        )
    )


def _density(jobs: Sequence[JobState], side: int) -> float | None:
    """Mean density of the jobs' next requests on one side. None if there is none."""
    nexts = [
        job.density_at(request)
        for job in jobs
        if (request := job.backlog.first() if side == LEFT else job.backlog.last())
    ]
    return sum(nexts) / len(nexts) if nexts else None


def _prompt_token_time(cost: StepCost, request: ScheduledRequest | None) -> float:
    """Compute time of a prompt token in seconds, including its share of attention."""
    if request is None:
        return cost.token_time_s
    # On average, its own tokens attend to half of themselves and to all tokens before
    # them. A pair costs attention_time_s twice.
    attended = 2 * request.input_len - request.own
    return cost.token_time_s + cost.attention_time_s * attended
