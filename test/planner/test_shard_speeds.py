"""The speeds of the engines of a job."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_batch.errors import ConfigError
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.sharding.speeds import ShardSpeeds


def speeds(*each: float) -> ShardSpeeds:
    return ShardSpeeds(np.array(each), np.array(each))


def test_an_engine_with_half_the_times_is_twice_as_fast() -> None:
    job = CostModel(token_time_s=2.0, kv_read_time_s=0.5)
    faster = CostModel(token_time_s=1.0, kv_read_time_s=0.125)
    found = ShardSpeeds.of_costs(job, [job, faster, None])
    assert found.compute.tolist() == [1.0, 2.0, 0.0]
    assert found.memory.tolist() == [1.0, 4.0, 0.0]
    assert found.there.tolist() == [True, True, False]


def test_costs_that_leave_memory_out_are_of_equal_speed() -> None:
    job = CostModel(token_time_s=2.0, kv_read_time_s=0.0)
    found = ShardSpeeds.of_costs(job, [CostModel(token_time_s=4.0, kv_read_time_s=0.0)])
    assert (found.compute.tolist(), found.memory.tolist()) == ([0.5], [1.0])
    with pytest.raises(ConfigError, match=r"kv_read_time_s is 0\.5"):
        ShardSpeeds.of_costs(job, [CostModel(token_time_s=2.0, kv_read_time_s=0.5)])


def test_a_measurement_corrects_both_speeds() -> None:
    found = ShardSpeeds(np.array([1.0, 2.0, 0.0]), np.array([1.0, 3.0, 0.0]))
    # Nothing is known about an engine that is not there.
    corrected = found.corrected(np.array([0.5, 1.0, np.nan]))
    assert corrected.compute.tolist() == [0.5, 2.0, 0.0]
    assert corrected.memory.tolist() == [0.5, 3.0, 0.0]


@pytest.mark.parametrize("speed", [1.0, 0.1, 3.0])
def test_equal_engines_take_exactly_one_second_for_one(speed: float) -> None:
    assert (speeds(speed, speed, speed).slowness() == 1.0).all()


def test_how_slow_engines_are_against_the_fastest() -> None:
    found = ShardSpeeds(np.array([4.0, 1.0, 0.0]), np.array([2.0, 1.0, 0.0]))
    assert found.slowness().tolist() == [[1.0, 4.0, np.inf], [2.0, 4.0, np.inf]]


def test_some_of_them() -> None:
    found = speeds(1.0, 2.0, 3.0).take(np.array([2, 0]))
    assert found.compute.tolist() == found.memory.tolist() == [3.0, 1.0]
    assert len(found) == 2


@pytest.mark.parametrize(
    ("compute", "memory", "message"),
    [
        ([1.0, -1.0], [1.0, 1.0], r"Engine 1 has speeds of -1\.0 and 1\.0"),
        ([1.0], [np.inf], "Engine 0 has speeds of 1.0 and inf"),
        ([np.nan], [1.0], "Engine 0"),
        ([1.0, 1.0, 0.0], [1.0, 1.0, 2.0], "Engine 2 has speeds of 0.0 and 2.0"),
        ([1.0, 1.0], [1.0], "shapes"),
        ([[1.0]], [[1.0]], "shapes"),
    ],
)
def test_impossible_speeds_are_refused(
    compute: list[float], memory: list[float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardSpeeds(np.array(compute), np.array(memory))


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ([1.0], "shape"),
        ([1.0, 0.0], r"measured\[1\]=0.0"),
        ([np.inf, 1.0], r"measured\[0\]=inf"),
    ],
)
def test_impossible_measurements_are_refused(
    measured: list[float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        speeds(1.0, 1.0).corrected(np.array(measured))
