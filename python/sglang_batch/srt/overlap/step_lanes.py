"""Two forwards on two streams of a device, with an event before every shared use.

A *lane* is a stream: the one that the step runs on, and one for each half. The order of
work, events and memory is in :func:`run_in_lanes`, written against a small protocol.
Tests run it with lanes that only record, and check that whatever one lane reads of
another was complete, and that no memory is given back too early.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

_Output = TypeVar("_Output")


class Lane(enum.Enum):
    """Streams of a split step: the step's own, and those of its halves."""

    STEP = "step"
    DECODES = "decodes"
    PROMPTS = "prompts"


class StepLanes(Protocol):
    """What a split step needs of a device."""

    def current(self, lane: Lane) -> AbstractContextManager[Any]:
        """Launch what follows on a lane."""
        ...

    def record(self, lane: Lane) -> Any:
        """An event that is complete when all work launched on the lane so far is."""
        ...

    def wait(self, lane: Lane, event: Any) -> None:
        """Have later work on a lane wait for an event."""
        ...

    def keep(self, tensor: torch.Tensor, lane: Lane) -> None:
        """Once a tensor is freed, do not reuse its memory before the lane's work until
        then is complete."""
        ...


def run_in_lanes(
    lanes: StepLanes,
    decodes: Callable[[], _Output],
    prompts: Callable[[], _Output],
    outputs_of: Callable[[_Output], Iterable[torch.Tensor]],
) -> tuple[_Output, _Output]:
    """Run both halves, each on its lane. Work that follows on the step's lane waits.

    What the step's lane has made may be read by the halves, if it is not given back
    before this returns. What a half has made is read on the step's lane, and its memory
    belongs to the lane of the half, so that it is kept for the reader.

    Args:
        decodes: launches the decodes, usually one CUDA graph, so they go first.
        prompts: launches the prompts.
        outputs_of: the tensors of an output, which the step's lane reads.

    Returns:
        The outputs of decodes and prompts.

    Raises:
        Exception: that of a half. The step's lane then waits for what was launched.
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
