"""The scheduler of a decode server that follows the plans of jobs.

A request comes without KV. SGLang's queues ask a prefill server for it, and it is received
into the host pool (:mod:`.reception`). From then on the request is like one that was
offloaded. No prompt is computed, so no batch is built: requests join the running batch.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import NextBatchPlan, _make_abort_req
from sglang.srt.mem_cache.common import discard_kv_cache_backup
from sglang.srt.observability.req_time_stats import set_schedule_time_batch
from sglang.srt.runtime_context import get_disagg

from ...errors import EngineError
from ...scheduling.job_state import JobState
from ...scheduling.scheduled_request import ScheduledRequest
from ..compat.scheduler_types import BuildPrefill, Req, ScheduleBatch
from ..scheduler.online_queue import OnlineQueue
from ..scheduler.plan_scheduler import PlanScheduler
from ..scheduler.scheduler import OfflineScheduler
from .apart_schedulers import Apart
from .prefill_calls import room_after
from .reception import HostPreallocQueue, Reception
from .tcp.tcp_manager import PageBuffers


class DecodePlanScheduler(PlanScheduler):
    """Carries out the plans of one scheduler process of a decode server."""

    _scheduler: DecodeScheduler

    def _not_running(
        self, rid: str, *, everything: bool
    ) -> list[tuple[JobState, ScheduledRequest]]:
        # SGLang's queues have those whose KV is on its way.
        here = self._kv_manager.on_host
        found = super()._not_running(rid, everything=everything)
        return [(job, request) for job, request in found if request in here]

    def next_batch(
        self, running_batch: ScheduleBatch, build: BuildPrefill
    ) -> NextBatchPlan:
        """Nothing to build, and the running batch with those that join it."""
        if self._adapters is not None:
            self._adapters.begin_step()
        self._kv_manager.make_room_for_decodes(running_batch)
        running_batch = self._join_online(running_batch)
        running_batch = self._kv_manager.resume(running_batch)
        for hook in self._hooks:
            hook.before_choice(running_batch)
        if not self._nobody_can_join(running_batch):
            choice = self._choose_from_jobs(running_batch, [])
            running_batch = self._kv_manager.join(running_batch, choice.from_host)
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)

    def _join_online(self, running_batch: ScheduleBatch) -> ScheduleBatch:
        """Have online requests join for which there is room, or was made."""
        if not self._scheduler.waiting_queue:
            return running_batch
        ready, waiting = self._online.ready(running_batch)
        for i, req in enumerate(ready):
            known = self._registry.known(req)
            assert known is not None
            kv = self._scheduler.reception.online[req.rid]
            joined = self._kv_manager.join_one(running_batch, kv)
            if joined is None:  # it fits later
                for each in ready[i:]:
                    late = self._registry.known(each)
                    assert late is not None
                    self._registry.leave_online(late[1])
                waiting = ready[i:] + waiting
                break
            running_batch = joined
            del self._scheduler.reception.online[req.rid]
            self._kv_accounting.begin_decoding(known[1])
        self._scheduler.waiting_queue = waiting
        return running_batch


class DecodeScheduler(Apart, OfflineScheduler):
    """The scheduler of a decode server, which follows the plans of jobs."""

    is_decode_only = True

    def _make_parts(self) -> None:
        if not isinstance(self.disagg_decode_prealloc_queue, HostPreallocQueue):
            raise EngineError(
                "The queue for received KV did not take effect; see the log above for "
                "SGLang's reason."
            )
        super()._make_parts()
        manager = self.disagg_decode_prealloc_queue.kv_manager
        offloader = self.jobs.offloader
        assert offloader is not None  # Reception was made with it
        pages = PageBuffers.of_views(offloader.pool.host_layers())
        assert pages.row_lengths == manager.kv.row_lengths
        manager.destinations.host = pages

    def _make_plan_scheduler(self, online: OnlineQueue) -> DecodePlanScheduler:
        self.reception = Reception(self.jobs, self.kv_manager)
        return DecodePlanScheduler(self, self.jobs, self.kv_manager, online, self.hooks)

    # Requests come --------------------------------------------------------------------

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        """Ask for a request's KV: of its prompt, or of all its tokens if it lost it."""
        queue = self.disagg_decode_prealloc_queue
        if not is_retracted:
            queue.add(req)
            return
        backup = get_disagg().disaggregation_decode_retraction_backup
        discard_kv_cache_backup(req, self.tree_cache, backup)
        if req.output_ids:
            # It is fed again, and not sampled: it has been sent.
            req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
        req.pd_rebootstrap_in_progress = True
        req.bootstrap_room = room_after(req.bootstrap_room)
        req.time_stats.set_retract_time()
        if self._engine_paused:
            queue.hold_rebootstrap(req)
        else:
            queue.add(req, is_rebootstrap=True)

    def process_decode_queue(self) -> None:
        """Take the requests whose KV has come."""
        if self.grammar_manager.has_waiting_grammars():
            for req in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(req)
        online, self.waiting_queue = self.waiting_queue, []
        super().process_decode_queue()
        arrived, self.waiting_queue = self.waiting_queue, online
        for req in arrived:
            self._arrived(req)

    def _arrived(self, req: Any) -> None:
        num_tokens = len(req.origin_input_ids) + len(req.output_ids) - 1
        again = getattr(req, "pd_rebootstrap_in_progress", False)
        req.pd_rebootstrap_in_progress = False
        req.is_retracted = False
        req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
        req.prefix_len, req.extend_end = 0, num_tokens
        req.already_computed = num_tokens
        if not again:
            self._accept_first_token(req)
            req.update_finish_state()
        if not self.reception.arrived(req, num_tokens):
            self.waiting_queue.append(req)
        if req.finished():
            self._drop(req)
        if not again:
            self.output_streamer.stream_output([req], req.return_logprob)

    def _accept_first_token(self, req: Any) -> None:
        if req.grammar is None or req.grammar.current_token is not None:
            return
        try:
            req.grammar.accept_token(req.output_ids[-1])
        except ValueError as error:
            req.to_finish = FINISH_ABORT(
                f"The grammar does not allow the first token: {error}",
                HTTPStatus.INTERNAL_SERVER_ERROR,
            )
        req.grammar.finished = req.finished()

    # Steps ----------------------------------------------------------------------------

    def get_next_disagg_decode_batch_to_run(
        self, running_batch: ScheduleBatch
    ) -> NextBatchPlan:
        self.plan_scheduler.begin_step()
        rows = len(running_batch.reqs)
        running_batch.filter_batch()
        if len(running_batch.reqs) < rows:
            running_batch.batch_is_full = False
        plan = self.plan_scheduler.next_batch(running_batch, self._build_prefill)
        running_batch = plan.running_batch
        batch: ScheduleBatch | None = None
        if not running_batch.is_empty():
            running_batch = self.update_running_batch(running_batch)
            batch = None if running_batch.is_empty() else running_batch
        batch = self.dp_attn_adapter.maybe_prepare_mlp_sync_batch(batch)
        if batch is not None:
            set_schedule_time_batch(batch)
        self.plan_scheduler.end_step(batch)
        self._report_joined()
        return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)

    # Requests leave -------------------------------------------------------------------

    def _drop(self, req: Req) -> None:
        planned = self.jobs.registry.planned(req)
        if planned is None:
            self.reception.drop_online(req)
            self.waiting_queue = [each for each in self.waiting_queue if each != req]
            return
        job, request = planned
        self.kv_manager.drop(request)
        job.take(request)
        self.jobs.registry.skip(job, request)

    def abort_request(self, recv_req: AbortReq) -> None:
        def named(req: Req) -> bool:
            return bool(recv_req.abort_all or req.rid.startswith(recv_req.rid))

        for req in [req for req in self.waiting_queue if named(req)]:
            self._drop(req)
            self._release_waiting(req)
            reason = recv_req.finished_reason
            self.send_abort_output(_make_abort_req(req, finished_reason=reason), req)
        for coming in self.disagg_decode_transfer_queue.queue:
            if named(coming.req):  # nothing is written for it any more
                coming.kv_receiver.abort()
        super().abort_request(recv_req)

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        super().pause_generation(recv_req)
        if recv_req.mode == "retract":
            waiting, self.waiting_queue = self.waiting_queue, []
            for req in waiting:
                self._add_request_to_queue(
                    self.reception.give_up_online(req), is_retracted=True
                )
