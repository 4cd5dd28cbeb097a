"""The KV forecast against the sum over all requests, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.planner.admission_rules.kv_forecast import (
    NUM_BUCKETS,
    KvForecast,
    add,
    end_bucket,
    make_forecast,
    peak,
    remove,
)


@dataclass(frozen=True)
class Running:
    """A request that held ``kv`` tokens at step ``since``."""

    since: int
    kv: int
    remaining: int

    def at(self, step: int) -> int:
        ended = step > self.since + self.remaining
        return 0 if ended else self.kv + step - self.since

    @property
    def end(self) -> int:
        return self.since + self.remaining


def true_peak(running: list[Running], newcomer: Running) -> int:
    steps = range(newcomer.since, newcomer.end + 1)
    return max(sum(r.at(step) for r in [*running, newcomer]) for step in steps)


def forecast_of(running: list[Running], longest: int) -> KvForecast:
    forecast = make_forecast(longest)
    for r in running:
        add(forecast, r.since, r.kv, r.remaining)
    return forecast


@st.composite
def loads(draw: st.DrawFn) -> tuple[int, int, list[Running], Running]:
    """Longest request, step, requests that run in it, and a newcomer."""
    longest = draw(st.sampled_from([1, 20, 510, 511, 2000, 5000]))
    now = draw(st.integers(0, 20_000))
    remaining = st.integers(1, longest)
    running = []
    for age, kv, left in draw(
        st.lists(st.tuples(st.integers(0, 600), st.integers(0, 300), remaining))
    ):
        # Joined some steps ago and not over yet.
        since = max(0, now - min(age, left - 1))
        running.append(Running(since, kv, left))
    newcomer = Running(now, draw(st.integers(0, 300)), draw(remaining))
    return longest, now, running, newcomer


@settings(deadline=None, max_examples=150)
@given(loads())
def test_peak_is_at_least_the_true_one(
    load: tuple[int, int, list[Running], Running],
) -> None:
    longest, now, running, newcomer = load
    forecast = forecast_of(running, longest)
    found = peak(forecast, now, newcomer.kv, newcomer.remaining)
    assert found >= true_peak(running, newcomer)


@settings(deadline=None, max_examples=150)
@given(loads())
def test_peak_is_above_the_true_one_by_a_buckets_growth_at_most(
    load: tuple[int, int, list[Running], Running],
) -> None:
    longest, now, running, newcomer = load
    forecast = forecast_of(running, longest)
    found = peak(forecast, now, newcomer.kv, newcomer.remaining)
    growth = forecast.width * (len(running) + 1)
    # Short ones count to the newcomer's end, with all that they ever hold.
    short = sum(r.kv + r.remaining for r in running if r.remaining < forecast.width)
    assert found <= true_peak(running, newcomer) + growth + short


@settings(deadline=None, max_examples=100)
@given(loads(), st.randoms(use_true_random=False))
def test_what_was_added_can_be_removed(
    load: tuple[int, int, list[Running], Running], random: Random
) -> None:
    longest, now, running, newcomer = load
    forecast = forecast_of(running, longest)
    before = [np.copy(array) for array in forecast[:-1]]
    own = add(forecast, now, newcomer.kv, newcomer.remaining)
    remove(forecast, own, newcomer.kv - now, newcomer.kv + newcomer.remaining)
    for array, expected in zip(forecast[:-1], before, strict=True):
        assert np.array_equal(array, expected)
    random.shuffle(running)
    for r in running:
        bucket = end_bucket(forecast, r.since, r.remaining)
        remove(forecast, bucket, r.kv - r.since, r.kv + r.remaining)
    assert not any(array.any() for array in forecast[:-1])


def test_a_long_request_may_need_later_what_a_short_one_uses() -> None:
    # Ten tokens a request now. The first one will hold 110.
    forecast = forecast_of([Running(0, 10, 100)], longest=100)
    assert forecast.width == 1
    # A token more than the true 2 * 15: a request counts to its bucket's end.
    assert 30 <= peak(forecast, 0, 10, 5) <= 32
    assert 220 <= peak(forecast, 0, 10, 100) <= 222


def test_a_long_newcomer_takes_the_place_of_those_that_end() -> None:
    forecast = forecast_of([Running(0, 100, 10)], longest=100)
    # 110 + 10 when the first ends. At its own end the newcomer holds no more than 100.
    assert 120 <= peak(forecast, 0, 0, 100) <= 122


def test_nobody_else_runs() -> None:
    for longest in (1, 100, 100_000):
        forecast = make_forecast(longest)
        for remaining in (1, longest):
            found = peak(forecast, 7, 5, remaining)
            assert 5 + remaining <= found <= 5 + remaining + forecast.width


@pytest.mark.parametrize("longest", [1, 510, 511, 100_000])
def test_the_longest_request_has_a_bucket_of_its_own(longest: int) -> None:
    forecast = make_forecast(longest)
    now = 12_345
    ahead = end_bucket(forecast, now, longest) - now // forecast.width
    assert 0 <= ahead < NUM_BUCKETS
    # One that outlives all expectations is cut, not wrapped around.
    cut = end_bucket(forecast, now, 50 * longest + NUM_BUCKETS * 50)
    assert cut - now // forecast.width < NUM_BUCKETS


def test_a_short_newcomer_may_run_into_the_next_bucket() -> None:
    running = [Running(9, 0, 1000)]
    forecast = forecast_of(running, longest=5000)
    assert forecast.width == 10
    assert 10 <= peak(forecast, 9, 0, 5) <= 10 + 2 * forecast.width
