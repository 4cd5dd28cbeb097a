"""Two forwards on two streams of a device, with an event before every shared use.

A *lane* is a stream: the one that the step runs on, and one for each half. The order of
work, events and memory is in :func:`run_in_lanes`. Tests run it with lanes that only
record, and check that everything one lane reads of another was complete, and that no
memory is given back too early. Nobody has measured :class:`CudaLanes` yet.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

_Output = TypeVar("_Output")


class Lane(enum.Enum):
    """Streams of a split step: the step's own, and those of its halves."""

    STEP = "step"
    DECODES = "decodes"
    PROMPTS = "prompts"


def run_in_lanes(
    lanes: CudaLanes,
    decodes: Callable[[], _Output],
    prompts: Callable[[], _Output],
    outputs_of: Callable[[_Output], Iterable[torch.Tensor]],
) -> tuple[_Output, _Output]:
    """The outputs of both halves, each on its lane. Work that follows on the step's lane waits,
    also if a half raises.

    The halves may read memory of the step's lane that is not given back before this returns.
    The step's lane reads the outputs, whose memory belongs to the lane of the half, so that it
    is kept for the reader.

    decodes: launches the decodes, usually one CUDA graph, so they go first.
    outputs_of: the tensors of an output, which the step's lane reads.
    """
    begin = lanes.record(Lane.STEP)
    ends = []
    outputs = []
    try:
        for lane, launch in ((Lane.DECODES, decodes), (Lane.PROMPTS, prompts)):
            lanes.wait(lane, begin)
            try:
                with lanes.current(lane):
                    output = launch()
            finally:
                ends.append(lanes.record(lane))
            outputs.append(output)
    finally:
        for end in ends:
            lanes.wait(Lane.STEP, end)
    for output in outputs:
        for tensor in outputs_of(output):
            lanes.keep(tensor, Lane.STEP)
    first, second = outputs
    return first, second


logger = logging.getLogger(__name__)

# CUDA's priorities: a lower number goes first.
_FIRST, _LAST = -5, 0


class CudaLanes:
    """The lanes of one share of the GPU: the step's stream is the current one.

    Decodes have a stream of high priority on the whole GPU. Where they leave room,
    prompts run at the same time, on a stream of low priority.

    decodes: the stream of the decodes, the same for all shares.
    prompts: the stream of the prompts, which may be limited to some SMs.
    """

    def __init__(self, decodes: torch.cuda.Stream, prompts: torch.cuda.Stream) -> None:
        self._streams = {Lane.DECODES: decodes, Lane.PROMPTS: prompts}

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._streams.get(lane) or torch.cuda.current_stream()

    def current(self, lane: Lane) -> AbstractContextManager[Any]:
        """Launch the following work on a lane."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream(lane))
        return context

    def record(self, lane: Lane) -> torch.cuda.Event:
        """An event that is complete when all work launched on the lane so far is."""
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: torch.cuda.Event) -> None:
        """Have later work on a lane wait for an event."""
        self._stream(lane).wait_event(event)

    def keep(self, tensor: torch.Tensor, lane: Lane) -> None:
        """Do not reuse a freed tensor's memory before the lane's work so far is complete."""
        if tensor.is_cuda:
            tensor.record_stream(self._stream(lane))


def lanes_by_share(shares: Sequence[int]) -> dict[int | None, CudaLanes]:
    """Lanes for each share of SMs that the GPU has, and for no limit, which is the key None.

    A limit is a green context, which the driver, PyTorch or the GPU may not have.
    """
    decodes = torch.cuda.Stream(priority=_FIRST)
    lanes: dict[int | None, CudaLanes] = {
        None: CudaLanes(decodes, torch.cuda.Stream(priority=_LAST))
    }
    available = torch.cuda.get_device_properties().multi_processor_count
    for share in shares:
        if not 0 < share < available:
            continue
        stream = _limited_stream(share)
        if stream is None:
            break
        lanes[share] = CudaLanes(decodes, stream)
    return lanes


# A stream ends with its green context.
_contexts: list[Any] = []


def _limited_stream(num_sms: int) -> torch.cuda.Stream | None:
    try:
        from torch.cuda.green_contexts import GreenContext

        context = GreenContext(num_sms=num_sms)
        stream: torch.cuda.Stream = context.Stream()
    except Exception as error:
        logger.info("No green contexts (%s): streams have priorities only.", error)
        return None
    _contexts.append(context)
    return stream
