"""Forecast of the KV that the running requests will need, in whole pages.

Every running request grows by one token a step until it ends. A request that holds
``kv`` tokens at step ``now`` holds ``(kv - now) + t`` at step ``t``, in
``floor((kv - now + t + page_size - 1) / page_size)`` pages. With ``kv - now + page_size
- 1`` as ``pages * page_size + phase``, that is ``pages + (phase + t) // page_size``. So
the sum of ``pages`` and the number of requests of each phase describe any number of
requests that end at about the same time. Admission limits the highest point of the sum over
time, not the sum of all final lengths.

Future steps are divided into buckets of equal width. A request counts until the end of
the bucket in which it should end, so the forecast is too high by at most the growth in
one bucket. Requests shorter than a bucket count with their final length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compiled import jit_in_place
from ..requests import Int64s

NUM_BUCKETS = 512  # a power of two
_MASK = NUM_BUCKETS - 1
# Rows of the sums behind those of the buckets: all running requests, and those that have
# not ended yet, while the peak is searched.
_RUNNING, _LEFT = NUM_BUCKETS, NUM_BUCKETS + 1
# Columns of the sums: requests, their ``pages``, and the requests of each phase.
_NUMBER, _PAGES, _PHASE = 0, 1, 2


class KvForecast(NamedTuple):
    """Running requests by the bucket in which they should end.

    sums: int64 ``[NUM_BUCKETS + 2, page_size + 2]``. The bucket of a step is ``step //
        width`` modulo ``NUM_BUCKETS``.
    short: int64 ``[1]``, final pages of the requests shorter than a bucket.
    width: steps per bucket.
    page_size: tokens in a page.
    """

    sums: Int64s
    short: Int64s
    width: int
    page_size: int


def make_forecast(max_remaining: int, page_size: int = 1) -> KvForecast:
    """An empty forecast for requests of up to ``max_remaining`` steps; longer ones count
    with fewer."""
    return KvForecast(
        sums=np.zeros((NUM_BUCKETS + 2, page_size + _PHASE), dtype=np.int64),
        short=np.zeros(1, dtype=np.int64),
        width=max(1, -(-max_remaining // (NUM_BUCKETS - 2))),
        page_size=page_size,
    )


@jit_in_place
def end_bucket(forecast: KvForecast, now: int, remaining: int) -> int:
    """The bucket in which a request with ``remaining`` steps ends, -1 if it is short."""
    if remaining < forecast.width:
        return -1
    furthest = now // forecast.width + NUM_BUCKETS - 2
    return min((now + remaining) // forecast.width, furthest)


@jit_in_place
def _pages_of(forecast: KvForecast, tokens: int) -> int:
    return (tokens + forecast.page_size - 1) // forecast.page_size


@jit_in_place
def _count(
    forecast: KvForecast, bucket: int, base: int, final: int, number: int
) -> None:
    if bucket < 0:
        forecast.short[0] += number * _pages_of(forecast, final)
        return
    pages = _pages_of(forecast, base)
    phase = base + forecast.page_size - 1 - pages * forecast.page_size
    for row in (bucket & _MASK, _RUNNING):
        forecast.sums[row, _NUMBER] += number
        forecast.sums[row, _PAGES] += number * pages
        forecast.sums[row, _PHASE + phase] += number


@jit_in_place
def add(forecast: KvForecast, now: int, kv: int, remaining: int) -> int:
    """Add a request that holds ``kv`` tokens. Returns its bucket, for ``remove``."""
    bucket = end_bucket(forecast, now, remaining)
    _count(forecast, bucket, kv - now, kv + remaining, 1)
    return bucket


@jit_in_place
def remove(forecast: KvForecast, bucket: int, base: int, final: int) -> None:
    """Remove a request.

    Args:
        bucket: the result of ``add``.
        base, final: its ``kv - now`` and ``kv + remaining`` when it was added.
    """
    _count(forecast, bucket, base, final, -1)


@jit_in_place
def _pages_at(forecast: KvForecast, row: int, step: int) -> int:
    """Pages that the requests of a row hold at a step."""
    sums, page_size = forecast.sums, forecast.page_size
    turns = step // page_size
    pages = sums[row, _PAGES] + sums[row, _NUMBER] * turns
    for phase in range((turns + 1) * page_size - step, page_size):
        pages += sums[row, _PHASE + phase]
    return int(pages)


@jit_in_place
def _peak_in_tokens(
    forecast: KvForecast, now: int, kv: int, remaining: int, end: int
) -> int:
    """:func:`peak` with pages of one token, which have no phases; ``end`` is the new bucket."""
    sums, width = forecast.sums, forecast.width
    number, base = sums[_RUNNING, _NUMBER], sums[_RUNNING, _PAGES]
    highest = 0
    if end < 0:
        highest = base + number * (now + remaining) + kv + remaining
    for bucket in range(now // width, end + 1):
        ending = sums[bucket & _MASK, _NUMBER]
        if ending == 0 and bucket < end:
            continue
        after = (bucket + 1) * width
        level = base + number * after - ending + kv + min(after - now, remaining)
        highest = max(highest, level)
        number -= ending
        base -= sums[bucket & _MASK, _PAGES]
    return int(highest + forecast.short[0])


@jit_in_place
def peak(forecast: KvForecast, now: int, kv: int, remaining: int) -> int:
    """The most KV while a new request runs, itself included, in tokens of whole pages. A short
    request may use KV that a long one will need later, so what is after its end is left out.

    Args:
        kv: tokens that the request holds from the start.
        remaining: decode steps until it should end.
    """
    sums, page_size, width = forecast.sums, forecast.page_size, forecast.width
    end = end_bucket(forecast, now, remaining)
    if page_size == 1:
        return _peak_in_tokens(forecast, now, kv, remaining, end)
    highest = 0
    if end < 0:
        highest = _pages_at(forecast, _RUNNING, now + remaining)
        highest += _pages_of(forecast, kv + remaining)
    for column in range(page_size + _PHASE):
        sums[_LEFT, column] = sums[_RUNNING, column]
    for bucket in range(now // width, end + 1):
        ending = bucket & _MASK
        # Between two ends KV only grows.
        if sums[ending, _NUMBER] == 0 and bucket < end:
            continue
        # The engine learns of an end one step later, in which the others grow.
        after = (bucket + 1) * width
        level = _pages_at(forecast, _LEFT, after)
        level -= sums[ending, _PHASE + -after % page_size]
        level += _pages_of(forecast, kv + min(after - now, remaining))
        highest = max(highest, level)
        for column in range(page_size + _PHASE):
            sums[_LEFT, column] -= sums[ending, column]
    return int(highest + forecast.short[0]) * page_size


@jit_in_place
def growth(own: int, steps: int, est_steps: int, waits: int) -> tuple[int, int]:
    """A request's KV in tokens as if it grew from now on, and its steps to the end.

    Args:
        own: tokens of its prompt behind shared prefixes.
        steps: decode steps so far, and ``est_steps`` by the estimate.
        waits: 1 if it grows a step later: its prompt is computed first.
    """
    return own + steps - waits, max(est_steps - steps, 1) + waits


@jit_in_place
def fits(
    forecast: KvForecast, now: int, kv: int, remaining: int, others: int, most: float
) -> bool:
    """Whether a new request fits into ``most`` tokens of KV until it ends.

    The rule of admission of the scheduler and of the simulator.

    Args:
        kv, remaining: as of :func:`peak`.
        others: tokens besides the forecast: shared prefixes that will be in use, and those
            that have to stay free.
    """
    return bool(peak(forecast, now, kv, remaining) + others <= most)


# The same for the KV cells of a dense batch, which are rows times the longest of them.
#
# All rows grow by one token a step. Between two ends only the width changes, and it grows,
# so the most cells are those of the last step of some row. The rows that still run there are
# those with no fewer steps left, and rows are kept in that order.


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
