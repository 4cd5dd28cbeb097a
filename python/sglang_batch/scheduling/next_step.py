"""Chooses the requests that join the next step, and the number of prompt tokens.

Orders that are followed fill every step up to its limit (:class:`Filling`). The dual
scanner takes requests from both ends of an order, so that every step has the compute
density of the remaining work; its state machine, ``planner.admission_rules.dual_scanner``,
is shared with the simulator.

The jobs of one priority are scanned together. The next request is that of the job with the
least work, done or begun (``job_work``). Nobody overtakes it until it fits, so a request
that needs much KV does not starve. If one of the jobs is taken from both ends, there is one
budget of density for all. A job that it puts behind the others by the prompts of a full
step catches up without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..planner.admission_rules.dual_scanner import (
    RAMP,
    ScanBudgets,
    ScanState,
    budgets,
    next_pace,
)
from ..planner.admission_rules.followers import MOST_FOLLOWERS
from ..planner.requests import LEFT, RIGHT
from .job_plan import StepCost
from .job_state import JobState
from .job_work import density_of
from .kv_accounting import KvAccounting
from .open_jobs import ScanPace
from .prefix_uses import PrefixUses
from .scheduled_request import ScheduledRequest
from .step_record import Admission


def choose(
    jobs: Sequence[JobState],
    kv_accounting: KvAccounting,
    now: EngineNow,
    scan: ScanPace,
) -> Choice:
    """Fill the next step from the jobs of one priority. The chosen requests leave the
    backlog and count as running."""
    filling = Filling(jobs, kv_accounting, now)
    limit = now.prompt_tokens
    waiting = [job for job in jobs if job.backlog.count]
    if any(job.dual for job in waiting or jobs):
        take_from_both_ends(filling, limit, scan)
    else:
        filling.continue_chunk(limit)
        filling.take(LEFT, limit, 0)
        now.fill_rest(filling, limit)
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


def take_from_both_ends(filling: Filling, limit: int, scan: ScanPace) -> None:
    """Fill a step of at most ``limit`` prompt tokens by the dual scanner's budgets."""
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
        tokens = max(int(tokens * RAMP), least)
        filling.continue_chunk(min(limit, tokens))
    scan.left_blocked = filling.take(LEFT, min(limit, tokens), 0)
    if filling.whole_tokens:
        scan.ahead_tokens = max(0, filling.choice.tokens - right)
    for side in (RIGHT, LEFT):
        # A step must not be empty, whatever the budgets.
        if filling.choice.tokens == 0 and now.decode_rows == 0 and now.chunk is None:
            filling.take(side, limit, 0)


def _catches_up(filling: Filling, limit: int, scan: ScanPace) -> bool:
    """Let a job that is behind the others join at the full rate. Returns whether it found
    no room, so that nobody else may join."""
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
    """Prompt tokens of this step if a step has either prompts or decodes: those that each
    step may take are saved up until they fill one."""
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


# A step that is being filled

# Most requests that others pass in one step because they wait for siblings.
_MOST_HELD = 256


def always(_: ScheduledRequest) -> bool:
    """Of any request."""
    return True


class EngineNow(NamedTuple):
    """The engine before a step.

    step_tokens: most tokens in the step, of prompts and decodes together.
    decode_rows: running requests that decode.
    chunk: the request whose prompt is partly computed.
    chunk_left: tokens of its prompt that are not computed yet.
    rows: rows of the running batch that are free.
    room: tokens of KV that are free or can be evicted without removing pins.
    page_size: tokens in a page, the unit in which KV is allocated.
    window_room: tokens of KV of sliding-window layers that can be had, by removing pins if
        need be.
    mixed: whether decodes and prompts share a step. Otherwise a step with prompts has
        no decodes.
    locked_elsewhere: tokens of shared prefixes that requests of other jobs than those
        that are scanned use, and ``num_locked_elsewhere`` the number of these prefixes.
    chunk_room: most tokens of ``chunk`` that fit, in whole pages. Its KV was counted
        when it joined, but pages are not full to the last token, and other requests may
        have outlived their estimates.
    idle_frees: whether unpinning the job's prefixes makes room. It may not where
        another job has pinned the same prefixes.
    host_room: tokens of prefixes that the host has room for, if they make room.
    is_near: whether the KV of a request on the host can join without a wait. If not, it
        joins in a later step, unless nothing else decodes.
    has_adapter: whether the LoRA adapter of a request is in memory, or may be loaded now.
    apart: whether a step with so many tokens of prompts leaves the decodes to the next one.
    next_stop: where the prompt of a request is cut that is computed from so many tokens
        on, because others continue there. None: nowhere.
    fill_rest: may add to a step up to so many prompt tokens, after all that fit by the order.
    """

    step_tokens: int
    decode_rows: int
    chunk: ScheduledRequest | None
    chunk_left: int
    rows: int
    room: int
    page_size: int
    window_room: int = 1 << 62
    mixed: bool = True
    locked_elsewhere: int = 0
    num_locked_elsewhere: int = 0
    chunk_room: int = 1 << 62
    idle_frees: bool = True
    host_room: int = 0
    is_near: Callable[[ScheduledRequest], bool] = always
    has_adapter: Callable[[ScheduledRequest], bool] = always
    apart: Callable[[int], bool] = lambda tokens: False
    next_stop: Callable[[ScheduledRequest, int], int | None] = lambda *_: None
    fill_rest: Callable[[Filling, int], None] = lambda filling, tokens: None

    @property
    def prompt_tokens(self) -> int:
        """Most prompt tokens in the step."""
        return max(0, self.step_tokens - (self.decode_rows if self.mixed else 0))

    def after(self, choice: Choice) -> EngineNow:
        """The engine for the next jobs, once the requests of some have joined."""
        return self._replace(
            step_tokens=self.step_tokens - choice.tokens,
            chunk=None,
            chunk_left=0,
            rows=self.rows - choice.rows,
            room=self.room - choice.room_needed,
            window_room=self.window_room - choice.room_needed,
        )


class PromptPart(NamedTuple):
    """A request that joins: ``tokens`` of its prompt are computed in this step, and
    ``kept`` of them are in the cache by the plan."""

    tokens: int
    kept: int


@dataclass(slots=True)
class Choice:
    """The requests that join, in this order.

    parts: one for each of them.
    from_host: further requests, whose KV comes from the host.
    tokens: prompt tokens in the step, including those of a prompt in progress, which
        are ``chunk_tokens``.
    page_tokens: tokens in the pages of these prompts, which is what SGLang counts.
    room_needed: tokens of KV that they and the decodes take in this step.
    rows: rows of the running batch that they take.
    admission: why the next request in line did not join as well.
    """

    requests: list[ScheduledRequest] = field(default_factory=list)
    parts: list[PromptPart] = field(default_factory=list)
    from_host: list[ScheduledRequest] = field(default_factory=list)
    tokens: int = 0
    chunk_tokens: int = 0
    page_tokens: int = 0
    room_needed: int = 0
    rows: int = 0
    admission: Admission = Admission.NONE_WAITS

    def add(self, other: Choice) -> None:
        self.requests += other.requests
        self.parts += other.parts
        self.from_host += other.from_host
        self.tokens += other.tokens
        self.chunk_tokens += other.chunk_tokens
        self.page_tokens += other.page_tokens
        self.room_needed += other.room_needed
        self.rows += other.rows
        self.admission = other.admission


class Filling:
    """A step being filled. A prompt that has joined is computed up to ``whole_tokens`` in
    the step, even if fewer were to be taken."""

    def __init__(
        self, jobs: Sequence[JobState], kv_accounting: KvAccounting, now: EngineNow
    ) -> None:
        self.jobs = jobs
        self.kv_accounting = kv_accounting
        self.now = now
        self.choice = Choice(room_needed=kv_accounting.growth)
        self._chunk_left = min(now.chunk_left, now.chunk_room)
        # A prompt ends in this step before the step is full, and not for good. SGLang
        # knows one such prompt, so others join as a whole.
        self._is_cut = False
        self.whole_tokens = 0
        self._num_new_followers = 0
        self._did_not_fit = False
        self._held: list[tuple[JobState, ScheduledRequest]] = []

    def release_held(self) -> None:
        """Return the requests that wait for siblings to the backlog."""
        for job, request in self._held:
            job.backlog.add(request)

    def continue_chunk(self, tokens: int) -> None:
        """Continue the prompt in progress, which comes before all others."""
        some = min(self._chunk_left, self._room_of(tokens))
        chunk = self.now.chunk
        if chunk is not None:
            begin = chunk.input_len + chunk.steps - self.now.chunk_left
            some = self._cut(chunk, begin, some)
        self._chunk_left -= some
        self.choice.tokens += some
        self.choice.chunk_tokens += some
        self.choice.page_tokens += self.kv_accounting.in_pages(some)
        self.choice.room_needed += some

    def _room_of(self, tokens: int) -> int:
        """Tokens that a prompt may have in a step of so many."""
        return max(tokens, self.whole_tokens) - self.choice.tokens

    def _cut(self, request: ScheduledRequest, begin: int, tokens: int) -> int:
        """Tokens of a prompt in this step, from ``begin`` on, if at most ``tokens`` fit."""
        stop = self.now.next_stop(request, begin)
        if stop is None or stop - begin >= tokens:
            return tokens
        self._is_cut = True
        return stop - begin

    @property
    def locked_tokens(self) -> int:
        """Tokens of shared prefixes that running requests of any job use."""
        locked = self.now.locked_elsewhere
        for job in self.jobs:
            locked += job.uses.locked_tokens
        return locked

    def in_turn(self) -> list[JobState]:
        """The jobs whose turn it is, first the one with the least work. The others have
        more than that job by at least the prompts of a full step."""
        if len(self.jobs) == 1:
            return [*self.jobs]
        turns = sorted(
            (job.done.share_s, place)
            for place, job in enumerate(self.jobs)
            if job.backlog.count
        )
        slack = self.now.step_tokens * self.jobs[0].plan.cost.token_time_s
        return [
            self.jobs[place] for work, place in turns if work <= turns[0][0] + slack
        ]

    def _next(
        self, side: int, behind: JobState | None
    ) -> tuple[JobState, ScheduledRequest] | None:
        """The next request of a side, of the first job in turn that has one. If ``behind``
        is given, only of this job, as long as it is the turn of no other."""
        turn = self.jobs if len(self.jobs) == 1 else self.in_turn()
        if behind is not None and turn != [behind]:
            return None
        for job in turn:
            backlog = job.backlog
            request = backlog.first() if side == LEFT else backlog.last()
            if request is not None:
                return job, request
        return None

    def take(
        self, side: int, tokens: int, reserved: int, behind: JobState | None = None
    ) -> bool:
        """Admit from one side until ``tokens`` prompt tokens are in the step, of all jobs
        or as of :meth:`_next`. Returns whether the side stopped because a request did not
        fit."""
        choice = self.choice
        while choice.tokens < tokens:
            found = self._next(side, behind)
            if found is None:
                if choice.admission is Admission.JOINED:
                    choice.admission = Admission.NONE_WAITS
                break
            job, request = found
            if not self.now.has_adapter(request):
                choice.admission = Admission.AWAITS_ADAPTER
                job.await_adapter(request)
                continue
            node = job.uses.blocked_by(request.node)
            if node:
                choice.admission = Admission.AWAITS_LEADER
                self._num_new_followers += 1
                if self._num_new_followers > MOST_FOLLOWERS:
                    break
                job.follow(request, node)
            elif self.overtakes(job, request):
                choice.admission = Admission.AWAITS_FOLLOWERS
                break
            elif len(self._held) < _MOST_HELD and self._waits_for_siblings(
                job, request, tokens - choice.tokens
            ):
                choice.admission = Admission.AWAITS_SIBLINGS
                job.backlog.remove(request)
                self._held.append((job, request))
            else:
                answer = self.admit(job, request, side, tokens, reserved)
                choice.admission = answer
                if answer is not Admission.JOINED:
                    self._did_not_fit = True
                    return True
        else:
            if not self._did_not_fit:
                choice.admission = Admission.STEP_FULL
        return False

    def overtakes(self, job: JobState, request: ScheduledRequest) -> bool:
        """Whether a request would compute a prefix in KV that followers need earlier. The
        prefix would be evicted before the requests that share it can join."""
        uses = job.uses
        followed = [each for each in self.jobs if each.num_followers]
        if not followed:
            return False
        if uses.kept_depth(request.node) == uses.depth[request.node]:
            return False
        kv_accounting = self.kv_accounting
        claimed = sum(
            kv_accounting.in_pages(each.whole_kv)
            for job in followed
            for each in job.followers()
        )
        return not self._fits(uses, request, claimed)

    def _fits(self, uses: PrefixUses, request: ScheduledRequest, reserved: int) -> bool:
        """Whether a request fits, with ``reserved`` tokens of KV left for others."""
        locked = self.locked_tokens + uses.newly_locked(request.node)
        num_prefixes = 0
        if self.kv_accounting.second is not None:
            num_prefixes = self.now.num_locked_elsewhere
            num_prefixes += sum(job.uses.num_locked for job in self.jobs)
            num_prefixes += uses.num_newly_locked(request.node)
        return self.kv_accounting.fits(request, locked, reserved, num_prefixes)

    def _waits_for_siblings(
        self, job: JobState, request: ScheduledRequest, tokens: int
    ) -> bool:
        """Whether a request of an open-ended job leaves other prefixes where they are.

        It begins a prefix, and only in the room of another group's, whose further requests
        are still to come. So it waits until nothing else runs: meanwhile siblings of both
        may arrive. That pays where computing the other prefix again takes longer than the
        request's own steps would, with nobody to share them.
        """
        plan, uses = job.plan, job.uses
        if not plan.open_ended or self.kv_accounting.num_running == 0:
            return False
        if request.input_len <= self.now.host_room:  # nothing is computed again
            return False
        kept = uses.kept_depth(request.node)
        if request.leaf >= 0 and 0 < int(uses.depth[request.node]) <= kept:
            return False
        some = min(request.input_len + request.steps - kept, tokens)
        if some + self.now.page_size <= self.now.room - self.choice.room_needed:
            return False
        again_s = (request.input_len - kept) * plan.cost.token_time_s
        return again_s > request.est_decode_steps * plan.cost.weight_read_time_s

    def admit(
        self,
        job: JobState,
        request: ScheduledRequest,
        side: int,
        tokens: int,
        reserved: int,
    ) -> Admission:
        """Have a request join if it fits. Otherwise nothing changes."""
        uses, kv_accounting = job.uses, self.kv_accounting
        free_rows = self.now.rows - self.choice.rows
        if free_rows < request.rows and (free_rows <= 0 or kv_accounting.num_running):
            return Admission.NO_ROW
        if request.on_host and self.now.decode_rows and not self.now.is_near(request):
            return Admission.ON_HOST
        kept = uses.kept_depth(request.node)
        extend = max(1, request.input_len + request.steps - kept)
        some = min(extend, self._room_of(tokens))
        if request.on_host:  # all of it is loaded, and nothing computed
            some = extend = kv_accounting.in_pages(request.own + request.steps)
        if self._is_cut and (some < extend or uses.leads(request, kept)):
            return Admission.PROMPT_CUT
        idle = uses.idle_tokens if self.now.idle_frees else 0
        room = self.now.room + idle - self.choice.room_needed
        if kv_accounting.num_running > 0:
            if (
                some + uses.newly_locked(request.node, pinned=True) + self.now.page_size
                > room
            ):
                return Admission.NO_KV
            window_room = self.now.window_room - self.choice.room_needed
            if some + self.now.page_size > window_room:
                return Admission.NO_WINDOW
            if not self._fits(uses, request, reserved):
                return Admission.NO_KV
            needed = some
        else:
            # The cache may hold a part of the prompt of which the plan does not know.
            # SGLang locks it, which leaves less to evict for the rest. As nothing runs,
            # nothing else will make room: have enough for the whole prompt.
            needed = extend
        job.backlog.join(request)
        request.backlog = job.backlog
        request.side = side
        self.choice.rows += request.rows
        self.choice.room_needed += needed + self.now.page_size
        self._joins(job, request, PromptPart(some, kept))
        return Admission.JOINED

    def _joins(
        self, job: JobState, request: ScheduledRequest, part: PromptPart
    ) -> None:
        """Count a request that fits as running from this step on."""
        kv_accounting = self.kv_accounting
        kept = -1 if request.on_host else part.kept
        job.done.start(request, kept, kv_accounting.usual_steps)
        kv_accounting.admit(request)
        if request.on_host:
            if request.leaf >= 0:
                job.start(request, request.input_len)
            self.choice.from_host.append(request)
            return
        if request.leaf >= 0:
            job.start(request, part.kept)
            part = part._replace(tokens=self._cut(request, part.kept, part.tokens))
        self.choice.requests.append(request)
        self.choice.parts.append(part)
        self.choice.tokens += part.tokens
        self.choice.page_tokens += kv_accounting.in_pages(part.tokens)
