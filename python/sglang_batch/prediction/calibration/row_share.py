"""How much of a decode step one long row decides: w, from measured steps.

The law is that of :func:`.cost_model.tokens_read`. A decode step takes ::

    weights + c * max(sum of lengths, w * longest)

seconds: ``c`` reads one token of KV in all layers, and one row alone uses at most 1/w of
the bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ...planner.requests import Floats

# weights, c and w: one point more tells how well they fit.
MIN_POINTS = 4
# A value of w fits as well as the best if it adds at most this many variances to the sum
# of squares: the square of three standard errors.
_AS_GOOD = 9.0
# Relative error of a measured step below which differences mean nothing.
_LEAST_NOISE = 1e-3
# Values of w that are tried between two neighbouring ratios of sum to longest.
_TRIES = 200
# Residuals above this many standard deviations count less (Huber, 1964).
_OUTLIER = 2.0
_REWEIGHTINGS = 10


class StepPoint(NamedTuple):
    """A measured decode step.

    total: tokens of KV in all rows.
    longest: tokens in the longest row.
    seconds: of the step.
    """

    total: float
    longest: float
    seconds: float


class Finding(StrEnum):
    """What the points say about w.

    MEASURED: a value, and the interval around it.
    AT_MOST: the longest row never decides a step.
    AT_LEAST: the longest row always does.
    NOTHING: attention is below the noise, or the points are too alike.
    """

    MEASURED = "measured"
    AT_MOST = "at most"
    AT_LEAST = "at least"
    NOTHING = "not measurable"


@dataclass(frozen=True, slots=True)
class RowShare:
    """The fitted law.

    row_share: w for the planner. 0 where the longest row never decides a step, and the
        least possible value where it always does; 0 where nothing was found.
    finding: what ``row_share`` is.
    least, most: the values of w that fit the points as well as the best one, from 0 up to
        infinity.
    weights_s, kv_read_s: seconds of a step without KV, and per token of KV.
    noise: standard deviation of the relative residuals.
    """

    row_share: float
    finding: Finding
    least: float
    most: float
    weights_s: float
    kv_read_s: float
    noise: float

    def __str__(self) -> str:
        if self.finding is Finding.MEASURED:
            return (
                f"row_share {self.row_share:.3g} (from {self.least:.3g} to "
                f"{self.most:.3g}): one row alone uses at most 1/{self.row_share:.3g} of "
                "the bandwidth."
            )
        if self.finding is Finding.AT_MOST:
            return (
                "row_share 0: the longest row never decided a step. The true value is "
                f"at most {self.most:.3g}."
            )
        if self.finding is Finding.AT_LEAST:
            return (
                f"row_share {self.row_share:.3g}: the longest row decided every step. "
                "This is the least possible value; more rows (--rows) may find the "
                "true one."
            )
        if self.kv_read_s == 0:
            return (
                "row_share not measurable: attention is below the noise "
                f"({self.noise:.1%})."
            )
        return (
            "row_share not measurable: with this noise "
            f"({self.noise:.1%}) any value fits."
        )


class _Fits(NamedTuple):
    """The best ``weights`` and ``c`` for each of several w, and the squares they leave.

    All have the shape ``[number of w]``.
    """

    row_share: Floats
    weights_s: Floats
    kv_read_s: Floats
    squares: Floats


class _Columns(NamedTuple):
    """The points: tokens and seconds, ``[number of points]``."""

    total: Floats
    longest: Floats
    seconds: Floats


def fit_row_share(points: Sequence[StepPoint]) -> RowShare:
    """Fit weights, c and w to measured steps by least squares of relative errors.

    For a given w the law is linear in the others, and both are 0 or more. Points far
    from the law count less. Values of w below every ratio of sum to longest are alike, and so are
    those above every ratio: the points then give only a bound.

    Args:
        points: :data:`MIN_POINTS` or more. Their ratios of sum to longest must differ.

    Raises:
        ConfigError: the points are too few, not positive, or have all one ratio.
    """
    measured = _checked(points)
    ratios = np.unique(measured.total / measured.longest)
    importance = np.ones(len(points))
    for _ in range(_REWEIGHTINGS):
        fits, best = _fit_all(measured, ratios, importance)
        w, weights, c = (float(column[best]) for column in fits[:3])
        decides = np.maximum(measured.total, w * measured.longest)
        distance = abs(1 - (weights + c * decides) / measured.seconds)
        # Huber's weights. 1.4826 medians are a standard deviation, which outliers do not
        # raise.
        scale = max(1.4826 * float(np.median(distance)), _LEAST_NOISE)
        importance = np.minimum(1.0, _OUTLIER * scale / np.maximum(distance, 1e-12))
    fits, best = _fit_all(measured, ratios, importance)
    variance = fits.squares[best] / max(importance.sum() - 3, 1.0)
    noise = max(math.sqrt(variance), _LEAST_NOISE)
    as_good = fits.squares <= fits.squares[best] + _AS_GOOD * noise**2
    least, most = fits.row_share[as_good].min(), fits.row_share[as_good].max()
    # Without attention a step takes the same time whatever the lengths.
    weight = _weight(measured, importance)
    mean = float(np.average(measured.seconds, weights=weight))
    gained = weight @ (measured.seconds - mean) ** 2 - fits.squares[best]
    below, above = least <= ratios[0], most >= ratios[-1]
    if gained <= 2 * _AS_GOOD * noise**2:
        return RowShare(0.0, Finding.NOTHING, 0.0, math.inf, mean, 0.0, noise)
    chosen, finding = best, Finding.MEASURED
    if below:
        # The lowest ratio is as good as 0: with both, the sum decides all steps.
        chosen = int(np.argmin(fits.row_share))
        finding = Finding.NOTHING if above else Finding.AT_MOST
    elif above:
        chosen = int(np.argmax(fits.row_share == least))
        finding = Finding.AT_LEAST
    return RowShare(
        row_share=0.0 if below else float(fits.row_share[chosen]),
        finding=finding,
        least=0.0 if below else float(least),
        most=math.inf if above else float(most),
        weights_s=float(fits.weights_s[chosen]),
        kv_read_s=float(fits.kv_read_s[chosen]),
        noise=noise,
    )


def _checked(points: Sequence[StepPoint]) -> _Columns:
    if len(points) < MIN_POINTS:
        raise ConfigError(
            f"{len(points)} measured steps are too few for a row_share; measure "
            f"{MIN_POINTS} or more."
        )
    for point in points:
        if not all(math.isfinite(value) and value > 0 for value in point):
            raise ConfigError(f"{point} must have positive finite values.")
        if point.longest > point.total:
            raise ConfigError(f"{point}: one row is longer than all rows together.")
    measured = _Columns(*np.array(points, dtype=np.float64).T)
    ratios = measured.total / measured.longest
    if ratios.min() == ratios.max():
        raise ConfigError(
            f"All measured steps have a longest row of 1/{ratios[0]:.3g} of the sum; "
            "vary it."
        )
    return measured


def _weight(measured: _Columns, importance: Floats) -> Floats:
    """Of the square of each point's error, so that relative errors count."""
    return importance / measured.seconds**2


def _fit_all(
    measured: _Columns, ratios: Floats, importance: Floats
) -> tuple[_Fits, int]:
    """The fits of all w worth trying, and the index of the best."""
    weight = _weight(measured, importance)
    bends = _stationary(measured, ratios, weight)
    between = [np.geomspace(low, high, _TRIES) for low, high in pairwise(ratios)]
    fits = _fit_each(measured, np.concatenate([bends, *between]), weight)
    return fits, int(np.argmin(fits.squares))


def _stationary(measured: _Columns, ratios: Floats, weight: Floats) -> Floats:
    """The values of w at which the squares may have a minimum between two ratios.

    There it is known for each point whether the sum or the longest row decides, so the
    law is linear in weights, c and the product c * w.
    """
    root = np.sqrt(weight)
    found = []
    for low, high in pairwise(ratios):
        by_sum = measured.total >= high * measured.longest
        columns = np.stack(
            [
                np.ones_like(root),
                np.where(by_sum, measured.total, 0.0),
                np.where(by_sum, 0.0, measured.longest),
            ],
            axis=1,
        )
        solution = np.linalg.lstsq(columns * root[:, None], measured.seconds * root)[0]
        c, product = solution[1], solution[2]
        if c > 0 and low < product / c < high:
            found.append(product / c)
    return np.array(found)


def _fit_each(measured: _Columns, row_shares: Floats, weight: Floats) -> _Fits:
    total, longest, seconds = measured
    decides = np.maximum(total, row_shares[:, None] * longest)
    share = weight / weight.sum()
    x_mean, t_mean = decides @ share, float(seconds @ share)
    x, t = decides - x_mean[:, None], seconds - t_mean
    c = np.maximum(0.0, (x * t) @ weight) / np.maximum((x * x) @ weight, 1e-300)
    weights = t_mean - c * x_mean
    # No step takes less time than nothing.
    through_0 = (decides * seconds) @ weight / ((decides * decides) @ weight)
    c = np.where(weights < 0, through_0, c)
    weights = np.maximum(weights, 0.0)
    residuals = seconds - weights[:, None] - c[:, None] * decides
    return _Fits(row_shares, weights, c, (residuals * residuals) @ weight)
