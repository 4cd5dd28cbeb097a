"""SGLang's scheduler in an offline server: it asks the plan what comes next.

Each scheduler process (one per TP and DP rank) has one. SGLang builds and runs the
batches as always; the :class:`~.conductor.Conductor` decides who is in them.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from ..config import OfflineBatchConfig
from ..engine import KvUse
from ..scheduling.job_plan import JobPlan
from . import compat, plugin
from .adder import OfflinePrefillAdder, OfflineSchedulePolicy
from .attention_choice import share_by_default
from .conductor import Conductor
from .job_control import CLOSE, PRIORITY, JobControl, JobControlOutput
from .sharing import Sharing
from .step_metrics import step_metrics
from .step_results import OfflineOutputStreamer, OfflineResultProcessor
from .steps import Steps
from .support import STATE_KEY
from .waiting_view import WaitingView
from .warm_up import compile_planner

logger = logging.getLogger(__name__)


class MarkedScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler as it is; the main process can see that we are there."""

    def get_init_info(self) -> dict[str, Any]:
        """Say in the log of each rank that this scheduler is ours.

        Raises:
            EngineError: a hook of its process did not take effect.
        """
        compat.check_hooks_took(plugin.SCHEDULER_HOOKS)
        logger.info("Offline batch scheduler ready: %s", offline_config(self))
        return super().get_init_info()

    def get_internal_state(self, recv_req: Any) -> Any:
        """Add the settings in force to ``/server_info``, for each DP rank."""
        output = super().get_internal_state(recv_req)
        output.internal_state[STATE_KEY] = {
            "config": str(offline_config(self)),
            "step_tokens": self.chunked_prefill_size or self.max_prefill_tokens,
            "mixed_chunk": bool(self.is_mixed_chunk),
        }
        return output


class OfflineScheduler(MarkedScheduler):
    """The scheduler of an offline server; REPLACEs SGLang's in its processes."""

    conductor: Conductor
    sharing: Sharing

    def init_schedule_policy(self) -> None:
        super().init_schedule_policy()
        self.policy = OfflineSchedulePolicy(
            "fcfs",
            self.tree_cache,
            self.enable_hierarchical_cache,
            self.enable_priority_scheduling,
            self.schedule_low_priority_values_first,
        )

    def init_all_attention_backends(self) -> None:
        """SGLang captures CUDA graphs after it, with what is chosen here."""
        super().init_all_attention_backends()
        share_by_default(self.tp_worker.model_runner)

    def get_prefill_adder_class(self) -> type[OfflinePrefillAdder]:
        return OfflinePrefillAdder

    def get_output_streamer_class(self) -> type[OfflineOutputStreamer]:
        return OfflineOutputStreamer

    def init_batch_result_processor(self) -> None:
        super().init_batch_result_processor()
        self.output_streamer.is_online = self.conductor.jobs.is_online
        stock = self.batch_result_processor
        self.batch_result_processor = OfflineResultProcessor.like(stock)

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher([(JobControl, self._control)])

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        # The first place where all that the conductor looks at is there.
        compile_planner()
        self.conductor = Conductor(self, self._make_steps())
        self.sharing = Sharing(self.tp_worker.model_runner, self.conductor.jobs)
        self.load_inquirer = dataclasses.replace(
            self.load_inquirer,
            get_waiting_queue=lambda: WaitingView(self.waiting_queue, self.conductor),
        )

    def _make_steps(self) -> Steps:
        config = offline_config(self)
        log = Path(config.step_log) if config.step_log else None
        if get_parallel().tp_rank != 0:
            return Steps(None, None)
        dp_rank = get_parallel().dp_rank
        if log is not None and dp_rank:
            log = log.with_name(f"{log.name}.dp{dp_rank}")
        return Steps(log, step_metrics(self))

    def get_internal_state(self, recv_req: Any) -> Any:
        """Add what is there and what was done, too."""
        output = super().get_internal_state(recv_req)
        conductor = self.conductor
        output.internal_state[STATE_KEY] |= {
            "jobs": len(conductor.jobs),
            "waiting": conductor.num_waiting,
            "parked_now": conductor.rooms.num_parked,
            "parked_host_bytes": conductor.rooms.host_bytes,
            "kv_use": dataclasses.asdict(_kv_use(conductor)),
            "shares_prefixes": bool(self.sharing.backends),
            **conductor.steps.totals,
            **self.sharing.totals,
        }
        return output

    def _control(self, message: JobControl) -> JobControlOutput:
        if message.action == CLOSE:
            left = self.conductor.jobs.close(message.job_id)
        elif message.action == PRIORITY:
            left = self.conductor.jobs.set_priority(message.job_id, message.priority)
        else:
            plans, rank = message.plans, get_parallel().dp_rank or 0
            plan = JobPlan.from_bytes(plans[min(rank, len(plans) - 1)])
            left = self.conductor.jobs.open(message.job_id, plan)
        return JobControlOutput(job_id=message.job_id, num_requests=left)

    # Steps ----------------------------------------------------------------------------

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        self.conductor.begin_step()
        plan = super().get_next_batch_to_run(running_batch, last_batch)
        self.conductor.end_step(plan.batch_to_run)
        return plan

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        return self.conductor.next_batch(running_batch, super().get_new_batch_prefill)

    def _reqs_finishing_inflight(self, batch: Any) -> list[Any]:
        if not self.conductor.occupancy.complete:
            return []
        finishing: list[Any] = super()._reqs_finishing_inflight(batch)
        return finishing

    def update_running_batch(self, batch: Any) -> Any:
        """SGLang's, without its questions to each request where all are answered."""
        if not self.conductor.all_decode(batch):
            return super().update_running_batch(batch)
        self.new_token_ratio_tracker.decay_step()
        batch.prepare_for_decode()
        return batch

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.sharing.backends:
            return super().run_batch(batch, *args, **kwargs)
        self.sharing.show(batch)
        result = super().run_batch(batch, *args, **kwargs)
        self.conductor.steps.kv_saved_bytes = self.sharing.saved_bytes
        return result

    def on_idle(self) -> None:
        self.conductor.steps.flush()
        super().on_idle()

    # The waiting queue ----------------------------------------------------------------

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        if not self.conductor.jobs.enqueue(req):
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
            return bool(idle and not self.conductor.rooms.num_parked)
        return bool(idle and not self.conductor.num_waiting)

    def abort_request(self, recv_req: AbortReq) -> None:
        for req in self.conductor.abort(recv_req.rid, everything=recv_req.abort_all):
            self._release_aborted_request(req)
            reason = recv_req.finished_reason
            self.send_abort_output(_make_abort_req(req, finished_reason=reason), req)
        super().abort_request(recv_req)

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        super().pause_generation(recv_req)
        if recv_req.mode == "retract":
            # New weights may come: KV on the host would be of the old ones.
            self.conductor.rooms.give_up_all()


def _kv_use(conductor: Conductor) -> KvUse:
    occupancy = conductor.occupancy
    shared = sum(int(job.uses.locked_tokens) for job in conductor.jobs.each)
    return KvUse(occupancy.running, *occupancy.kv, shared, occupancy.capacity)


def offline_config(scheduler: Any) -> OfflineBatchConfig:
    """The settings that the server was started with."""
    return OfflineBatchConfig.from_json(scheduler.server_args.offline_batch_config)
