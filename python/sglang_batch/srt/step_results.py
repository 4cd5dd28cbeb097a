"""After a step, SGLang's work for each running request, less what cannot apply to it.

With a thousand requests running, SGLang spends most of a step's host time in calls for
each of them. Two of those have nothing to do for nearly all requests of an offline
server, and are left out where that is clear at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.output_streamer import (
    DEFAULT_FORCE_STREAM_INTERVAL,
    SchedulerOutputStreamer,
)


class OfflineOutputStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
    """SGLang's, given only the requests that it is to send something of.

    An answer that is not streamed goes out when it is complete. SGLang also sends what
    there is of it every ``SGLANG_FORCE_STREAM_INTERVAL`` tokens, and so it does here
    for online requests; nobody reads that of a batch line, and where many began together
    one step has to send it for all of them.

    Attributes:
        is_online: whether a request belongs to no job.
    """

    __slots__ = ("is_online",)

    is_online: Callable[[Any], bool]

    def _stream_output_generation(
        self, reqs: list[Any], *args: Any, **kwargs: Any
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
    """SGLang's; of a request that goes on decoding it only keeps customized info.

    What it does besides is for models with state besides KV and for prefill and decode
    on different machines, which are refused at start.
    """

    __slots__ = ()

    @classmethod
    def like(cls, stock: SchedulerBatchResultProcessor) -> OfflineResultProcessor:
        """One with the same parts."""
        return cls(**{each.name: getattr(stock, each.name) for each in fields(stock)})

    def _handle_finish_state_updated_req(
        self, req: Any, batch: Any, result: Any, i: int, logits_output: Any
    ) -> None:
        if (
            req.finished_reason is not None
            or logits_output is None
            or logits_output.customized_info is not None
        ):
            super()._handle_finish_state_updated_req(
                req, batch, result, i, logits_output
            )
