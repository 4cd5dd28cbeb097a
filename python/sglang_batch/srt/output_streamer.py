"""What a step has to tell is looked for without a call for each running request.

After each step SGLang asks every running request in turn whether there is something to
send to the detokenizer. For lines of a batch there hardly ever is: an answer that is not
streamed goes out when it is complete, and every ``SGLANG_FORCE_STREAM_INTERVAL`` tokens.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import (
    DEFAULT_FORCE_STREAM_INTERVAL,
    SchedulerOutputStreamer,
)


class OfflineOutputStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
    """SGLang's, given only the requests that it may send something of."""

    __slots__ = ()

    def _stream_output_generation(
        self, reqs: list[Any], *args: Any, **kwargs: Any
    ) -> None:
        super()._stream_output_generation(
            [
                req
                for req in reqs
                if req.finished_reason is not None
                or req.stream
                or len(req.output_ids) % DEFAULT_FORCE_STREAM_INTERVAL == 0
            ],
            *args,
            **kwargs,
        )
