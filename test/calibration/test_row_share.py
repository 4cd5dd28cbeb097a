"""The fit of row_share: exact on the law, tolerant to noise, and honest without signal."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sglang_batch.errors import ConfigError
from sglang_batch.planner.costs.cost_model import tokens_read
from sglang_batch.prediction.calibration.row_share import (
    Finding,
    StepPoint,
    fit_row_share,
)

WEIGHTS_S, KV_READ_S = 5e-3, 4e-8
ROWS, TOKENS = 64, 65_536


def measured(
    w: float, *, kv_read_s: float = KV_READ_S, noise: float = 0.0, seed: int = 0
) -> list[StepPoint]:
    """Three rounds of steps that follow the law, as ``calibrate`` measures them."""
    chance = np.random.default_rng(seed)
    batches = [(TOKENS / part, TOKENS / part / ROWS) for part in (4, 2, 1)]
    batches += [(TOKENS, TOKENS * share) for share in (0.25, 0.5, 0.75)]
    points = []
    for total, longest in batches * 3:
        decides = tokens_read(total, longest, ROWS, w, padded=False)
        error = 1 + noise * chance.standard_normal()
        points.append(
            StepPoint(total, longest, (WEIGHTS_S + kv_read_s * decides) * error)
        )
    return points


@pytest.mark.parametrize("w", [3.0, 5.0, 33.0])
def test_points_on_the_law_give_it_back(w: float) -> None:
    found = fit_row_share(measured(w))
    assert found.finding is Finding.MEASURED
    assert found.row_share == pytest.approx(w, rel=1e-6)
    assert found.least <= w <= found.most
    assert found.weights_s == pytest.approx(WEIGHTS_S, rel=1e-6)
    assert found.kv_read_s == pytest.approx(KV_READ_S, rel=1e-6)


@pytest.mark.parametrize("w", [0.0, 1.0])
def test_a_longest_row_that_never_decides_gives_an_upper_bound(w: float) -> None:
    found = fit_row_share(measured(w))
    assert found.finding is Finding.AT_MOST
    assert found.row_share == 0
    # Three quarters of the tokens are in one row: a w above 4/3 would show.
    assert 4 / 3 <= found.most < 1.4
    assert found.kv_read_s == pytest.approx(KV_READ_S, rel=1e-6)
    assert "the longest row never decided a step" in str(found)


def test_a_longest_row_that_always_decides_gives_a_lower_bound() -> None:
    found = fit_row_share(measured(200.0))
    assert found.finding is Finding.AT_LEAST
    assert found.row_share == found.least == pytest.approx(ROWS)
    assert found.most == math.inf
    # Of c and w only the product is known.
    assert found.row_share * found.kv_read_s == pytest.approx(200 * KV_READ_S)
    assert "more rows (--rows)" in str(found)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("w", [0.0, 5.0, 33.0])
def test_5_percent_of_noise_are_tolerated(w: float, seed: int) -> None:
    found = fit_row_share(measured(w, noise=0.05, seed=seed))
    assert found.least <= w <= found.most
    assert found.row_share == pytest.approx(w, rel=0.35)
    assert found.noise == pytest.approx(0.05, rel=0.6)


def test_a_disturbed_measurement_does_not_decide() -> None:
    points = measured(5.0, noise=0.01)
    points[3] = points[3]._replace(seconds=4 * points[3].seconds)
    assert fit_row_share(points).row_share == pytest.approx(5.0, rel=0.05)


def test_attention_below_the_noise_gives_no_number() -> None:
    found = fit_row_share(measured(33.0, kv_read_s=1e-12, noise=0.02))
    assert found.finding is Finding.NOTHING
    assert found.row_share == found.kv_read_s == 0
    assert "not measurable: attention is below the noise" in str(found)
    assert fit_row_share(measured(5.0, kv_read_s=0.0)).finding is Finding.NOTHING


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([StepPoint(100, 10, 1.0)] * 3, "3 measured steps are too few"),
        ([StepPoint(100, 10, 1.0)] * 4, "longest row of 1/10 of the sum"),
        ([StepPoint(100, 10, math.nan)] * 4, "must have positive finite values"),
        ([StepPoint(100, 0, 1.0)] * 4, "must have positive finite values"),
        ([StepPoint(100, 101, 1.0)] * 4, "longer than all rows together"),
    ],
)
def test_points_that_cannot_be_fitted(points: list[StepPoint], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit_row_share(points)
