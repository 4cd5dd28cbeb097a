"""SGLang's scheduler in an offline server, which follows the plans of jobs.

There is one in each scheduler process, for each TP and DP rank. SGLang builds and runs
the batches as usual. :class:`~.plan_scheduler.PlanScheduler` decides which requests are
in them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.mem_pool import EMPTY_SLOT
from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import NextBatchPlan, _make_abort_req
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer
from sglang.srt.runtime_context import get_parallel

from ...job.engine import KvUse
from ...planner.admission_rules import kv_forecast
from ...planner.admission_rules.dual_scanner import ScanState, budgets, next_pace
from ...scheduling.adapter_slots import AdapterSlots
from ...scheduling.job_plan import JobPlan
from ...scheduling.job_state import Joined
from ...scheduling.open_jobs import WaitingView
from ...scheduling.running_tree import running_tree
from ...scheduling.step_record import StepSamples
from ..attention.attention_choice import share_by_default
from ..attention.attention_plans import Sharing
from ..compat.job_control import (
    CHANGE,
    CLOSE,
    PRIORITY,
    JobControl,
    JobControlOutput,
    JobJoined,
    StepsQuery,
    StepsQueryOutput,
    TreeQuery,
    TreeQueryOutput,
)
from ..compat.scheduler_types import Req, ScheduleBatch
from ..compat.support import found_limits
from ..compat.tiers import ModelTier, Tier, model_tier
from .engine_jobs import EngineJobs, draft_slots, leave_room_for_drafts
from .experimental import experimental_hooks
from .kv.kv_manager import KvManager
from .kv.offloading import KvOffloader, copies_kv, make_offloader, why_unsupported
from .marked_scheduler import MarkedScheduler
from .mixed_batch import with_decodes
from .online_queue import OnlineQueue
from .plan_scheduler import PlanScheduler
from .sglang_parts import (
    OfflineOutputStreamer,
    OfflinePrefillAdder,
    OfflineResultProcessor,
    OfflineSchedulePolicy,
)
from .step_recorder import StepReports, step_metrics

logger = logging.getLogger(__name__)


def _replica() -> int:
    """Which shard of a plan this scheduler has."""
    parallel = get_parallel()
    if parallel.attn_dp_enabled:
        return int(parallel.attn_dp_rank)
    return parallel.dp_rank or 0


def _is_first_rank() -> bool:
    """Whether this is the first of the schedulers that have the same requests."""
    parallel = get_parallel()
    return not (parallel.attn_tp_rank or parallel.attn_cp_rank or parallel.pp_rank)


class OfflineScheduler(MarkedScheduler):
    """The scheduler of an offline server, in place of SGLang's.

    Attributes:
        jobs, kv_manager, plan_scheduler: made when SGLang's scheduler is complete.
    """

    # Whether other servers compute all prompts.
    is_decode_only = False
    batch_result_processor: SchedulerBatchResultProcessor
    load_inquirer: SchedulerLoadInquirer
    waiting_queue: list[Any]

    tier: ModelTier

    def init_all_attention_backends(self) -> None:
        """Choose the backend before SGLang captures CUDA graphs with it."""
        super().init_all_attention_backends()
        share_by_default(self.tp_worker.model_runner)

    def maybe_init_draft_worker(self) -> None:
        super().maybe_init_draft_worker()
        if self.draft_worker is not None:
            from .drafts import change_drafts  # its imports need ours on a CPU

            change_drafts(self)

    def get_prefill_adder_class(self) -> type[OfflinePrefillAdder]:
        return OfflinePrefillAdder

    def get_output_streamer_class(self) -> type[OfflineOutputStreamer]:
        return OfflineOutputStreamer

    def _make_parts(self) -> None:
        super()._make_parts()
        compile_planner()
        leave_room_for_drafts(self)
        self.policy = OfflineSchedulePolicy(
            "fcfs",
            self.tree_cache,
            self.enable_hierarchical_cache,
            self.enable_priority_scheduling,
            self.schedule_low_priority_values_first,
        )
        self.tier, offloader = self._find_tier()
        self.jobs = EngineJobs(
            self, offloader, self._step_reports(), decode_only=self.is_decode_only
        )
        self.kv_manager = KvManager(self, self.jobs)
        self.jobs.adapters = self._make_adapter_slots()
        self.sharing = Sharing(self.tp_worker.model_runner, self.jobs.registry)
        self.hooks = experimental_hooks(self)
        self.plan_scheduler = self._make_plan_scheduler(
            OnlineQueue(self, self.jobs, self.kv_manager)
        )
        self.load_inquirer = dataclasses.replace(
            self.load_inquirer,
            get_waiting_queue=lambda: WaitingView(
                self.waiting_queue, self.jobs.open, len(self.kv_manager.on_host.first)
            ),
        )
        self.output_streamer.is_online = self.jobs.registry.is_online
        stock = self.batch_result_processor
        self.batch_result_processor = OfflineResultProcessor.like(stock)
        self._answer(JobControl, self._control)
        self._answer(TreeQuery, self._tree)
        if _is_first_rank() and _replica() == 0:
            logger.info("%s.", self.tier)

    def _find_tier(self) -> tuple[ModelTier, KvOffloader | None]:
        """How much of the plan the model allows, and the mover of KV to the host."""
        limits = found_limits(resolved_view(self.server_args))
        found = model_tier(self.model_config).without_offloading(*limits)
        # Something that neither table names.
        obstacle = why_unsupported(self) if found.tier is Tier.FULL else None
        if obstacle:
            found = found.without_offloading(f"of {obstacle}")
        if found.tier is not Tier.FULL:
            return found, None  # SGLang retracts requests
        offloader = make_offloader(self)
        if not copies_kv():  # requests that make room are computed again
            found = found.without_offloading("of pipeline parallelism")
        return found, offloader

    def _make_plan_scheduler(self, online: OnlineQueue) -> PlanScheduler:
        return PlanScheduler(self, self.jobs, self.kv_manager, online, self.hooks)

    def _make_adapter_slots(self) -> AdapterSlots | None:
        """None for a server without adapters."""
        if not self.enable_lora:
            return None
        manager = self.tp_worker.model_runner.lora_manager
        return AdapterSlots(
            self.jobs.open,
            manager.validate_lora_batch,
            lambda: [
                *self.jobs.kv_accounting.requests,
                *(one.request for one in self.kv_manager.on_host.first.values()),
            ],
            partial(unload_others, manager),
        )

    def _step_reports(self) -> StepReports:
        """Only the first rank of each replica publishes its records."""
        log, metrics = None, None
        if _is_first_rank():
            replica = _replica()
            path = self.server_args.offline_config.step_log
            log = Path(path) if path else None
            if log is not None and replica:
                log = log.with_name(f"{log.name}.dp{replica}")
            # The KV manager is made later.
            metrics = step_metrics(self, lambda: self.kv_manager.on_host.use)
        return StepReports(log, metrics, self._make_samples())

    def _count_cut(self, rule: str) -> None:
        self.jobs.recorder.cut(rule)

    def _make_samples(self) -> StepSamples | None:
        """None where a step's time is not that of its tokens: micro-batches alternate, and
        of drafts nobody knows how many are accepted."""
        if not _is_first_rank() or get_parallel().pp_size > 1 or draft_slots():
            return None
        # On a CPU a forward is over when SGLang's call returns, overlap or not.
        return StepSamples(late=bool(self.enable_overlap) and self.device != "cpu")

    def _timed_steps(self, message: StepsQuery) -> StepsQueryOutput:
        samples = self.jobs.recorder.samples
        found = [] if samples is None else samples.take()
        return StepsQueryOutput(samples=[x for sample in found for x in sample])

    def _offline_state(self) -> dict[str, object]:
        """The settings, the current state and the totals, for ``/server_info``."""
        second = self.jobs.kv_accounting.second
        state = super()._offline_state() | {
            "tier": str(self.tier),
            "jobs": len(self.jobs.open),
            "waiting": self._num_waiting,
            **self.kv_manager.on_host.state,
            "kv_use": dataclasses.asdict(_kv_use(self.jobs)),
            "shares_prefixes": bool(self.sharing.backends),
            "overlapped": bool(self.enable_overlap),
            "second_pool": None if second is None else [*second],
            "admissions": self.jobs.recorder.admissions,
            **self.jobs.recorder.totals,
            **self.sharing.totals,
        }
        for hook in self.hooks:
            state |= hook.totals
        return state | {old: state[new] for old, new in _OLD_STATE_KEYS.items()}

    @property
    def _num_waiting(self) -> int:
        return self.jobs.open.num_waiting + len(self.kv_manager.on_host.first)

    def _control(self, message: JobControl) -> JobControlOutput:
        if message.action == CLOSE:
            self.jobs.registry.close(message.job_id)
        elif message.action == PRIORITY:
            self.jobs.registry.set_priority(message.job_id, message.priority)
        else:
            plans = message.plans
            data = plans[min(_replica(), len(plans) - 1)]
            if message.action == CHANGE:
                plan = self.jobs.registry.announced(message.job_id).changed(data)
            else:
                plan = JobPlan.from_bytes(data)
            self.jobs.registry.open(message.job_id, plan, message.names, message.first)
            job = self.jobs.open.get(message.job_id)
            if job is not None and job.joined is None and message.reports:
                job.joined = Joined(message.http_worker_ipc, [])
        return JobControlOutput()

    def _reqs(self) -> Iterable[Req]:
        return self.jobs.registry.reqs

    def _report_joined(self) -> None:
        """Tell the sender of a job's plans which of its requests joined this step."""
        for job in self.jobs.open.each:
            if job.joined is not None and job.joined.numbers:
                numbers = np.array(job.joined.numbers, np.int32)
                report = JobJoined(job_id=job.job_id, numbers=numbers.tobytes())
                report.http_worker_ipc = job.joined.report_to
                self.ipc_channels.send_to_tokenizer.send_output(report)
                job.joined.numbers.clear()

    def _tree(self, message: TreeQuery) -> TreeQueryOutput:
        tree = running_tree(self.jobs.open.each, message.limit)
        recorder = self.jobs.recorder
        tree["admission"] = recorder.last_admission.name.lower()
        tree["admissions"] = recorder.admissions
        return TreeQueryOutput(dp_rank=_replica(), tree=json.dumps(tree).encode())

    # Steps ----------------------------------------------------------------------------

    def get_next_batch_to_run(
        self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None
    ) -> NextBatchPlan:
        return self._step(super().get_next_batch_to_run, running_batch, last_batch)

    def _step(
        self, next_batch: Callable[..., NextBatchPlan], *args: object, **kwargs: object
    ) -> NextBatchPlan:
        """SGLang's choice of the next batch, as a step of the plan."""
        self.plan_scheduler.begin_step()
        plan = next_batch(*args, **kwargs)
        self.plan_scheduler.end_step(plan.batch_to_run)
        self._report_joined()
        return plan

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        return self.plan_scheduler.next_batch(running_batch, self._build_prefill)

    def _build_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        return with_decodes(self, super().get_new_batch_prefill(running_batch))

    def _reqs_finishing_inflight(self, batch: ScheduleBatch) -> list[Req]:
        if not self.jobs.kv_accounting.num_complete:
            return []
        finishing: list[Req] = super()._reqs_finishing_inflight(batch)
        return finishing

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch:
        """SGLang's, without its checks of each request where the results are certain."""
        if not self.plan_scheduler.all_decode(batch):
            updated: ScheduleBatch = super().update_running_batch(batch)
            return updated
        batch.prepare_for_decode()
        return batch

    def run_batch(
        self, batch: ScheduleBatch, *args: object, **kwargs: object
    ) -> object:
        apart = sum(hook.before_forward(batch) for hook in self.hooks)
        if not self.sharing.backends:
            return super().run_batch(batch, *args, **kwargs)
        self.sharing.show(batch, apart)
        result = super().run_batch(batch, *args, **kwargs)
        self.jobs.recorder.kv_saved_bytes = self.sharing.totals["kv_read_bytes_saved"]
        return result

    def on_idle(self) -> None:
        self.jobs.recorder.flush()
        super().on_idle()

    # The waiting queue ----------------------------------------------------------------

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if not self.jobs.registry.enqueue(req):
            super()._add_request_to_queue(req, is_retracted)
            return
        if not is_retracted:
            req.time_stats.set_wait_queue_entry_time()
            req.arrival_processed_tokens = self.processed_tokens_counter

    def is_fully_idle(
        self, for_health_check: bool = False, ignore_waiting: bool = False
    ) -> bool:
        idle = super().is_fully_idle(for_health_check, ignore_waiting)
        if ignore_waiting:
            return bool(idle and not len(self.kv_manager.on_host))
        return bool(idle and not self._num_waiting)

    def abort_request(self, recv_req: AbortReq) -> None:
        for req in self.plan_scheduler.abort(
            recv_req.rid, everything=recv_req.abort_all
        ):
            self._release_waiting(req)
            if len(req.output_ids) and req.beam_group is None:
                # It ran before. SGLang's answer to a waiting request has only the tokens
                # that were sent so far, every 50th step.
                req.finished_reason = FINISH_ABORT()
                self.output_streamer.stream_output([req], req.return_logprob)
                continue
            reason = recv_req.finished_reason
            self.send_abort_output(_make_abort_req(req, finished_reason=reason), req)
        super().abort_request(recv_req)

    def send_abort_output(self, abort_req: object, req: Req) -> None:
        self.plan_scheduler.aborted(req)
        super().send_abort_output(abort_req, req)

    def _release_waiting(self, req: Req) -> None:
        self._release_aborted_request(req)

    def record_weight_version_change(self, new_version: str | None) -> None:
        """SGLang's, for the requests in the backlog, too: some of them ran before."""
        stock = self.waiting_queue
        waiting = self.jobs.registry.not_running("", everything=True)
        self.waiting_queue = [*stock, *(request.req for _, request in waiting)]
        super().record_weight_version_change(new_version)
        self.waiting_queue = stock

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        super().pause_generation(recv_req)
        if recv_req.mode == "retract":
            # New weights may be loaded meanwhile, and KV on the host is of the old ones.
            self.kv_manager.recompute_all()


# Names in /server_info before offloading was called that. Kept for one release.
_OLD_STATE_KEYS = {
    "parked": "offloaded",
    "parked_now": "offloaded_now",
    "parked_host_bytes": "offloaded_host_bytes",
}


def _kv_use(jobs: EngineJobs) -> KvUse:
    kv_accounting = jobs.kv_accounting
    left, right, online = kv_accounting.kv
    return KvUse(
        running=kv_accounting.num_running, left=left, right=right, online=online,
        shared=int(jobs.open.locked_tokens), capacity=kv_accounting.capacity,
    )  # fmt: skip


def unload_others(manager: LoRAManager, needed: Collection[str | None]) -> None:
    """Unload an adapter that is not among the ids ``needed``, where None is the model
    alone, if the pool is full and one is still to be loaded. SGLang would evict one that is
    not in the very next batch, and the model alone, which takes a slot, after all adapters.
    """
    pool = manager.memory_pool
    missing = sum(uid not in pool.uid_to_buffer_id for uid in needed)
    missing -= sum(uid is EMPTY_SLOT for uid in pool.buffer_id_to_uid)
    for uid in list(pool.uid_to_buffer_id):
        if missing <= 0:
            return
        ref = manager.lora_refs.get(uid)
        if uid not in needed and (ref is None or not ref.pinned):
            pool.remove_lora(uid)
            missing -= 1


def compile_planner() -> None:
    """Takes seconds once per installation, then milliseconds, from a cache on disk."""
    forecast = kv_forecast.make_forecast(1)
    bucket = kv_forecast.add(forecast, 0, 1, 1)
    kv_forecast.growth(1, 0, 1, 0)
    kv_forecast.fits(forecast, 0, 1, 1, 0, 1.0)
    kv_forecast.remove(forecast, bucket, 1, 2)
    next_pace(1.0, False)
    times = 0.0, 1.0, 0.0, 1.0
    budgets(ScanState(1, 0, 1.0, 1.0, True, True, 1.0, 0, *times, 0, 0, 1.0, 1.0, 1.0))
