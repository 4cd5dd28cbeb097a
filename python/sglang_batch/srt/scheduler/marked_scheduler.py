"""SGLang's own scheduler, marked, and with the parts that each server of batches needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from sglang.srt.managers.io_struct import GetInternalStateReqOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from ..attention.attention_choice import check_attention_ranks
from ..compat.job_control import (
    RunningQuery,
    RunningQueryOutput,
    StepsQuery,
    StepsQueryOutput,
)
from ..compat.offline_hooks import check_hooks_took
from ..compat.scheduler_types import Req
from ..compat.server_types import OfflineArgs
from ..compat.support import STATE_KEY
from .answer_ends import watch_request

logger = logging.getLogger(__name__)

# How long attention ranks without work sleep before they look for it.
_IDLE_STEP_MS = 10


class MarkedScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's own scheduler, marked so that the main process can recognize it."""

    server_args: OfflineArgs

    def __init__(self, *args: object) -> None:
        """Raises ConfigError if attention ranks would mix up their requests, and EngineError if
        a hook of the process did not take effect."""
        super().__init__(*args)
        check_hooks_took()
        check_attention_ranks(self.tp_worker.model_runner)
        self._make_parts()
        logger.info(
            "Offline batch scheduler ready: %s", self.server_args.offline_config
        )

    def _make_parts(self) -> None:
        self._answer(RunningQuery, self._running_s)
        self._answer(StepsQuery, self._timed_steps)

    def _create_generation_req(
        self, recv_req: object, *args: object, **kwargs: object
    ) -> Req:
        req: Req = super()._create_generation_req(recv_req, *args, **kwargs)
        watch_request(req, self.tokenizer, self.model_config, self._count_cut)
        return req

    def _count_cut(self, rule: str) -> None:
        """SGLang's own scheduler has no counts of ours."""

    def _answer(self, message: type, handle: Callable[[Any], object]) -> None:
        self._request_dispatcher += TypeBasedDispatcher([(message, handle)])

    def _running_s(self, message: RunningQuery) -> RunningQueryOutput:
        now = time.perf_counter()
        started = {req.rid: req.time_stats.forward_entry_time for req in self._reqs()}
        return RunningQueryOutput(
            seconds={rid: now - at for rid, at in started.items() if at}
        )

    def _timed_steps(self, message: StepsQuery) -> StepsQueryOutput:
        return StepsQueryOutput(samples=[])

    def _reqs(self) -> Iterable[Req]:
        """Requests that may have begun to run."""
        batches = [self.running_batch, self.last_batch]
        if get_parallel().pp_size > 1:
            batches = [*self.running_mbs, *self.mbs]
        running = (req for batch in batches if batch is not None for req in batch.reqs)
        return [*self.waiting_queue, *running]

    def get_internal_state(self, recv_req: object) -> GetInternalStateReqOutput:
        """Add the settings in force to ``/server_info``, for each DP rank."""
        output: GetInternalStateReqOutput = super().get_internal_state(recv_req)
        output.internal_state[STATE_KEY] = self._offline_state()
        return output

    def _record_scheduler_state_for_paused_engine(self) -> None:
        """A paused engine waits for messages too, where an idle one does."""
        super()._record_scheduler_state_for_paused_engine()
        self.maybe_sleep_on_idle()

    def maybe_sleep_on_idle(self) -> None:
        """Attention ranks take each step together, and each has messages of its own: only
        the first one sleeps, for a short time, and the others wait for it."""
        if not get_parallel().attn_dp_enabled:
            super().maybe_sleep_on_idle()
        elif self.idle_sleeper is not None and get_parallel().attn_dp_rank == 0:
            self.idle_sleeper.poller.poll(_IDLE_STEP_MS)

    def _offline_state(self) -> dict[str, object]:
        return {
            "config": str(self.server_args.offline_config),
            "step_tokens": self.chunked_prefill_size or self.max_prefill_tokens,
            "mixed_chunk": bool(self.is_mixed_chunk),
            "page_size": int(self.page_size),
            "attention_ranks": int(get_parallel().attn_dp_size),
        }
