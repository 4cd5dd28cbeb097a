"""Forecast of the KV that the running requests will need.

Every running request grows by one token a step until it ends. A request that holds
``kv`` tokens at step ``now`` therefore holds ``(kv - now) + t`` at step ``t``, and two
numbers describe the sum over any number of requests that end at about the same time.
Admission by this forecast fills the KV cache without a guessed ratio: it limits the
highest point of the sum over time, not the sum of all final lengths.

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


class KvForecast(NamedTuple):
    """Running requests by the bucket in which they should end.

    ends: int64 ``[NUM_BUCKETS]``, requests that end in each bucket. The bucket of a
        step is ``step // width`` modulo ``NUM_BUCKETS``.
    base: int64 ``[NUM_BUCKETS]``, sum of their ``kv - now``, in tokens.
    running: int64 ``[2]``, the sums of ``ends`` and of ``base``.
    short: int64 ``[1]``, final lengths of the requests shorter than a bucket, in tokens.
    width: steps per bucket.
    """

    ends: Int64s
    base: Int64s
    running: Int64s
    short: Int64s
    width: int


def make_forecast(max_remaining: int) -> KvForecast:
    """An empty forecast for requests of up to ``max_remaining`` steps.

    Longer requests count with fewer steps.
    """
    return KvForecast(
        ends=np.zeros(NUM_BUCKETS, dtype=np.int64),
        base=np.zeros(NUM_BUCKETS, dtype=np.int64),
        running=np.zeros(2, dtype=np.int64),
        short=np.zeros(1, dtype=np.int64),
        width=max(1, -(-max_remaining // (NUM_BUCKETS - 2))),
    )


@jit_in_place
def end_bucket(forecast: KvForecast, now: int, remaining: int) -> int:
    """The bucket in which a request with ``remaining`` steps ends, -1 if it is short."""
    if remaining < forecast.width:
        return -1
    furthest = now // forecast.width + NUM_BUCKETS - 2
    return min((now + remaining) // forecast.width, furthest)


@jit_in_place
def add(forecast: KvForecast, now: int, kv: int, remaining: int) -> int:
    """Add a request that holds ``kv`` tokens. Returns its bucket, for ``remove``."""
    bucket = end_bucket(forecast, now, remaining)
    if bucket < 0:
        forecast.short[0] += kv + remaining
    else:
        forecast.ends[bucket & _MASK] += 1
        forecast.base[bucket & _MASK] += kv - now
        forecast.running[0] += 1
        forecast.running[1] += kv - now
    return bucket


@jit_in_place
def remove(forecast: KvForecast, bucket: int, base: int, final: int) -> None:
    """Remove a request.

    Args:
        bucket: the result of ``add``.
        base: the request's ``kv - now``, which is the same in every step.
        final: ``kv + remaining`` when it was added.
    """
    if bucket < 0:
        forecast.short[0] -= final
    else:
        forecast.ends[bucket & _MASK] -= 1
        forecast.base[bucket & _MASK] -= base
        forecast.running[0] -= 1
        forecast.running[1] -= base


@jit_in_place
def peak(forecast: KvForecast, now: int, kv: int, remaining: int) -> int:
    """The highest KV in tokens while a new request runs, itself included.

    The forecast after its end is left out: a short request may use KV that a long one
    will need later.

    Args:
        kv: tokens that the request holds from the start.
        remaining: decode steps until it should end.
    """
    current = now // forecast.width
    end = end_bucket(forecast, now, remaining)
    ends = forecast.running[0]
    base = forecast.running[1]
    if end < 0:
        level = base + ends * (now + remaining)
        return int(level + kv + remaining + forecast.short[0])
    ends += 1
    base += kv - now
    highest = 0
    for bucket in range(current, end + 1):
        highest = max(highest, base + ends * (bucket + 1) * forecast.width)
        ends -= forecast.ends[bucket & _MASK]
        base -= forecast.base[bucket & _MASK]
    return int(highest + forecast.short[0])
