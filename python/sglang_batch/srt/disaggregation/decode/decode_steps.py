"""Which requests decode in the next step of a decode server.

All KV comes from the host, and no prompt is computed. So nothing is built: requests join
the running batch.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler import NextBatchPlan

from ....scheduling.job_state import JobState
from ....scheduling.scheduled_request import ScheduledRequest
from ...compat.scheduler_types import BuildPrefill, PrefillPlan, ScheduleBatch
from ...scheduler.plan_scheduler import PlanScheduler
from .reception import Reception


class DecodePlanScheduler(PlanScheduler):
    """Carries out the plans of one scheduler process of a decode server.

    Args:
        reception: the requests whose KV has come.
    """

    def __init__(self, *args: Any, reception: Reception, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._reception = reception

    def _not_running(
        self, rid: str, *, everything: bool
    ) -> list[tuple[JobState, ScheduledRequest]]:
        # SGLang's queues have those whose KV is on its way.
        here = self._kv_manager.on_host
        found = super()._not_running(rid, everything=everything)
        return [(job, request) for job, request in found if request in here]

    def next_batch(
        self, running_batch: ScheduleBatch, build: BuildPrefill
    ) -> PrefillPlan:
        """Nothing to build, and the running batch with those that join it."""
        if self._adapters is not None:
            self._adapters.begin_step()
        self._kv_manager.make_room_for_decodes(running_batch)
        running_batch = self._join_online(running_batch)
        running_batch = self._kv_manager.resume(running_batch)
        self._kv_manager.park(running_batch)
        if not self._nobody_can_join(running_batch):
            choice = self._choose_from_jobs(running_batch, [])
            running_batch = self._kv_manager.join(running_batch, choice.from_host)
        plan: PrefillPlan = NextBatchPlan(
            batch_to_run=None, running_batch=running_batch
        )
        return plan

    def _join_online(self, running_batch: ScheduleBatch) -> ScheduleBatch:
        """Have online requests join for which there is room, or was made."""
        if not self._scheduler.waiting_queue:
            return running_batch
        ready, waiting = self._online.ready(running_batch)
        for i, req in enumerate(ready):
            known = self._registry.known(req)
            assert known is not None
            kv = self._reception.online_kv(req)
            joined = self._kv_manager.join_one(running_batch, kv)
            if joined is None:  # it fits later
                for each in ready[i:]:
                    late = self._registry.known(each)
                    assert late is not None
                    self._registry.leave_online(late[1])
                waiting = ready[i:] + waiting
                break
            running_batch = joined
            self._reception.joined(req)
            self._kv_accounting.begin_decoding(known[1])
        self._scheduler.waiting_queue = waiting
        return running_batch
