"""Online requests next to batches: they join first, and requests of jobs make room."""

from __future__ import annotations

from ...planner.requests import ONLINE
from ...scheduling.job_state import DEFAULT_EST_DECODE_STEPS, UNPLANNED_POSITION
from ...scheduling.scheduled_request import ScheduledRequest
from ..compat.scheduler_types import Req, ScheduleBatch, Scheduler
from .engine_jobs import EngineJobs, SchedulerPart
from .kv.kv_manager import KvManager
from .mixed_batch import num_rows

# Decode steps of an online request for which requests of jobs make room.
_HEADROOM_STEPS = 16


class OnlineQueue(SchedulerPart):
    """SGLang's waiting queue, which holds online requests only."""

    def __init__(
        self, scheduler: Scheduler, jobs: EngineJobs, kv_manager: KvManager
    ) -> None:
        super().__init__(scheduler, jobs)
        # Whether the KV of all tokens but the last of each request is on the host.
        self._on_host = jobs.decode_only
        self._in_pages = jobs.kv_accounting.in_pages
        self._kv_manager = kv_manager
        self._adapters = jobs.adapters
        self._drained = False
        # A request that did not fit although room was made, and the number of online
        # requests that ran then.
        self._in_vain: tuple[str, int] | None = None

    def ready(self, running_batch: ScheduleBatch) -> tuple[list[Req], list[Req]]:
        """Online requests that join now, and those that wait. Those that join count as
        running, and requests of jobs have been offloaded for them where necessary."""
        queue = self._scheduler.waiting_queue
        ready: list[Req] = []
        if not queue:
            return ready, []
        self._drained = False
        rows = 0
        for req in queue:
            request = _scheduled(req, on_host=self._on_host)
            if self._adapters is not None and not self._adapters.online_may_join(
                request
            ):
                break
            if not self._fits(running_batch, request, rows):
                # Do not offload in vain in every step.
                running = self._kv_accounting.requests
                state = (req.rid, sum(each.side == ONLINE for each in running))
                if state == self._in_vain:
                    break
                self._make_room(running_batch, request, rows)
                if not self._fits(running_batch, request, rows):
                    self._in_vain = state
                    break
            self._registry.join_online(request)
            ready.append(req)
            rows += request.rows
        if ready:
            length = len(ready[0].origin_input_ids) + len(ready[0].output_ids)
            # SGLang computes one prompt in chunks at a time. Online requests are served
            # first come, first served, but none waits for the prompt of a job.
            if self._in_pages(length) > self._most_tokens(running_batch):
                self._requeue_chunk(running_batch)
        return ready, queue[len(ready) :]

    def make_room_for_chunk(self, running_batch: ScheduleBatch) -> bool:
        """Make room for an online prompt that is partly computed: there was room when it
        joined, but decodes may have begun pages since.

        Returns:
            Whether the prompt can continue in this step. If no requests of jobs are left to
                offload, it waits for running requests to end.
        """
        chunked = self._scheduler.chunked_req
        if chunked is None or not self._registry.is_online(chunked):
            return True
        left = len(chunked.full_untruncated_fill_ids) - chunked.extend_end
        need = min(left, self._step_tokens) + self._page_size
        need += len(running_batch.reqs) * self._page_size
        if self._pinned.reachable_tokens(need) < need:
            self._drained = False
            self._drain(running_batch)
            self._kv_manager.offload_until(running_batch, need, leave=0)
        reachable = self._pinned.reachable_tokens(need)
        return reachable >= need or self._kv_accounting.num_running <= 1

    def chunk_limit(self, ready: list[Req], running_batch: ScheduleBatch) -> int | None:
        """Tokens that a prompt in progress may take so that ``ready`` requests fit too.
        Requests that need chunks themselves wait for its end. None for no limit."""
        most = self._most_tokens(running_batch)
        taken = 0
        for req in ready:
            tokens = self._in_pages(len(req.origin_input_ids) + len(req.output_ids))
            if taken + tokens + self._page_size > most:
                break
            taken += tokens
        return self._in_pages(most - taken) if taken else None

    def join_unseen(self, batch: ScheduleBatch) -> list[Req]:
        """Register requests that SGLang admitted without :meth:`ready`, because their
        grammar was compiled while SGLang built the batch, and return them."""
        unseen = [req for req in batch.reqs if self._registry.known(req) is None]
        for req in unseen:
            self._registry.join_online(_scheduled(req, on_host=self._on_host))
        return unseen

    def _fits(
        self, running_batch: ScheduleBatch, request: ScheduledRequest, rows: int
    ) -> bool:
        if self._kv_accounting.num_running == 0:
            return True
        if self._free_rows(running_batch) < rows + request.rows:
            return False
        need = self._first_step_tokens(request)
        if self._scheduler.chunked_req is not None:
            need += self._page_size  # SGLang computes part of it in the same step
        if need > self._pinned.reachable_tokens(need):
            return False
        jobs = self._jobs
        return self._kv_accounting.fits(request, jobs.locked_tokens, 0, jobs.num_locked)

    def _make_room(
        self, running_batch: ScheduleBatch, request: ScheduledRequest, rows: int
    ) -> None:
        self._drain(running_batch)
        need = self._first_step_tokens(request)
        need += min(request.est_decode_steps, _HEADROOM_STEPS)
        short = rows + request.rows - self._free_rows(running_batch)
        self._kv_manager.offload_until(running_batch, need, leave=0, num_rows=short)
        # KV reserved for the growth of other requests may still leave too little.
        while not self._fits(running_batch, request, rows):
            running = len(running_batch.reqs)
            self._kv_manager.offload_until(running_batch, 0, leave=0, num_rows=1)
            if len(running_batch.reqs) == running:
                self._requeue_chunk(running_batch)
                break

    def _first_step_tokens(self, request: ScheduledRequest) -> int:
        """KV for a request's prompt and for the decodes of the same step, in tokens."""
        prompt = request.input_len + request.steps
        return prompt + self._page_size + self._kv_accounting.growth

    def _requeue_chunk(self, running_batch: ScheduleBatch) -> None:
        if self._scheduler.chunked_req is not None:
            self._drain(running_batch)
            self._kv_manager.requeue_chunk()

    def _drain(self, running_batch: ScheduleBatch) -> None:
        if not self._drained:
            super()._drain(running_batch)
            self._drained = True

    def _most_tokens(self, running_batch: ScheduleBatch) -> int:
        """Prompt tokens in the next step, in whole pages."""
        page = self._page_size
        rows = len(running_batch.reqs) if self._scheduler.is_mixed_chunk else 0
        return max(page, (self._step_tokens - rows) // page * page)


def _scheduled(req: Req, *, on_host: bool) -> ScheduledRequest:
    """An online request, which no plan has."""
    length = len(req.origin_input_ids)
    max_decode_steps = max(0, (req.sampling_params.max_new_tokens or 0) - 1)
    steps = len(req.output_ids) - on_host
    return ScheduledRequest(
        req=req,
        leaf=-1,
        node=0,
        position=UNPLANNED_POSITION,
        input_len=length,
        own=length,
        max_decode_steps=max_decode_steps,
        est_decode_steps=max(steps, min(max_decode_steps, DEFAULT_EST_DECODE_STEPS)),
        rows=num_rows(req),
        adapter=req.lora_id,
        side=ONLINE,
        steps=steps,
    )
