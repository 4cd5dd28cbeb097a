"""Decides, step by step, which requests are in the next prefill batch.

SGLang's scheduler calls :meth:`PlanScheduler.next_batch` instead of looking at its own
waiting queue. Decisions depend only on the requests that have arrived and on the results
of earlier steps, never on a clock or on chance, so that all TP ranks decide alike.

A step:

1. Make room. Prefixes that leaders computed in the last step become visible, so that
   their followers can join. If the running requests have no room for their next tokens,
   the newest are offloaded. Otherwise offloaded requests resume.
2. Choose. Online requests come first, and requests of jobs are offloaded for them. Then
   the jobs' requests join, by ``scheduling.next_step``.
3. Build. SGLang builds a batch from exactly the chosen requests. Some of its fields are
   changed for the duration of the call.
4. Confirm. The requests that SGLang admitted run. The others wait again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sglang.srt.managers.scheduler import TEST_RETRACT, NextBatchPlan
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from ...planner.admission_rules.followers import WORTH_A_STATE
from ...scheduling.job_state import JobState
from ...scheduling.next_step import Choice, EngineNow, Filling, always, choose, put_back
from ...scheduling.scheduled_request import ScheduledRequest
from ...scheduling.step_record import Admission
from ..compat.scheduler_types import BuildPrefill, Req, ScheduleBatch, Scheduler
from ..engine.media import num_placeholders
from .engine_jobs import EngineJobs, SchedulerPart
from .kv.kv_manager import KvManager
from .kv.token_counts import count_retracted
from .mixed_batch import FastMembership, StepsApart, can_mix, has_decodes, num_rows
from .online_queue import OnlineQueue
from .step_hook import StepHook


@dataclass(slots=True)
class _Step:
    """The requests chosen for one step.

    choice: requests of jobs, and their prompt tokens.
    online: online requests that join, and ``waiting_online`` those that do not.
    chunked: the request whose prompt was partly computed before the step.
    grammars: whether SGLang has requests whose grammar is not compiled yet. It adds
        those that become ready to the batch by itself.
    not_admitted: ids of the chosen requests that SGLang left out.
    """

    choice: Choice
    online: list[Req]
    waiting_online: list[Req]
    chunked: Req | None
    grammars: bool
    not_admitted: set[str] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        if self.online:
            return False
        if self.chunked is not None:
            return self.choice.tokens == 0
        return not self.choice.requests and not self.grammars


class PlanScheduler(SchedulerPart):
    """Carries out the plans of one scheduler process."""

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: EngineJobs,
        kv_manager: KvManager,
        online: OnlineQueue,
        hooks: Sequence[StepHook] = (),
    ) -> None:
        super().__init__(scheduler, jobs)
        self._kv_manager = kv_manager
        self._online = online
        self._apart = StepsApart(scheduler, jobs.open, jobs.kv_accounting)
        self._adapters = jobs.adapters
        self._tokens = jobs.tokens
        self._hooks = hooks
        # Whether the last step with prompts computed online ones only.
        self._online_alone = False

    def abort(self, rid: str, *, everything: bool) -> list[Req]:
        """Remove requests that wait or are offloaded, and return them to be answered. For
        the arguments see :meth:`RequestRegistry.not_running`."""
        taken = []
        for job, request in self._not_running(rid, everything=everything):
            self._kv_manager.drop(request)
            job.take(request)
            self._registry.skip(job, request)
            taken.append(request.req)
        return taken

    def aborted(self, req: Req) -> None:
        """SGLang answered a request with an error. Its KV is free already: this happens
        to the last running request if there is no KV for its next token."""
        planned = self._registry.planned(req)
        if planned is not None and not planned[1].running:
            job, request = planned
            job.take(request)
            self._registry.skip(job, request)

    def _not_running(
        self, rid: str, *, everything: bool
    ) -> list[tuple[JobState, ScheduledRequest]]:
        return self._registry.not_running(rid, everything=everything)

    # A step ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Requests whose prompt the last step completed decode from now on."""
        if self._tokens is not None:
            self._tokens.follow(self._tick)
        for request in self._micro_batches.begin_step():
            if not request.running or request.decoding:
                continue
            if not any(hook.prompt_done(request) for hook in self._hooks):
                self._kv_accounting.begin_decoding(request)
        self._kv_manager.decodes_fit = False

    def next_batch(
        self, running_batch: ScheduleBatch, build: BuildPrefill
    ) -> NextBatchPlan:
        """The next prefill batch, if there is one, and the running batch. ``build`` is
        SGLang's ``get_new_batch_prefill``."""
        self._prefixes.show_computed(self._scheduler.chunked_req)
        for hook in self._hooks:
            hook.begin(running_batch)
        self._kv_manager.make_room_for_decodes(running_batch)
        running_batch = self._kv_manager.resume(running_batch)
        for hook in self._hooks:
            hook.before_choice(running_batch)
        now_decodes = self._apart.decodes_now(running_batch)
        if now_decodes:
            self._recorder.admission = Admission.DECODES_FIRST
        step = None if now_decodes else self._choose(running_batch)
        if step is not None and step.choice.from_host:
            running_batch = self._kv_manager.join(running_batch, step.choice.from_host)
        if step is None or step.is_empty:
            plan = NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        else:
            plan = self._build(step, running_batch, build)
            self._confirm(step, plan.batch_to_run)
        self._prefixes.step_built()
        return plan

    def end_step(self, batch: ScheduleBatch | None) -> None:
        """Record the batch of this step. None if there is nothing to run. A batch without
        requests runs at the same time as those of other attention ranks."""
        self._kv_manager.on_host.end_step()
        runs = batch is not None and bool(batch.reqs)
        decodes = self._micro_batches.end_step(
            decodes=batch is not None and runs and has_decodes(batch)
        )
        if not runs and not decodes:
            self._recorder.idle()
            return
        done = self._recorder.record(
            len(self._kv_manager.on_host.first), decodes=decodes
        )
        for hook in self._hooks:
            hook.step_decided(max(done.compute_s, done.memory_s))
        self._tick(decodes=decodes and self._tokens is None)

    def _tick(self, *, decodes: bool = True) -> None:
        """Count the work since the last tick, and a token of each request that decodes."""
        clock = self._kv_accounting.clock
        for job in self._jobs.each:
            job.work.did(*job.done.end_step(clock, decodes=decodes))
            if decodes:
                job.backlog.tick()
        if decodes:
            outlived = self._kv_accounting.count_decode_step()
            if outlived:
                self._registry.estimates_changed(outlived)

    def all_decode(self, running_batch: ScheduleBatch) -> bool:
        """Whether it is certain that all running requests decode in this step and have
        room for it, so that SGLang need not check each of them."""
        return bool(
            self._kv_manager.decodes_fit
            and not self._kv_accounting.num_complete
            and running_batch.reqs
            # Beams have further rows, which SGLang counts.
            and all(req.beam_group is None for req in running_batch.reqs)
            and not TEST_RETRACT
        )

    # Choose ---------------------------------------------------------------------------

    def _choose(self, running_batch: ScheduleBatch) -> _Step | None:
        if self._adapters is not None:
            self._adapters.begin_step()
        if self._nobody_can_join(running_batch):
            self._online_alone = False
            return None
        if not self._online.make_room_for_chunk(running_batch):
            self._recorder.admission = Admission.ONLINE_FIRST
            return None
        online, waiting = self._online.ready(running_batch)
        choice = self._choose_from_jobs(running_batch, online)
        scheduler = self._scheduler
        grammars = scheduler.grammar_manager.has_waiting_grammars()
        step = _Step(choice, online, waiting, scheduler.chunked_req, grammars)
        return None if step.is_empty and not choice.from_host else step

    def _nobody_can_join(self, running_batch: ScheduleBatch) -> bool:
        """Whether this is certain at once, as in most steps of a full engine."""
        scheduler = self._scheduler
        if (
            scheduler.waiting_queue
            or scheduler.chunked_req is not None
            or scheduler.grammar_manager.has_waiting_grammars()
        ):
            return False
        # SGLang's mark that no row is left, which it removes when a request leaves.
        if running_batch.batch_is_full and running_batch.reqs:
            self._recorder.admission = Admission.NO_ROW
            return True
        if not any(job.backlog.count for job in self._jobs.each):
            if self._adapters is not None and any(
                job.num_without_adapter for job in self._jobs.each
            ):
                self._recorder.admission = Admission.AWAITS_ADAPTER
            return True
        rows = self._free_rows(running_batch)
        running_batch.batch_is_full = rows <= 0
        if rows <= 0:
            self._recorder.admission = Admission.NO_ROW
        return rows <= 0

    def _choose_from_jobs(
        self, running_batch: ScheduleBatch, online: list[Req]
    ) -> Choice:
        """The requests of jobs that join, after the ``online`` ones."""
        if len(self._jobs) > 1:
            rows = len(running_batch.reqs)
            self._pinned.reachable_tokens(
                self._step_tokens + (rows + 2) * self._page_size
            )
        now = self._engine_now(running_batch, online)
        taken = self._step_tokens - now.step_tokens
        total = Choice(
            tokens=taken,
            page_tokens=taken,
            room_needed=self._cache.free_or_evictable() - now.room,
        )
        joined = Choice()
        alone = self._leave_to_online(online)
        may_join = self._kv_manager.may_join and not alone
        for jobs in self._jobs.by_priority():
            if not may_join:  # those on the host resume before any new request joins
                break
            now = self._locked_elsewhere(now, jobs)
            choice = choose(jobs, self._kv_accounting, now, self._jobs.scan)
            dual = any(job.dual for job in jobs)
            taken = total.room_needed + joined.room_needed
            while self._restore_prefixes(choice, taken) and not dual:
                # There is more room in the step than the plan knew.
                joined.add(choice)
                now = self._engine_now(running_batch, online).after(joined)
                now = self._locked_elsewhere(now, jobs)
                choice = choose(jobs, self._kv_accounting, now, self._jobs.scan)
                taken = total.room_needed + joined.room_needed
            joined.add(choice)
            if any(job.backlog.count for job in jobs):
                break
            now = now.after(choice)
        total.add(joined)
        if not may_join:
            total.admission = (Admission.OFFLOADED_FIRST, Admission.ONLINE_FIRST)[alone]
        self._recorder.admission = total.admission
        if not may_join and now.chunk_left:
            most = self._page_size if alone else now.prompt_tokens
            some = min(now.chunk_left, most)
            some = some or (0 if now.decode_rows else self._page_size)
            some = min(some, now.chunk_room)
            pages = self._kv_accounting.in_pages(some)
            total.add(
                Choice(
                    tokens=some, chunk_tokens=some, page_tokens=pages, room_needed=some
                )
            )
        return total

    def _leave_to_online(self, online: list[Req]) -> bool:
        """Whether this step computes online prompts only, so that their first tokens come
        sooner. The next step with prompts includes those of jobs, whatever the load."""
        chunked = self._scheduler.chunked_req
        prompts = online or (chunked is not None and self._registry.is_online(chunked))
        self._online_alone = bool(prompts) and not self._online_alone
        return self._online_alone

    def _locked_elsewhere(self, now: EngineNow, jobs: list[JobState]) -> EngineNow:
        """Tell of the prefixes that requests of other jobs use."""
        tokens = sum(job.uses.locked_tokens for job in jobs)
        number = sum(job.uses.num_locked for job in jobs)
        return now._replace(
            locked_elsewhere=self._jobs.locked_tokens - tokens,
            num_locked_elsewhere=self._jobs.num_locked - number,
        )

    def _restore_prefixes(self, choice: Choice, taken: int) -> bool:
        """Put prefixes that chosen requests would compute back from the host, where others
        take ``taken`` tokens of KV in this step. Returns whether that leaves room in the
        step."""
        saved = 0
        for request, part in zip(choice.requests, choice.parts, strict=True):
            planned = self._registry.planned(request.req)
            if planned is None or request.leaf < 0:
                continue
            job = planned[0]
            if job.uses.depth[request.node] <= part.kept:
                continue
            others = taken + choice.room_needed - saved - part.tokens
            held = self._prefixes.restore(job, request, others + self._page_size)
            if held > part.kept:
                left = max(1, request.input_len + request.steps - held)
                left = min(left, part.tokens)
                saved += part.tokens - left
                in_pages = self._kv_accounting.in_pages
                choice.page_tokens -= in_pages(part.tokens) - in_pages(left)
        choice.tokens -= saved
        choice.room_needed -= saved
        return saved > 0

    def _engine_now(self, running_batch: ScheduleBatch, online: list[Req]) -> EngineNow:
        scheduler = self._scheduler
        # Complete requests no longer decode, though SGLang removes them a step later.
        rows = len(running_batch.reqs)
        if self._micro_batches.number == 1:
            rows = max(0, rows - self._kv_accounting.num_complete)
        chunked = scheduler.chunked_req
        known = self._registry.known(chunked) if chunked is not None else None
        left = 0
        if chunked is not None:
            left = len(chunked.full_untruncated_fill_ids) - chunked.extend_end
        taken = sum(len(req.origin_input_ids) + self._page_size for req in online)
        mixed = can_mix(scheduler, running_batch)
        if chunked is not None and (known is None or known[0] is None):
            # The prompt of an online request continues at full rate.
            taken += min(left, self._step_tokens - taken - (rows if mixed else 0))
            left = 0
        return EngineNow(
            step_tokens=max(0, self._step_tokens - taken),
            decode_rows=rows,
            chunk=known[1] if known is not None and left else None,
            chunk_left=left,
            rows=self._free_rows(running_batch) - sum(map(num_rows, online)),
            room=self._cache.free_or_evictable() - taken,
            page_size=self._page_size,
            window_room=self._pinned.window_room - taken,
            mixed=mixed,
            idle_frees=len(self._jobs) == 1,
            host_room=self._pinned.host_room,
            chunk_room=self._chunk_room(left, taken, mixed=mixed),
            is_near=self._kv_manager.is_near,
            has_adapter=always if self._adapters is None else self._adapters.may_join,
            apart=lambda tokens: self._apart.mixing_loses(tokens, rows),
            next_stop=lambda request, begin: self._cache.next_stop(request.req, begin),
            fill_rest=self._fill_rest,
        )

    def _fill_rest(self, filling: Filling, limit: int) -> None:
        for hook in self._hooks:
            hook.fill_rest(filling, limit)

    def _chunk_room(self, left: int, taken: int, *, mixed: bool) -> int:
        """KV for the ``left`` tokens of a prompt in progress."""
        if not left or self._kv_accounting.num_running <= 1:
            return self._kv_accounting.capacity  # no other request will make room
        if mixed:
            taken += self._kv_accounting.growth
        wanted = min(left, self._step_tokens) + self._page_size + taken
        room = self._pinned.reachable_tokens(wanted) - taken
        return max(0, room // self._page_size * self._page_size)

    # Build ----------------------------------------------------------------------------

    def _build(
        self, step: _Step, running_batch: ScheduleBatch, build: BuildPrefill
    ) -> NextBatchPlan:
        self._pinned.unpin_until_free(step.choice.room_needed)
        self._kv_manager.note_allocation()
        tokens = self._kv_accounting.in_pages(step.choice.page_tokens)
        if self._cache.supports_mamba():
            # Less may be cached than the plan counts on: not every node has a state.
            tokens += WORTH_A_STATE * len(step.choice.requests)
            # Where the prompts of the step end by the plan.
            admitted = zip(step.choice.requests, step.choice.parts, strict=True)
            ends = {each.req.rid: part.kept + part.tokens for each, part in admitted}
            if (chunked := step.chunked) is not None and step.choice.chunk_tokens:
                ends[chunked.rid] = chunked.extend_end + step.choice.chunk_tokens
            self._cache.step_ends = ends
        rows = len(running_batch.reqs) if self._scheduler.is_mixed_chunk else 0
        limit = self._online.chunk_limit(step.online, running_batch)
        if self._online_alone and limit is not None:
            limit = self._page_size
        step_tokens = max(tokens, self._page_size) + rows
        with (
            self._apart.building(
                step.choice.tokens, running_batch, always=self._online_alone
            ),
            self._offered(step, step_tokens=step_tokens, chunk_limit=limit),
        ):
            running_batch.batch_is_full = False
            plan = build(running_batch)
            plan.running_batch.batch_is_full = False  # it was full for this step only
        self._cache.step_ends = {}
        batch = plan.batch_to_run
        if step.grammars and batch is not None:
            step.online = step.online + self._online.join_unseen(batch)
        self._decided([request.req.rid for request in step.choice.requests], tokens)
        return plan

    @contextmanager
    def _offered(
        self, step: _Step, *, step_tokens: int, chunk_limit: int | None
    ) -> Iterator[None]:
        """Offer SGLang the requests of a step and no others.

        Its waiting queue, chunk size and chunk limit are replaced meanwhile. Afterwards the
        queue holds the online requests that still wait, and ``step.not_admitted`` is set.
        """
        scheduler = self._scheduler
        chunk_size = scheduler.chunked_prefill_size
        if chunk_size is not None:  # None: prompts must not be cut
            scheduler.chunked_prefill_size = step_tokens
        scheduler.policy.chunk_limit = chunk_limit
        requests = [request.req for request in step.choice.requests]
        scheduler.waiting_queue = step.online + requests
        try:
            yield
        finally:
            scheduler.chunked_prefill_size = chunk_size
            scheduler.policy.chunk_limit = None
            left = scheduler.waiting_queue
            step.not_admitted = {req.rid for req in left}
            online = [req for req in left if self._registry.is_online(req)]
            scheduler.waiting_queue = online + step.waiting_online

    @rank_consensus(same_params=["rids", "tokens"])  # type: ignore[untyped-decorator]
    def _decided(self, rids: list[str], tokens: int) -> None:
        """Where SGLang's checker, if it is on, compares the decisions of the ranks."""

    # Confirm --------------------------------------------------------------------------

    def _confirm(self, step: _Step, batch: ScheduleBatch | None) -> None:
        """Record the requests that SGLang admitted. The others wait again."""
        for req in [request.req for request in step.choice.requests] + step.online:
            known = self._registry.known(req)
            assert known is not None
            job, request = known
            if req.rid not in step.not_admitted:
                self._admitted(job, request)
            elif job is not None:
                put_back(job, self._kv_accounting, request)
            else:
                self._registry.leave_online(request)
        known = self._registry.known(step.chunked) if step.chunked is not None else None
        if known is not None:
            self._prefilled(*known)
        if batch is not None:
            count_retracted(batch, self._scheduler.model_config.vocab_size)
            if batch.decoding_reqs:
                batch.decoding_reqs = FastMembership(batch.decoding_reqs)

    def _admitted(self, job: JobState | None, request: ScheduledRequest) -> None:
        self._prefilled(job, request)
        cached = request.req.prefix_len
        if request.steps == 0:
            self._recorder.cached += cached
        if job is not None and job.joined is not None:
            job.joined.numbers.append(request.number)
        if job is not None and request.leaf >= 0:
            self._prefixes.started(job, request, cached)

    def _prefilled(self, job: JobState | None, request: ScheduledRequest) -> None:
        req: Req = request.req
        tokens, before = req.extend_end - req.prefix_len, req.prefix_len
        media = num_placeholders(req, before, req.extend_end)
        self._recorder.prefilled(request, tokens, before, media)
        if job is not None:
            job.done.prefilled(request, tokens, before, media)
        if req is not self._scheduler.chunked_req:
            self._micro_batches.starting.append(request)
