"""A step that is being filled with requests, and the state of the engine before it.

The simulator fills its steps by the same rule (``planner.simulator.step_admission``). Its
requests are rows of arrays and its code is compiled, while here they are objects of a running
engine, with rows, pages, chunks and adapters that it has none of. So the two share the
parts that are numbers: ``planner.admission_rules`` has the forecast of KV, the dual scanner
and how many followers are looked past.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..planner.admission_rules.followers import MOST_FOLLOWERS
from ..planner.requests import LEFT
from .job_state import JobState
from .kv_accounting import KvAccounting
from .prefix_uses import PrefixUses
from .scheduled_request import ScheduledRequest
from .step_record import Admission

# Most requests that others pass in one step because they wait for siblings.
_MOST_HELD = 256


def always(_: ScheduledRequest) -> bool:
    """Of any request."""
    return True


def nowhere(_: ScheduledRequest, begin: int) -> int | None:
    """No prompt is cut."""
    return None


def never(_: int) -> bool:
    """Not for any number of tokens."""
    return False


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
    ahead_tokens: most tokens of prompts that may be computed ahead: for requests that do not
        fit yet, and wait on the host.
    is_near: whether the KV of a request on the host can join without a wait. If not, it
        joins in a later step, unless nothing else decodes.
    has_adapter: whether the LoRA adapter of a request is in memory, or may be loaded now.
    apart: whether a step with so many tokens of prompts leaves the decodes to the next one.
    next_stop: where the prompt of a request is cut that is computed from so many tokens
        on, because others continue there. None: nowhere.
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
    ahead_tokens: int = 0
    is_near: Callable[[ScheduledRequest], bool] = always
    has_adapter: Callable[[ScheduledRequest], bool] = always
    apart: Callable[[int], bool] = never
    next_stop: Callable[[ScheduledRequest, int], int | None] = nowhere

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
    """A request that joins.

    tokens: of its prompt that are computed in this step.
    kept: of its prompt that the cache holds by the plan.
    """

    tokens: int
    kept: int


@dataclass(slots=True)
class Choice:
    """The requests that join, in this order.

    parts: one for each of them.
    from_host: further requests, whose KV comes from the host.
    tokens: prompt tokens in the step, including those of a prompt in progress, which are
        ``chunk_tokens``.
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
    """A step being filled.

    Attributes:
        whole_tokens: a prompt that has joined is computed up to so many tokens in the step,
            even if fewer were to be taken.
    """

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
        """The jobs whose turn it is, first the one with the least work.

        The others have more than that job by at least the prompts of a full step.
        """
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
        """The next request of a side, of the first job in turn that has one.

        Args:
            behind: if given, only of this job, as long as it is the turn of no other.
        """
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
        """Admit from one side until ``tokens`` prompt tokens are in the step.

        Args:
            behind: see :meth:`_next`.

        Returns:
            Whether that side had to stop because a request did not fit.
        """
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
            elif self._overtakes(job, request):
                choice.admission = Admission.AWAITS_FOLLOWERS
                break
            elif len(self._held) < _MOST_HELD and self._waits_for_siblings(
                job, request, tokens - choice.tokens
            ):
                choice.admission = Admission.AWAITS_SIBLINGS
                job.backlog.remove(request)
                self._held.append((job, request))
            else:
                answer = self._admit(job, request, side, tokens, reserved)
                choice.admission = answer
                if answer is not Admission.JOINED:
                    self._did_not_fit = True
                    return True
        else:
            if not self._did_not_fit:
                choice.admission = Admission.STEP_FULL
        return False

    def take_ahead(self, tokens: int) -> None:
        """Fill the step with prompts of requests that do not fit yet.

        They wait on the host until they do.
        """
        left = self.now.ahead_tokens
        for job in self.in_turn() if left > 0 else ():
            while self.choice.tokens < tokens:
                request = job.backlog.next_ahead()
                if request is None or request.input_len > left:
                    break
                if job.uses.blocked_by(request.node) or self._overtakes(job, request):
                    break
                if not self.now.has_adapter(request):
                    break
                request.prefills_ahead = True
                answer = self._admit(job, request, LEFT, tokens, 0)
                if answer is not Admission.JOINED:
                    request.prefills_ahead = False
                    break
                left -= request.input_len

    def _overtakes(self, job: JobState, request: ScheduledRequest) -> bool:
        """Whether a request would compute a prefix in KV that followers need earlier.

        The prefix would be evicted before the requests that share it can join.
        """
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

        It begins a prefix, and only in the room of another group's, whose further
        requests are still to come. So it waits until nothing else runs: meanwhile
        siblings of both may arrive. That pays where computing the other prefix again
        takes longer than the request's own steps would, with nobody to share them.
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

    def _admit(
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
            if some + uses.newly_kept(request.node) + self.now.page_size > room:
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
        if request.prefills_ahead:
            job.backlog.join_ahead(request)
        else:
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
