"""Carries plans out, beside SGLang's scheduler and step by step with it.

The scheduler calls the conductor where it would ask its waiting queue; the conductor
answers with the requests that join the next step. What it decides follows from the
requests that arrived and the results of earlier steps alone: no clock, no chance, so
that all TP ranks decide alike.

One step of :meth:`Conductor.next_batch`::

    show_computed      prefixes that leaders computed become visible: followers go on
    Rooms.for_decodes  KV short: requests are parked on the host
    Rooms.resume       room again: they come back
    choose             who joins (scheduling.admission), and how many prompt tokens
    SGLang             builds the batch from exactly those
    confirm            what SGLang really admitted
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.managers.scheduler import NextBatchPlan
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from ..request import parse_request_id
from ..scheduling.admission import Choice, EngineNow, choose, put_back
from ..scheduling.job_plan import JobPlan
from ..scheduling.job_state import JobState
from ..scheduling.line import Line
from ..scheduling.occupancy import Occupancy
from .online import OnlineQueue
from .planned_cache import PlannedRadixCache
from .rooms import Rooms
from .steps import Steps
from .token_counts import count_retracted

logger = logging.getLogger(__name__)


class Conductor:
    """The plans of one scheduler process.

    Attributes:
        jobs: open jobs by id, in the order in which they were opened.
        occupancy: what runs.
    """

    def __init__(self, scheduler: Any, steps: Steps) -> None:
        self.scheduler = scheduler
        self.cache: PlannedRadixCache = scheduler.tree_cache
        self.page_size = int(scheduler.page_size)
        self.step_tokens = (
            scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        )
        self.occupancy = Occupancy(int(scheduler.max_total_num_tokens))
        self.jobs: dict[str, JobState] = {}
        self._closed: set[str] = set()
        self._num_retired = 0
        self._known: dict[str, tuple[JobState | None, Line]] = {}
        self._starting: list[Line] = []
        self._leaders: list[tuple[JobState, Line]] = []
        self.rooms = Rooms(self)
        self.online = OnlineQueue(self)
        self.steps = steps
        self.cache.let_go = self.rooms.let_go
        self.cache.on_released = self.released
        self.cache.on_reset = self.forget_pins

    # Jobs -----------------------------------------------------------------------------

    def open(self, job_id: str, plan: JobPlan) -> int:
        """A job opens, or gets a new plan; returns the requests of it that are here."""
        if self.cache.disable:
            plan = plan.without_prefixes()
        job = self.jobs.get(job_id)
        if job is not None and job.plan.same_requests(plan):
            job.replan(plan)
        else:
            if job is not None:
                self._retire(job)
            self.jobs[job_id] = JobState(job_id, plan, self.page_size)
        self._closed.discard(job_id)
        longest = plan.steps.max(initial=1.0)
        self.occupancy.cover(int(longest) + 1)
        return len(self.jobs[job_id])

    def _retire(self, job: JobState) -> None:
        """A job that was stopped is started again before its last requests have left."""
        del self.jobs[job.job_id]
        self._num_retired += 1
        job.job_id = f"{job.job_id} (stopped, {self._num_retired})"
        self.jobs[job.job_id] = job
        self._closed.add(job.job_id)
        self._drop_if_done(job.job_id)

    def close(self, job_id: str) -> int:
        """No more requests of a job will come; what is here of it goes on."""
        if job_id not in self.jobs:
            return 0
        self._closed.add(job_id)
        left = len(self.jobs[job_id])
        self._drop_if_done(job_id)
        return left

    def _drop_if_done(self, job_id: str) -> None:
        if job_id in self._closed and not len(self.jobs[job_id]):
            self._closed.discard(job_id)
            self.unpin(self.jobs[job_id], list(self.jobs[job_id].uses.pins))
            del self.jobs[job_id]

    @property
    def num_waiting(self) -> int:
        waiting = sum(job.num_waiting for job in self.jobs.values())
        return waiting + self.rooms.num_parked

    @property
    def locked_tokens(self) -> int:
        """Tokens of shared prefixes that running requests use."""
        return sum(job.uses.locked_tokens for job in self.jobs.values())

    @property
    def waiting_tokens(self) -> int:
        return sum(job.waiting_tokens for job in self.jobs.values())

    # Requests come and go -------------------------------------------------------------

    def enqueue(self, req: Any) -> bool:
        """Take a request that is to wait; False for one that belongs to no job."""
        known = self._known.get(req.rid)
        if known is not None:
            job, line = known
            if job is None:
                return False
            if not line.waiting and not line.running:  # SGLang retracted it
                line.steps = max(0, len(req.output_ids))
                job.backlog.add(line)
                self.steps.retracted += 1
            return True
        job_id, number, part = parse_request_id(req.rid)
        job = self.jobs.get(job_id)
        if job is None:
            return False
        line = job.add(
            req,
            number,
            len(req.origin_input_ids),
            max(0, (req.sampling_params.max_new_tokens or 0) - 1),
            part=part,
        )
        self._known[req.rid] = (job, line)
        return True

    def known(self, req: Any) -> tuple[JobState | None, Line] | None:
        return self._known.get(req.rid)

    def join_online(self, line: Line) -> None:
        self._known[line.req.rid] = (None, line)
        self.occupancy.join(line)

    def released(self, req: Any, checkpointed: bool) -> None:
        """A request gave its KV back: it ended, or SGLang retracted or aborted it."""
        known = self._known.get(req.rid)
        if known is None:
            return
        job, line = known
        finished = req.finished()
        if line.running:
            self._leave(job, line, checkpointed=checkpointed, back=not finished)
        # An online request that SGLang retracted is known again when it joins.
        if finished or job is None:
            self.forget(job, line)

    def _leave(
        self, job: JobState | None, line: Line, *, checkpointed: bool, back: bool
    ) -> None:
        self.occupancy.leave(line)
        if job is None:
            return
        if not back:
            self.occupancy.ended(line)
            job.work.ended(line)
        if line.leaf < 0:
            return
        if checkpointed and line.leading:
            self._show(job, line, line.input_len)
        job.release_followers(job.uses.leave(line, parked=back))

    def forget(self, job: JobState | None, line: Line) -> None:
        """A request is over."""
        self._known.pop(line.req.rid, None)
        if job is not None:
            job.forget(line)
            self._drop_if_done(job.job_id)

    def abort(self, rid: str, *, everything: bool) -> list[Any]:
        """Take requests out that wait or are parked; returns them to be answered.

        A ``rid`` that is one of ours means that request only, any other is a prefix.
        """
        if not everything and rid in self._known:
            rids = [rid]
        else:
            rids = [r for r in self._known if everything or r.startswith(rid)]
        taken = []
        for each in rids:
            job, line = self._known[each]
            if job is None or line.running:
                continue
            if not self.rooms.drop(line):
                job.take(line)
            if line.leaf >= 0:
                job.uses.skip(line)
                job.work.ended(line)
                self.unpin(job, job.uses.spent(line))
            taken.append(line.req)
            self.forget(job, line)
        return taken

    # Prefixes -------------------------------------------------------------------------

    def pin(self, job: JobState, req: Any, nodes: list[int]) -> None:
        """Keep those of a request's prefixes that others will need."""
        for node in nodes:
            if job.uses.wanted(node):
                lock = self.cache.keep(req, int(job.uses.depth[node]))
                if lock is not None:
                    job.uses.pin(node, lock)

    def unpin(self, job: JobState, nodes: list[int]) -> None:
        for node in nodes:
            self.cache.unlock(job.uses.unpin(node))

    def forget_pins(self) -> None:
        """The tree was emptied, and its locks with it."""
        for job in self.jobs.values():
            job.uses.forget_pins()

    def _show(self, job: JobState, line: Line, num_tokens: int) -> None:
        done = job.uses.computed(line, num_tokens)
        self.pin(job, line.req, done)
        job.release_followers(done)

    def show_computed(self) -> None:
        """Make what leaders computed in the last step visible to this one.

        SGLang would do so when the step's result is processed, after the next batch
        was built. The next forward runs after the last one, so that it may read the
        KV which that one writes.
        """
        chunked = self.scheduler.chunked_req
        going_on = []
        for job, line in self._leaders:
            if not line.running or not line.leading:
                continue
            if line.req is chunked:  # SGLang has put it into the tree already
                self._show(job, line, line.req.prefix_len)
                going_on.append((job, line))
            elif not line.req.finished() and line.req.kv.holds_kv:
                checkpoint_kv_cache(line.req, self.cache)
                self._show(job, line, line.input_len)
        self._leaders = going_on

    # A step ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Requests whose prompt the last step completed decode from now on."""
        for line in self._starting:
            if line.running and not line.decoding:
                self.occupancy.begin_decoding(line)
        self._starting.clear()

    def next_batch(self, running_batch: Any, build: Any) -> NextBatchPlan:
        """The next prefill batch, if there is to be one.

        Args:
            build: SGLang's ``get_new_batch_prefill``.
        """
        scheduler = self.scheduler
        self.show_computed()
        running_batch = self.rooms.for_decodes(running_batch)
        running_batch = self.rooms.resume(running_batch)
        if self._nobody_can_join(running_batch):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        running_batch, ready, held = self.online.ready(running_batch)
        choice = self._choose(running_batch, ready)
        chunked = scheduler.chunked_req
        paused = chunked is not None and choice.tokens == 0 and not ready
        nothing = not choice.lines and not ready and chunked is None
        if paused or (nothing and not scheduler.grammar_manager.has_waiting_grammars()):
            scheduler.waiting_queue = ready + held
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        self.rooms.make(choice.room_needed)
        rows = len(running_batch.reqs) if scheduler.is_mixed_chunk else 0
        scheduler.policy.chunk_limit = self.online.chunk_limit(ready, running_batch)
        tokens = -(-choice.tokens // self.page_size) * self.page_size
        stock_chunk = scheduler.chunked_prefill_size
        if stock_chunk is not None:  # else prompts must not be cut
            scheduler.chunked_prefill_size = max(tokens, self.page_size) + rows
        scheduler.waiting_queue = ready + [line.req for line in choice.lines]
        running_batch.batch_is_full = False
        grammars = scheduler.grammar_manager.has_waiting_grammars()
        try:
            plan: NextBatchPlan = build(running_batch)
        finally:
            scheduler.chunked_prefill_size = stock_chunk
        left = {req.rid for req in scheduler.waiting_queue}
        scheduler.waiting_queue = [
            req for req in scheduler.waiting_queue if self._is_online(req)
        ] + held
        if grammars and plan.batch_to_run is not None:
            ready = ready + self.online.unseen(plan.batch_to_run)
        self._decided([line.req.rid for line in choice.lines], tokens)
        self._confirm(choice, ready, left, chunked)
        batch = plan.batch_to_run
        if batch is not None:
            count_retracted(batch, scheduler.model_config.vocab_size)
            if batch.decoding_reqs:
                batch.decoding_reqs = FastMembership(batch.decoding_reqs)
        return plan

    @rank_consensus(same_params=["rids", "tokens"])
    def _decided(self, rids: list[str], tokens: int) -> None:
        """Where SGLang's checker, if it is on, compares what ranks have decided."""

    def _nobody_can_join(self, running_batch: Any) -> bool:
        """Whether that is clear at once, as it is in most steps of a full engine."""
        scheduler = self.scheduler
        if (
            scheduler.waiting_queue
            or scheduler.chunked_req is not None
            or scheduler.grammar_manager.has_waiting_grammars()
        ):
            return False
        if scheduler.req_to_token_pool.available_size() <= 0:
            return True
        if not any(len(job.backlog) for job in self.jobs.values()):
            return True
        rows = scheduler.get_num_allocatable_reqs(
            len(running_batch.reqs), running_batch=running_batch
        )
        return bool(rows <= 0)

    def _is_online(self, req: Any) -> bool:
        known = self._known.get(req.rid)
        return known is None or known[0] is None

    def _choose(self, running_batch: Any, ready: list[Any]) -> Choice:
        """What joins this step; ``ready`` online requests join in any case."""
        now = self._engine_now(running_batch, ready)
        total = Choice(
            tokens=self.step_tokens - now.step_tokens,
            room_needed=self.cache.free_or_evictable() - now.room,
        )
        for job in self.jobs.values():
            if self.rooms.num_parked:
                break
            elsewhere = self.locked_tokens - job.uses.locked_tokens
            now = now._replace(locked_elsewhere=elsewhere)
            choice = choose(job, self.occupancy, now)
            self._add(total, choice)
            if len(job.backlog):
                break
            now = now._replace(
                step_tokens=now.step_tokens - choice.tokens,
                chunk=None,
                chunk_left=0,
                rows=now.rows - len(choice.lines),
                room=now.room - choice.room_needed,
            )
        if self.rooms.num_parked and now.chunk_left:
            some = min(now.chunk_left, now.prompt_tokens)
            some = some or (0 if now.decode_rows else self.page_size)
            some = min(some, now.chunk_room)
            self._add(total, Choice([], some, some))
        return total

    def _engine_now(self, running_batch: Any, ready: list[Any]) -> EngineNow:
        scheduler = self.scheduler
        # Those that are complete decode no more; SGLang takes them out in time.
        rows = max(0, len(running_batch.reqs) - self.occupancy.complete)
        chunked = scheduler.chunked_req
        known = self._known.get(chunked.rid) if chunked is not None else None
        left = 0
        if chunked is not None:
            left = len(chunked.full_untruncated_fill_ids) - chunked.extend_end
        taken = sum(len(req.origin_input_ids) + self.page_size for req in ready)
        mixed = scheduler.is_mixed_chunk
        if chunked is not None and (known is None or known[0] is None):
            # The prompt of an online request goes on at full rate.
            taken += min(left, self.step_tokens - taken - (rows if mixed else 0))
            left = 0
        free_rows = scheduler.get_num_allocatable_reqs(
            len(running_batch.reqs), running_batch=running_batch
        )
        return EngineNow(
            step_tokens=max(0, self.step_tokens - taken),
            decode_rows=rows,
            chunk=known[1] if known is not None and left else None,
            chunk_left=left,
            rows=free_rows - len(ready),
            room=self.cache.free_or_evictable() - taken,
            page_size=self.page_size,
            mixed=mixed,
            chunk_room=self._chunk_room(rows if mixed else 0, taken),
        )

    def _chunk_room(self, rows: int, taken: int) -> int:
        """Room for the prompt that is partly computed, beside ``rows`` decodes."""
        if self.occupancy.running <= 1:  # nobody will make room for it
            return self.occupancy.capacity
        idle = sum(job.uses.idle_tokens for job in self.jobs.values())
        # Each decode may begin a page.
        room = self.cache.free_or_evictable() + idle - taken - rows * self.page_size
        return max(0, room // self.page_size * self.page_size)

    @staticmethod
    def _add(total: Choice, choice: Choice) -> None:
        total.lines += choice.lines
        total.tokens += choice.tokens
        total.room_needed += choice.room_needed

    def _confirm(
        self, choice: Choice, ready: list[Any], left: set[str], chunked: Any
    ) -> None:
        """Take note of what SGLang admitted, and of what it did not."""
        scheduler = self.scheduler
        for line in choice.lines:
            job, _ = self._known[line.req.rid]
            assert job is not None
            if line.req.rid in left:
                put_back(job, self.occupancy, line)
            else:
                self._admitted(job, line)
        for req in ready:
            if req.rid not in left:
                self._admitted(None, self._known[req.rid][1])
            else:
                self.online.put_back(self._known.pop(req.rid)[1])
        if chunked is not None:
            known = self._known.get(chunked.rid)
            if known is not None:
                self.steps.prefilled(known[1], chunked.extend_end - chunked.prefix_len)
                if scheduler.chunked_req is not chunked:
                    self._starting.append(known[1])

    def _admitted(self, job: JobState | None, line: Line) -> None:
        req = line.req
        cached = req.prefix_len
        self.steps.admitted(line, cached, req.extend_end - cached)
        if req is not self.scheduler.chunked_req:
            self._starting.append(line)
        if job is None or line.leaf < 0:
            return
        job.uses.lead(line, cached)
        if line.leading:
            self._show(job, line, cached)
        kept = [n for n in job.uses.path(line.node) if job.uses.depth[n] <= cached]
        self.pin(job, req, kept)
        self.unpin(job, job.uses.spent(line))
        if line.leading:
            self._leaders.append((job, line))

    def end_step(self, batch: Any) -> None:
        """The batch of this step is made; ``None`` if there is nothing to run."""
        if batch is None:
            return
        mode = batch.forward_mode
        decodes = mode.is_decode() or (mode.is_mixed() and bool(batch.decoding_reqs))
        record = self.steps.record(self, decodes=decodes)
        for job in self.jobs.values():
            job.work.did(record.compute_s, self.steps.last_kv_read_s)
            break
        if decodes:
            for line in self.occupancy.tick():
                known = self._known.get(line.req.rid)
                if known is not None and known[0] is not None:
                    known[0].work.expect(line, line.estimate)


class FastMembership(list):  # type: ignore[type-arg]
    """A list of requests that knows at once whether it holds one.

    SGLang asks that for every request of a mixed step, which otherwise takes time
    with the square of their number.
    """

    def __init__(self, reqs: list[Any]) -> None:
        super().__init__(reqs)
        self._ids = {id(req) for req in reqs}

    def __contains__(self, req: object) -> bool:
        return id(req) in self._ids
