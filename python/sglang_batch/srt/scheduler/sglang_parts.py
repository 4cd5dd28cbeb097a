"""Parts of SGLang's scheduler with a change of ours each.

The prefill adder and the policy do not guess output lengths: the forecast of KV decides
before which requests join. The streamer and the result processor leave out calls that have
no effect. With a thousand requests running, SGLang spends most of a step's host time in
calls for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_policy import (
    AddReqResult,
    PrefillAdder,
    SchedulePolicy,
)
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.output_streamer import (
    DEFAULT_FORCE_STREAM_INTERVAL,
    SchedulerOutputStreamer,
)

from ..compat.scheduler_types import Req, ScheduleBatch


class OfflineOutputStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
    """SGLang's streamer, given only the requests of which something is sent.

    SGLang sends an answer that is not streamed when it is complete, and what there is of it
    every ``SGLANG_FORCE_STREAM_INTERVAL`` tokens. The latter is kept for online requests
    (``is_online``). Nobody reads incomplete answers of a job, and where many of its
    requests began together, one step would have to send all of them.
    """

    __slots__ = ("is_online",)

    is_online: Callable[[Req], bool]

    def _stream_output_generation(
        self, reqs: list[Req], *args: object, **kwargs: object
    ) -> None:
        super()._stream_output_generation(
            [
                req
                for req in reqs
                if req.finished_reason is not None
                or req.stream
                or (
                    len(req.output_ids) % DEFAULT_FORCE_STREAM_INTERVAL == 0
                    and self.is_online(req)
                )
            ],
            *args,
            **kwargs,
        )


class OfflineResultProcessor(SchedulerBatchResultProcessor):  # type: ignore[misc]
    """SGLang's processor. For a request that keeps decoding, it only stores customized
    info: further work there is for models with state besides KV, and for prefill and decode
    on different machines."""

    __slots__ = ()

    @classmethod
    def like(cls, stock: SchedulerBatchResultProcessor) -> OfflineResultProcessor:
        return cls(**{each.name: getattr(stock, each.name) for each in fields(stock)})

    def _handle_finish_state_updated_req(
        self,
        req: Req,
        batch: ScheduleBatch,
        result: object,
        i: int,
        logits_output: LogitsProcessorOutput | None,
    ) -> None:
        if (
            req.finished_reason is not None
            or logits_output is None
            or logits_output.customized_info is not None
        ):
            super()._handle_finish_state_updated_req(
                req, batch, result, i, logits_output
            )


class OfflinePrefillAdder(PrefillAdder):  # type: ignore[misc]
    """Checks and charges KV for prompt tokens only, and cuts prompts where states are kept.
    ``chunked_req_limit`` is SGLang's, the tokens that the prompt in progress may take."""

    chunked_req_limit: int | None

    def _get_running_request_total_token_offset(self, req: Req) -> int:
        return 0

    def _swa_new_tokens(self, req: Req) -> int:
        return 0

    def _check_prefill_budget(
        self, req: Req, *, extend_input_len: int, total_tokens: int, **kwargs: object
    ) -> object:
        now = extend_input_len
        if self.rem_chunk_tokens is not None:
            now = min(now, self.rem_chunk_tokens)
        return super()._check_prefill_budget(
            req,
            extend_input_len=extend_input_len,
            total_tokens=self.ceil_paged_tokens(now) + self.per_req_token_overhead,
            **kwargs,
        )

    def _update_prefill_budget(
        self,
        prefix_len: int,
        extend_input_len: int,
        max_new_tokens: int,
        *args: object,
        **kwargs: object,
    ) -> None:
        super()._update_prefill_budget(prefix_len, extend_input_len, 0, *args, **kwargs)

    def _select_prefill_admission(
        self, req: Req, *, has_chunked_req: bool = False, **kwargs: object
    ) -> object:
        admission = super()._select_prefill_admission(
            req, has_chunked_req=has_chunked_req, **kwargs
        )
        if isinstance(admission, AddReqResult):
            return admission
        stop = self.tree_cache.next_stop(req, admission.prefix_len)
        if stop is not None and stop < admission.prefix_len + admission.extend_len:
            admission = replace(
                admission,
                extend_len=stop - admission.prefix_len,
                max_new_tokens=0,
                is_chunked=True,
            )
        # SGLang tracks one prompt that is partly computed, not two.
        if admission.is_chunked and (
            has_chunked_req or self.new_chunked_req is not None
        ):
            return AddReqResult.OTHER
        return admission

    def add_chunked_req(self, req: Req) -> object:
        stop = self.tree_cache.next_stop(req, req.prefix_len)
        if stop is not None:
            most, now = self.chunked_req_limit, stop - req.prefix_len
            self.chunked_req_limit = now if most is None else min(most, now)
        return super().add_chunked_req(req)


class OfflineSchedulePolicy(SchedulePolicy):  # type: ignore[misc]
    """Keeps the waiting queue in the order in which the plan scheduler put it. The prompt
    in progress may take ``chunk_limit`` tokens in the next step, None for no limit."""

    chunk_limit: int | None = None

    def calc_priority(self, *args: object, **kwargs: object) -> None:
        return

    def shortest_prefill_chunk_limit(self, *args: object) -> int | None:
        return self.chunk_limit
