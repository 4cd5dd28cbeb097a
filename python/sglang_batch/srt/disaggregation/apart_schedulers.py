"""The scheduler of a prefill server, and SGLang's own of either side.

A prefill server follows the plans of jobs. A request waits in SGLang's bootstrap queue until
the decode server has room for it, and joins the plan then. It leaves when its KV has been sent.

A decode server makes room for requests in the order in which they are sent to it, which is
the plan's. Its scheduler is that of :mod:`.decode_scheduler`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import (
    all_reduce_flags,
    poll_and_all_reduce_attn_cp_tp_group,
)
from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler

from ..compat.scheduler_types import Req, ScheduleBatch
from ..scheduler.marked_scheduler import MarkedScheduler
from ..scheduler.scheduler import OfflineScheduler

# Seconds that a scheduler without a batch leaves to the threads that send and receive.
PAUSE_S = 0.0005


class Apart(Scheduler):  # type: ignore[misc]
    """What every scheduler of such a server does."""

    def on_idle(self) -> None:
        super().on_idle()
        time.sleep(PAUSE_S)

    def maybe_send_cached_prefix_chunk(self, req: Req, allow_send: bool = True) -> None:
        """Send a prompt's cached prefix before the rest is computed, but not on a CPU: SGLang
        has the sender wait for an event on a CUDA stream."""
        if self.device != "cpu":
            super().maybe_send_cached_prefix_chunk(req, allow_send)


class StockApartScheduler(Apart, MarkedScheduler):
    """SGLang's scheduler of a decode server, or of a prefill server without plans."""


class PrefillScheduler(Apart, OfflineScheduler):
    """The scheduler of a prefill server, which follows the plans of jobs."""

    _num_failed = 0

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        # Into the bootstrap queue, whether the request belongs to a job or not.
        super(OfflineScheduler, self)._add_request_to_queue(req, is_retracted)

    def get_next_disagg_prefill_batch_to_run(
        self, *args: object, **kwargs: object
    ) -> NextBatchPlan:
        stock = super().get_next_disagg_prefill_batch_to_run
        return self._step(stock, *args, **kwargs)

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        if self.waiting_queue:  # requests with room on the decode server by now
            self.waiting_queue = [
                req for req in self.waiting_queue if not self.jobs.registry.enqueue(req)
            ]
        return super().get_new_batch_prefill(running_batch)

    def resolve_waiting_queue_bootstrap(self) -> None:
        """Drop requests that the decode server has given up, in the plan as well."""
        super().resolve_waiting_queue_bootstrap()
        manager: Any = self.disagg_prefill_bootstrap_queue.kv_manager
        failed = manager.num_failed
        # The ranks of a TP group look together, or not at all.
        (look,) = all_reduce_flags(
            [int(failed != self._num_failed)],
            self.attn_tp_cpu_group,
            torch.distributed.ReduceOp.MAX,
        )
        self._num_failed = failed
        if not look:
            return
        waiting: list[Any] = [
            request.req
            for _, request in self.jobs.registry.not_running("", everything=True)
        ]
        polls = poll_and_all_reduce_attn_cp_tp_group(
            [req.disagg_kv_sender for req in waiting],
            self.attn_cp_cpu_group,
            self.attn_tp_cpu_group,
        )
        for req, poll in zip(waiting, polls, strict=True):
            if poll == KVPoll.Failed:
                self.plan_scheduler.abort(req.rid, everything=False)
                self.handle_bootstrap_failure(req)

    def _release_waiting(self, req: Req) -> None:
        self.release_aborted_prefill_waiting_req(req)
        super()._release_waiting(req)
