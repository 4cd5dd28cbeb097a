"""Micro-batches take turns, and a round of them is one tick of the decode clock."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_batch.scheduling.kv_accounting import MicroBatches


@pytest.mark.parametrize(
    ("number", "decodes", "ticks"),
    [
        (1, [True, False, True], [True, False, True]),
        (2, [True, True, False, True, True, False], [0, 1, 0, 1, 0, 1]),
        (3, [False] * 3 + [False, True, False], [0, 0, 0, 0, 0, 1]),
    ],
)
def test_the_clock_ticks_at_the_end_of_a_round_with_decodes(
    number: int, decodes: list[bool], ticks: list[Any]
) -> None:
    batches = MicroBatches(number)
    found = []
    for each in decodes:
        batches.begin_step()
        found.append(batches.end_step(decodes=each))
    assert found == [bool(tick) for tick in ticks]


def test_what_started_decodes_when_its_micro_batch_has_its_turn_again() -> None:
    batches = MicroBatches(2)
    started: list[Any] = ["a", "b", "c"]
    completed = []
    for each in started:
        completed.append(batches.begin_step())
        batches.starting.append(each)
    completed.append(batches.begin_step())
    assert completed == [[], [], ["a"], ["b"]]
    assert batches.starting == []
