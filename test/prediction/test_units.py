"""Times and rates in units that fit their size."""

from __future__ import annotations

import math

import pytest

from sglang_batch.prediction.report import rate_text, significant, time_text, time_unit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2.5e-7, "0.2500 \u00b5s"),
        (0.000_401_1, "401.1 \u00b5s"),
        (0.012_345_6, "12.35 ms"),
        (0.9999, "999.9 ms"),
        (1.0, "1.000 s"),
        (104.26, "104.3 s"),
        (9_876.5, "9,876 s"),
        (3 * 3600, "3.000 h"),
        (1e6, "277.8 h"),
        (math.inf, "inf h"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_times_of_a_column_share_the_unit_of_the_longest() -> None:
    unit = time_unit(2.0)
    assert [unit.number(seconds) for seconds in (2.0, 0.0123)] == ["2.000", "0.01230"]


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (811_938_119.0, "812 million"),
        (1.2e12, "1,200 billion"),
        (19_427.0, "19,427"),
        (99.94, "99.94"),
        (0.25, "0.2500"),
    ],
)
def test_rates(per_second: float, text: str) -> None:
    assert rate_text(per_second) == text


def test_numbers_have_no_exponent() -> None:
    assert significant(123_456.0) == "123,456"
    assert significant(-0.000_012_34) == "-0.00001234"
