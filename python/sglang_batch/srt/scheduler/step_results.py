"""SGLang's work for each running request after a step, without calls that do nothing.

With a thousand requests running, SGLang spends most of a step's host time in calls for
each of them. For nearly all requests of an offline server, two of these calls have no
effect. They are skipped where that is certain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.output_streamer import (
    DEFAULT_FORCE_STREAM_INTERVAL,
    SchedulerOutputStreamer,
)

from ..compat.scheduler_types import LogitsOutput, Req, ScheduleBatch


class OfflineOutputStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
    """SGLang's streamer, given only the requests of which something is sent.

    An answer that is not streamed is sent when it is complete. SGLang also sends the
    incomplete answer every ``SGLANG_FORCE_STREAM_INTERVAL`` tokens. This is kept for
    online requests. Nobody reads incomplete answers of a job, and where many of its
    requests began together, one step would have to send all of them.

    Attributes:
        is_online: whether a request belongs to no job.
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
    info.

    SGLang's further work there is for models with state besides KV, and for prefill and
    decode on different machines. Both are refused at startup.
    """

    __slots__ = ()

    @classmethod
    def like(cls, stock: SchedulerBatchResultProcessor) -> OfflineResultProcessor:
        """One with the same parts."""
        return cls(**{each.name: getattr(stock, each.name) for each in fields(stock)})

    def _handle_finish_state_updated_req(
        self,
        req: Req,
        batch: ScheduleBatch,
        result: object,
        i: int,
        logits_output: LogitsOutput | None,
    ) -> None:
        if (
            req.finished_reason is not None
            or logits_output is None
            or logits_output.customized_info is not None
        ):
            super()._handle_finish_state_updated_req(
                req, batch, result, i, logits_output
            )
