"""Streams of a GPU for the halves of a step. Nobody has measured them yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .step_lanes import Lane

logger = logging.getLogger(__name__)

# CUDA's priorities: a lower number goes first.
_FIRST, _LAST = -5, 0


class CudaLanes:
    """The lanes of one share of the GPU: the step's stream is the current one.

    Decodes have a stream of high priority on the whole GPU. Where they leave room,
    prompts run at the same time, on a stream of low priority.

    Args:
        decodes: the stream of the decodes, the same for all shares.
        prompts: the stream of the prompts, which may be limited to some SMs.
    """

    def __init__(self, decodes: torch.cuda.Stream, prompts: torch.cuda.Stream) -> None:
        self._streams = {Lane.DECODES: decodes, Lane.PROMPTS: prompts}

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._streams.get(lane) or torch.cuda.current_stream()

    def current(self, lane: Lane) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream(lane))
        return context

    def record(self, lane: Lane) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: torch.cuda.Event) -> None:
        self._stream(lane).wait_event(event)

    def keep(self, tensor: torch.Tensor, lane: Lane) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self._stream(lane))


def lanes_by_share(shares: Sequence[int]) -> dict[int | None, CudaLanes]:
    """Lanes for each share of SMs that prompts may be limited to, and for no limit.

    A limit is a green context. Where the driver, PyTorch or the GPU has none, only the
    priorities of the streams are left, which is the key None.

    Args:
        shares: numbers of SMs, of which those that the GPU does not have are left out.
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
