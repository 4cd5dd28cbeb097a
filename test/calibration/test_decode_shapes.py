"""The measured batches: one sum of lengths, different longest rows, within limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_batch.errors import ConfigError
from sglang_batch.prediction.calibration.decode_shapes import (
    DecodeLimits,
    chosen_sizes,
    shapes,
    step_point,
)

H100 = DecodeLimits(
    kv_capacity_tokens=450_000,
    max_running=4096,
    context_len=131_072,
    page_size=1,
    step_tokens=8192,
)
DEMO = DecodeLimits(
    kv_capacity_tokens=200_000,
    max_running=256,
    context_len=2048,
    page_size=1,
    step_tokens=2048,
    on_cpu=True,
)
LIMITS = [
    H100,
    DEMO,
    replace(H100, page_size=64),
    replace(H100, max_running=20),
    replace(H100, kv_capacity_tokens=9_000),
    replace(DEMO, kv_capacity_tokens=2_500),
]


def test_sizes_of_a_device_and_of_the_demo_model() -> None:
    sizes = chosen_sizes(H100)
    assert (sizes.rows, sizes.tokens) == (64, 65_536)
    sizes = chosen_sizes(DEMO)
    assert sizes.rows == 16
    # Its context is the limit: three quarters are in one row.
    assert sizes.tokens == (2048 - sizes.new_tokens - 1) * 4 // 3


@pytest.mark.parametrize("limits", LIMITS)
def test_batches_fit_into_the_engine(limits: DecodeLimits) -> None:
    sizes = chosen_sizes(limits)
    assert sizes.rows <= limits.max_running
    for lengths in shapes(sizes):
        assert min(lengths) >= 1
        assert max(lengths) + sizes.new_tokens < limits.context_len
        pages = [-(-(n + sizes.new_tokens) // limits.page_size) for n in lengths]
        assert sum(pages) * limits.page_size <= limits.kv_capacity_tokens


def test_the_sum_is_the_same_and_the_longest_row_is_not() -> None:
    sizes = chosen_sizes(H100, rows=10, tokens=1_000)
    batches = shapes(sizes)
    assert all(len(lengths) == 10 for lengths in batches)
    assert [sum(lengths) for lengths in batches] == [250, 500, *[1_000] * 4]
    assert [max(lengths) for lengths in batches] == [25, 50, 100, 250, 500, 750]
    assert all(lengths[0] == max(lengths) for lengths in batches)
    assert batches[4] == [500, *[56] * 5, *[55] * 4]


def test_rows_have_grown_when_the_median_step_runs() -> None:
    point = step_point([100, 10], 2.0)
    assert point.seconds == 2.0
    # Eight steps before, and half of the 32 that count.
    assert (point.longest, point.total) == (124.5, 110 + 2 * 24.5)


@pytest.mark.parametrize(
    ("limits", "options", "said"),
    [
        (H100, {"rows": 7}, "--rows 7 must be from 8 to 4096"),
        (
            DEMO,
            {"rows": 257},
            "--rows 257 must be from 8 to 256.*--max-running-requests",
        ),
        (DEMO, {"tokens": 60}, "--tokens 60 must be from 64 to 26"),
        (DEMO, {"tokens": 4_000}, "--tokens 4000 must be from"),
        (replace(DEMO, kv_capacity_tokens=500), {}, "Raise --max-total-tokens"),
        (replace(DEMO, context_len=60), {}, "its context 60"),
        (replace(DEMO, max_running=4), {}, "runs at most 4 requests at a time"),
    ],
)
def test_sizes_that_the_engine_has_no_room_for(
    limits: DecodeLimits, options: dict[str, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen_sizes(limits, **options)
