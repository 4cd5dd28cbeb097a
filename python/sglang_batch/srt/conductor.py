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

from sglang.srt.managers.scheduler import TEST_RETRACT, NextBatchPlan
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from ..scheduling.admission import Choice, EngineNow, choose, put_back
from ..scheduling.job_state import JobState
from ..scheduling.line import Line
from ..scheduling.occupancy import Occupancy
from .online import OnlineQueue
from .open_jobs import OpenJobs
from .planned_cache import PlannedRadixCache
from .rooms import Rooms
from .steps import Steps
from .token_counts import count_retracted

logger = logging.getLogger(__name__)


class Conductor:
    """The plans of one scheduler process.

    Attributes:
        jobs: what is open, and its requests.
        occupancy: what runs.
    """

    def __init__(self, scheduler: Any, steps: Steps) -> None:
        self.scheduler = scheduler
        self.cache: PlannedRadixCache = scheduler.tree_cache
        self.page_size = int(scheduler.page_size)
        self.step_tokens = (
            scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        )
        self.steps = steps
        self.occupancy = Occupancy(int(scheduler.max_total_num_tokens))
        self.jobs = OpenJobs(self.cache, self.occupancy, steps, self.page_size)
        self._starting: list[Line] = []
        self.rooms = Rooms(self)
        self.online = OnlineQueue(self)
        self.cache.let_go = self.rooms.let_go
        self.cache.on_released = self.jobs.released
        self.cache.on_reset = self.jobs.forget_pins

    @property
    def num_waiting(self) -> int:
        """Requests of jobs that do not run, parked ones among them."""
        return self.jobs.num_waiting + self.rooms.num_parked

    def abort(self, rid: str, *, everything: bool) -> list[Any]:
        """Take requests out that wait or are parked; returns them to be answered.

        A ``rid`` that is one of ours means that request only, any other is a prefix.
        """
        taken = []
        for job, line in self.jobs.not_running(rid, everything=everything):
            if not self.rooms.drop(line):
                job.take(line)
            self.jobs.skip(job, line)
            taken.append(line.req)
        return taken

    # A step ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Requests whose prompt the last step completed decode from now on."""
        for line in self._starting:
            if line.running and not line.decoding:
                self.occupancy.begin_decoding(line)
        self._starting.clear()
        self.rooms.sure = False

    def next_batch(self, running_batch: Any, build: Any) -> NextBatchPlan:
        """The next prefill batch, if there is to be one.

        Args:
            build: SGLang's ``get_new_batch_prefill``.
        """
        scheduler = self.scheduler
        self.jobs.show_computed(scheduler.chunked_req)
        running_batch = self.rooms.for_decodes(running_batch)
        running_batch = self.rooms.resume(running_batch)
        if self._nobody_can_join(running_batch):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        running_batch, goes_on = self.online.room_for_chunk(running_batch)
        if not goes_on:
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
        self.rooms.taken()
        grammars = scheduler.grammar_manager.has_waiting_grammars()
        try:
            plan: NextBatchPlan = build(running_batch)
        finally:
            scheduler.chunked_prefill_size = stock_chunk
        plan.running_batch.batch_is_full = False  # of this choice only
        left = {req.rid for req in scheduler.waiting_queue}
        scheduler.waiting_queue = [
            req for req in scheduler.waiting_queue if self.jobs.is_online(req)
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

    def all_decode(self, running_batch: Any) -> bool:
        """Whether all running requests decode in this step, and have room to.

        Then nothing needs to be asked of each of them. False if it is not clear.
        """
        return bool(
            self.rooms.sure
            and not self.occupancy.complete
            and running_batch.reqs
            # Beams have further rows, which SGLang counts.
            and not self.scheduler.beam_coordinator._num_live_groups
            and not TEST_RETRACT
        )

    def _nobody_can_join(self, running_batch: Any) -> bool:
        """Whether that is clear at once, as it is in most steps of a full engine."""
        scheduler = self.scheduler
        if (
            scheduler.waiting_queue
            or scheduler.chunked_req is not None
            or scheduler.grammar_manager.has_waiting_grammars()
        ):
            return False
        # SGLang's mark for "no rows left"; it takes it off when a request leaves.
        if running_batch.batch_is_full and running_batch.reqs:
            return True
        if not any(job.backlog.count for job in self.jobs.each):
            return True
        rows = scheduler.get_num_allocatable_reqs(
            len(running_batch.reqs), running_batch=running_batch
        )
        running_batch.batch_is_full = rows <= 0
        return bool(rows <= 0)

    def _choose(self, running_batch: Any, ready: list[Any]) -> Choice:
        """What joins this step; ``ready`` online requests join in any case."""
        if len(self.jobs) > 1:
            rows = len(running_batch.reqs)
            self.rooms.within_reach(self.step_tokens + (rows + 2) * self.page_size)
        now = self._engine_now(running_batch, ready)
        total = Choice(
            tokens=self.step_tokens - now.step_tokens,
            room_needed=self.cache.free_or_evictable() - now.room,
        )
        for job in self.jobs.in_turn():
            if self.rooms.num_parked:
                break
            elsewhere = self.jobs.locked_tokens - job.uses.locked_tokens
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
        known = self.jobs.known(chunked) if chunked is not None else None
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
            idle_frees=len(self.jobs) == 1,
            chunk_room=self._chunk_room(left, rows if mixed else 0, taken),
        )

    def _chunk_room(self, left: int, rows: int, taken: int) -> int:
        """Room for ``left`` tokens of a prompt that was begun, beside ``rows`` decodes."""
        if not left or self.occupancy.running <= 1:  # nobody will make room for it
            return self.occupancy.capacity
        # Each decode may begin a page.
        taken += rows * self.page_size
        wanted = min(left, self.step_tokens) + self.page_size + taken
        room = self.rooms.within_reach(wanted) - taken
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
        jobs = self.jobs
        for req in [line.req for line in choice.lines] + ready:
            known = jobs.known(req)
            assert known is not None
            job, line = known
            if req.rid not in left:
                self._admitted(job, line)
            elif job is not None:
                put_back(job, self.occupancy, line)
            else:
                jobs.leave_online(line)
        chunk = jobs.known(chunked) if chunked is not None else None
        if chunk is not None:
            self.steps.prefilled(chunk[1], chunked.extend_end - chunked.prefix_len)
            if self.scheduler.chunked_req is not chunked:
                self._starting.append(chunk[1])

    def _admitted(self, job: JobState | None, line: Line) -> None:
        req = line.req
        cached = req.prefix_len
        self.steps.admitted(line, cached, req.extend_end - cached)
        if req is not self.scheduler.chunked_req:
            self._starting.append(line)
        if job is not None:
            job.served += req.extend_end - cached + line.estimate
            if line.leaf >= 0:
                self.jobs.started(job, line, cached)

    def end_step(self, batch: Any) -> None:
        """The batch of this step is made; ``None`` if there is nothing to run."""
        if batch is None:
            return
        mode = batch.forward_mode
        decodes = mode.is_decode() or (mode.is_mixed() and bool(batch.decoding_reqs))
        record = self.steps.record(self, decodes=decodes)
        # Whose work a step is made of is not looked at: jobs take even turns.
        share = 1.0 / max(1, len(self.jobs))
        for job in self.jobs.each:
            job.work.did(share * record.compute_s, share * self.steps.last_kv_read_s)
        if decodes:
            outlived = self.occupancy.tick()
            if outlived:
                self.jobs.expect(outlived)


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
