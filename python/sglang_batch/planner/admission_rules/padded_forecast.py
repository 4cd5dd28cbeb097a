"""Forecast of the KV cells of a dense batch: rows times the longest of them.

All rows grow by one token a step. Between two ends only the width changes, and it grows,
so the most cells are those of the last step of some row. The rows that still run there are
those with no fewer steps left, and rows are kept in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compiled import jit_in_place
from ..requests import Int64s


class PaddedForecast(NamedTuple):
    """Running rows, those that end last first.

    ends: int64 ``[most]``, the step of each row's last token.
    bases: int64 ``[most]``, its length minus the step, which is the same in every step.
    number: int64 ``[1]``, rows.
    """

    ends: Int64s
    bases: Int64s
    number: Int64s


def make_padded_forecast(most_rows: int) -> PaddedForecast:
    """An empty forecast."""
    return PaddedForecast(
        np.zeros(most_rows, np.int64),
        np.zeros(most_rows, np.int64),
        np.zeros(1, np.int64),
    )


@jit_in_place
def add_row(forecast: PaddedForecast, base: int, end: int) -> None:
    """Add a row of length ``base + step`` that ends at step ``end``."""
    ends, bases = forecast.ends, forecast.bases
    at = forecast.number[0]
    while at > 0 and ends[at - 1] < end:
        ends[at], bases[at] = ends[at - 1], bases[at - 1]
        at -= 1
    ends[at], bases[at] = end, base
    forecast.number[0] += 1


@jit_in_place
def remove_row(forecast: PaddedForecast, base: int, end: int) -> None:
    """Remove a row that was added with the same numbers."""
    ends, bases = forecast.ends, forecast.bases
    at, number = 0, forecast.number[0]
    while at < number and not (ends[at] == end and bases[at] == base):
        at += 1
    for i in range(at, number - 1):
        ends[i], bases[i] = ends[i + 1], bases[i + 1]
    forecast.number[0] -= 1


@jit_in_place
def peak_cells_with(forecast: PaddedForecast, now: int, base: int, end: int) -> int:
    """The most cells from now on if a row joins and nobody else does."""
    ends, bases = forecast.ends, forecast.bases
    number = forecast.number[0]
    most, widest, rows = 0, 0, 0
    at, joined = 0, False
    while at < number or not joined:
        if not joined and (at == number or ends[at] < end):
            row_base, row_end = base, end
            joined = True
        else:
            row_base, row_end = bases[at], ends[at]
            at += 1
        rows += 1
        widest = row_base if rows == 1 else max(widest, row_base)
        # A row that outlived its estimate ends with the next step.
        most = max(most, rows * (widest + max(row_end, now + 1)))
    return int(most)
