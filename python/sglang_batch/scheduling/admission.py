"""What joins the next step: which requests, and how many prompt tokens.

A step holds the decodes of all running requests and prompt tokens beside them. Orders
that are followed fill every step up to its limit. The dual scanner takes requests from
both ends of the order so that every step has the compute density of the job
(``planner.dual_scanner`` is its state machine; the simulator drives the same one).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..planner.dual_scanner import ScanBudgets, ScanState, budgets, next_pace
from .job_plan import StepCost
from .job_state import JobState
from .line import LEFT, RIGHT, Line
from .occupancy import Occupancy

# Share by which a step may exceed its target where nothing on the right needs company.
_RAMP = 1.5
# Followers set aside in one step at most: a large group must not hold a step up.
_MOST_FOLLOWERS = 256


class EngineNow(NamedTuple):
    """The engine before a step.

    step_tokens: most tokens in the step, of prompts and decodes together.
    decode_rows: running requests that decode.
    chunk: the line whose prompt is partly computed, and ``chunk_left`` tokens of it
        that are not.
    rows: requests that can join before the engine's limit is reached.
    room: tokens of KV that are free or can be evicted, without what is kept for later.
    page_size: KV is given out in pages of so many tokens.
    mixed: whether decodes and prompts share a step; otherwise a step with prompts has
        no decodes.
    locked_elsewhere: tokens of shared prefixes that other jobs' requests use.
    chunk_room: most tokens of ``chunk`` that there is room for, in whole pages. Its KV
        was counted when it joined, but pages are not full to the last token and others
        may have outlived their estimates.
    idle_frees: whether letting go of what the job keeps for later makes room; not where
        other jobs may keep the same.
    """

    step_tokens: int
    decode_rows: int
    chunk: Line | None
    chunk_left: int
    rows: int
    room: int
    page_size: int
    mixed: bool = True
    locked_elsewhere: int = 0
    chunk_room: int = 1 << 62
    idle_frees: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Most prompt tokens in the step."""
        return max(0, self.step_tokens - (self.decode_rows if self.mixed else 0))


@dataclass(slots=True)
class Choice:
    """What joins: ``lines`` in this order, and in all ``tokens`` prompt tokens.

    room_needed: tokens of KV that these and the decodes take in this step.
    """

    lines: list[Line] = field(default_factory=list)
    tokens: int = 0
    room_needed: int = 0


def choose(job: JobState, occupancy: Occupancy, now: EngineNow) -> Choice:
    """Fill the next step from one job.

    The lines chosen are out of its backlog and count as running;
    :func:`put_back` undoes that for one that could not join after all.
    """
    filling = _Filling(job, occupancy, now)
    limit = now.prompt_tokens
    if job.dual:
        _from_both_ends(filling, limit)
    else:
        filling.continue_chunk(limit)
        filling.take(LEFT, limit, 0)
    choice = filling.choice
    if choice.tokens == 0 and now.decode_rows == 0:
        filling.continue_chunk(max(limit, now.page_size))
    return choice


def put_back(job: JobState, occupancy: Occupancy, line: Line) -> None:
    """A chosen line could not join: it waits again."""
    occupancy.withdraw(line)
    nodes = job.uses.leave(line, parked=True) if line.leaf >= 0 else []
    job.release_followers(nodes)
    job.backlog.add(line)


class _Filling:
    """A step being filled."""

    def __init__(self, job: JobState, occupancy: Occupancy, now: EngineNow) -> None:
        self.job = job
        self.occupancy = occupancy
        self.now = now
        self.choice = Choice(room_needed=now.decode_rows)
        self._set_aside = 0

    def continue_chunk(self, tokens: int) -> None:
        """The prompt that was begun goes on, and before all others."""
        some = min(self.now.chunk_left, tokens, self.now.chunk_room)
        self.choice.tokens += some
        self.choice.room_needed += some

    def take(self, side: int, tokens: int, reserved: int) -> bool:
        """Admit from one side until ``tokens`` prompt tokens are in the step.

        Returns:
            Whether that side had to stop for want of room.
        """
        backlog = self.job.backlog
        while self.choice.tokens < tokens:
            line = backlog.first() if side == LEFT else backlog.last()
            if line is None:
                break
            node = self.job.uses.blocked_by(line.node)
            if node:
                self._set_aside += 1
                if self._set_aside > _MOST_FOLLOWERS:
                    break
                self.job.follow(line, node)
            elif self._overtakes(line):
                break
            elif not self._admit(line, side, tokens, reserved):
                return True
        return False

    def _overtakes(self, line: Line) -> bool:
        """Whether a line would compute a prefix in room that followers need before.

        It would have to go again before those who share it have their turn.
        """
        job, uses = self.job, self.job.uses
        if not job.num_followers:
            return False
        if uses.kept_depth(line.node) == uses.depth[line.node]:
            return False
        claimed = sum(each.whole_kv for each in job.followers())
        locked = uses.locked_tokens + uses.newly_locked(line.node)
        locked += self.now.locked_elsewhere
        return not self.occupancy.fits(line, locked, claimed)

    def _admit(self, line: Line, side: int, tokens: int, reserved: int) -> bool:
        uses, occupancy = self.job.uses, self.occupancy
        if len(self.choice.lines) >= self.now.rows:
            return False
        kept = uses.kept_depth(line.node)
        extend = max(1, line.input_len + line.steps - kept)
        some = min(extend, tokens - self.choice.tokens)
        idle = uses.idle_tokens if self.now.idle_frees else 0
        room = self.now.room + idle - self.choice.room_needed
        if occupancy.running > 0:
            if some + uses.newly_kept(line.node) + self.now.page_size > room:
                return False
            locked = uses.locked_tokens + uses.newly_locked(line.node)
            locked += self.now.locked_elsewhere
            if not occupancy.fits(line, locked, reserved):
                return False
        self.job.backlog.remove(line)
        line.side = side
        occupancy.join(line)
        if line.leaf >= 0:
            uses.start(line, kept)
        self.choice.lines.append(line)
        self.choice.tokens += some
        self.choice.room_needed += some + self.now.page_size
        return True


def _from_both_ends(filling: _Filling, limit: int) -> None:
    job, occupancy, now = filling.job, filling.occupancy, filling.now
    job.pace = next_pace(job.pace, job.left_blocked)
    allowed = _budgets(job, occupancy, now)
    tokens = allowed.prefill_tokens
    if not now.mixed:
        tokens = _saved_up(job, now, tokens)
        if not tokens and now.decode_rows:
            return
    right = min(limit, max(tokens, job.plan.min_step_tokens))
    # A left side without room goes first. Else the right side takes what the left
    # leaves: the more it reads, the more prompt tokens the left side may compute.
    may_join = not job.left_blocked
    if now.chunk is not None:
        more = may_join or now.chunk.side == RIGHT
        filling.continue_chunk(right if more else min(limit, tokens))
    if may_join:
        # Shared prefixes are mostly those of the left side.
        left_kv = occupancy.kv[LEFT] + job.uses.locked_tokens
        kept = max(0, allowed.left_kv - left_kv)
        filling.take(RIGHT, right, kept)
    # Nobody has begun on the right to go slow for.
    if occupancy.decoding[RIGHT] == 0 and filling.choice.tokens == 0:
        tokens = max(int(tokens * _RAMP), job.plan.min_step_tokens)
        filling.continue_chunk(min(limit, tokens))
    job.left_blocked = filling.take(LEFT, min(limit, tokens), 0)
    for side in (RIGHT, LEFT):
        # Whatever the budgets, something goes on.
        if filling.choice.tokens == 0 and now.decode_rows == 0 and now.chunk is None:
            filling.take(side, limit, 0)


def _saved_up(job: JobState, now: EngineNow, tokens: int) -> int:
    """Prompt tokens of this step where a step holds prompts or decodes, not both.

    What each step may take is saved up until it fills one.
    """
    job.saved_tokens = min(job.saved_tokens + tokens, now.prompt_tokens)
    if job.saved_tokens < now.prompt_tokens and now.decode_rows:
        return 0
    saved, job.saved_tokens = job.saved_tokens, 0
    return saved


def _budgets(job: JobState, occupancy: Occupancy, now: EngineNow) -> ScanBudgets:
    cost = job.plan.cost
    left, right = job.backlog.first(), job.backlog.last()
    on_left = now.chunk if now.chunk is not None and now.chunk.side == LEFT else None
    return budgets(
        ScanState(
            occupancy.capacity,
            sum(occupancy.kv) + job.uses.locked_tokens,
            job.density_at(left),
            job.density_at(right),
            left is not None,
            right is not None,
            job.work.density,
            now.decode_rows,
            cost.kv_read_time_s * sum(occupancy.reads),
            occupancy.reads[LEFT],
            occupancy.reads[RIGHT],
            cost.token_time_s,
            _prompt_token_time(cost, left if on_left is None else on_left),
            job.pace,
        )
    )


def _prompt_token_time(cost: StepCost, line: Line | None) -> float:
    """Compute time of a token of a line's prompt, its share of attention included."""
    if line is None:
        return cost.token_time_s
    # In the mean, its own tokens attend to half of themselves and to all before them;
    # a pair costs attention_time_s twice.
    attended = 2 * line.input_len - line.own
    return cost.token_time_s + cost.attention_time_s * attended
