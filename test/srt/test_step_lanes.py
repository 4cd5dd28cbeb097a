"""Two forwards on two streams: every use of the other's work has an event before it."""

from __future__ import annotations

import gc

import pytest
import torch
from race_watch import RaceWatch, RecordingLanes

from sglang_batch.srt.overlap.step_lanes import Lane, run_in_lanes

HIDDEN = 8


class Fault(Exception):
    """Raised by a half."""


def step(lanes: RecordingLanes, fault: Lane | None = None) -> list[str]:
    """Two steps like those of a model, and the races in them."""
    pool = torch.zeros(16, HIDDEN)
    weights = torch.ones(HIDDEN, HIDDEN)
    with RaceWatch(lanes, [pool]) as watch:
        for _ in range(2):
            # The step's lane makes the inputs, in part into memory that it keeps.
            batch = torch.ones(6, HIDDEN) * 2

            def half(rows: slice, lane: Lane, batch: torch.Tensor) -> torch.Tensor:
                pool[rows] = batch[rows] @ weights
                if lane is fault:
                    raise Fault
                return pool[rows].relu() @ weights

            try:
                first, last = run_in_lanes(
                    lanes,
                    lambda batch=batch: half(slice(4, 6), Lane.DECODES, batch),  # type: ignore[misc]
                    lambda batch=batch: half(slice(0, 4), Lane.PROMPTS, batch),  # type: ignore[misc]
                    lambda output: (output,),
                )
                joined = torch.cat([last, first])
                del first, last
            except Fault:
                joined = batch @ weights
                batch.zero_()
            joined.argmax(-1)
            batch.zero_()
            del batch, joined
    assert watch.across
    return watch.races


def test_no_use_is_without_its_event() -> None:
    lanes = RecordingLanes()
    assert step(lanes) == []
    one_step = [
        "decodes waits", "prompts waits", "step waits", "step waits",
        "keep for step", "keep for step",
    ]  # fmt: skip
    assert lanes.calls == one_step * 2


@pytest.mark.parametrize("call", range(6))
def test_each_event_and_each_kept_tensor_is_needed(call: int) -> None:
    # In the second step, too: the first one's events would otherwise hide it.
    lanes = RecordingLanes(dropped=(call, call + 6))
    assert step(lanes)
    gc.collect()


@pytest.mark.parametrize("lane", [Lane.DECODES, Lane.PROMPTS])
def test_after_a_fault_the_step_waits_for_what_was_launched(lane: Lane) -> None:
    lanes = RecordingLanes()
    assert step(lanes, fault=lane) == []
    launched = 1 if lane is Lane.DECODES else 2
    assert lanes.calls.count("step waits") == 2 * launched
    # Without these waits the step would run beside the rest of a half.
    dropped = [i for i, call in enumerate(lanes.calls) if call == "step waits"]
    assert step(RecordingLanes(dropped), fault=lane)
