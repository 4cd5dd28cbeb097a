"""The meter of a worker: tokens in a second, of the last measurement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_machine

from sglang_batch.fleet.fleet_worker import FleetWorker, WorkerMeter
from sglang_batch.request import Usage

USAGE = Usage(input_tokens=90, cached_tokens=50, output_tokens=10)


def answers(meter: WorkerMeter, num: int, begin_s: float, seconds: float) -> bool:
    """That many answers, evenly in that time. Whether the last one ends a measurement."""
    cost = make_machine().cost
    ended = [
        meter.answered(cost, USAGE, begin_s + seconds * (i + 1) / num)
        for i in range(num)
    ]
    assert not any(ended[:-1])
    return ended[-1]


def test_tokens_per_second_are_those_of_the_last_measurement() -> None:
    meter = WorkerMeter()
    meter.busy(0.0)
    assert not answers(meter, 63, begin_s=0.0, seconds=19.0)
    assert meter.tokens_per_s is None
    assert answers(meter, 1, begin_s=19.0, seconds=1.0)
    assert meter.tokens_per_s == pytest.approx(64 * 100 / 20.0)
    # The next one begins anew.
    assert answers(meter, 100, begin_s=20.0, seconds=10.0)
    assert meter.tokens_per_s == pytest.approx(100 * 100 / 10.0)


def test_a_measurement_that_was_cut_short_does_not_count() -> None:
    meter = WorkerMeter()
    meter.busy(0.0)
    assert not answers(meter, 50, begin_s=0.0, seconds=5.0)
    meter.idle()
    meter.busy(100.0)
    assert answers(meter, 64, begin_s=100.0, seconds=10.0)
    assert meter.tokens_per_s == pytest.approx(640.0)
    assert meter.num_answers == 114


def test_each_replica_of_a_worker_has_seconds_of_its_own() -> None:
    nothing: Any = SimpleNamespace(num_replicas=2)
    worker = FleetWorker(nothing)
    worker.attached(nothing, nothing, now=10.0)
    assert worker.seconds(13.0) == 6.0
    worker.release(14.0)
    assert worker.seconds(99.0) == 8.0
