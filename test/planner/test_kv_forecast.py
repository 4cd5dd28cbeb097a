"""The KV forecast against the sum over all requests, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from example_counts import examples
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

    @property
    def end(self) -> int:
        return self.since + self.remaining

    def at(self, step: int, page_size: int, kept: int) -> int:
        """Tokens in its pages, which it holds for ``kept`` steps after its last."""
        if step > self.end + kept:
            return 0
        tokens = self.kv + min(step, self.end) - self.since
        return -(-tokens // page_size) * page_size


def true_peak(load: Load, kept: int) -> int:
    everyone = [*load.running, load.newcomer]
    return max(
        sum(r.at(step, load.page_size, kept) for r in everyone)
        for step in range(load.now + 1, load.newcomer.end + kept + 1)
    )


def found_peak(load: Load) -> int:
    forecast = forecast_of(load.running, load.longest, load.page_size)
    return peak(forecast, load.now, load.newcomer.kv, load.newcomer.remaining)


def forecast_of(running: list[Running], longest: int, page_size: int = 1) -> KvForecast:
    forecast = make_forecast(longest, page_size)
    for r in running:
        add(forecast, r.since, r.kv, r.remaining)
    return forecast


class Load(NamedTuple):
    """Longest request, step, requests that run in it, a newcomer, and the page size."""

    longest: int
    now: int
    running: list[Running]
    newcomer: Running
    page_size: int


@st.composite
def loads(
    draw: st.DrawFn, longest_of: tuple[int, ...] = (1, 20, 510, 511, 2000, 5000)
) -> Load:
    longest = draw(st.sampled_from(longest_of))
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
    page_size = draw(st.sampled_from([1, 3, 16, 64]))
    return Load(longest, now, running, newcomer, page_size)


@settings(deadline=None, max_examples=examples(300))
@given(loads((1, 20, 100, 510)))
def test_peak_is_the_true_one_where_a_bucket_is_one_step(load: Load) -> None:
    # The engine learns of an end one step late.
    assert found_peak(load) == true_peak(load, kept=1)


@settings(deadline=None, max_examples=examples(150))
@given(loads())
def test_peak_is_at_least_the_true_one(load: Load) -> None:
    assert found_peak(load) >= true_peak(load, kept=0)


@settings(deadline=None, max_examples=examples(150))
@given(loads())
def test_peak_is_above_the_true_one_by_a_buckets_growth_at_most(load: Load) -> None:
    forecast = forecast_of(load.running, load.longest, load.page_size)
    pages = -(-forecast.width // load.page_size)
    growth = pages * load.page_size * (len(load.running) + 1)
    # Short ones count to the newcomer's end, with all that they ever hold.
    short = sum(
        r.at(r.end, load.page_size, kept=0)
        for r in load.running
        if r.remaining < forecast.width
    )
    assert found_peak(load) <= true_peak(load, kept=0) + growth + short


@settings(deadline=None, max_examples=examples(100))
@given(loads(), st.randoms(use_true_random=False))
def test_what_was_added_can_be_removed(load: Load, random: Random) -> None:
    forecast = forecast_of(load.running, load.longest, load.page_size)
    before = forecast.sums.copy(), forecast.short.copy()
    now, newcomer = load.now, load.newcomer
    own = add(forecast, now, newcomer.kv, newcomer.remaining)
    remove(forecast, own, newcomer.kv - now, newcomer.kv + newcomer.remaining)
    assert np.array_equal(forecast.sums, before[0])
    assert np.array_equal(forecast.short, before[1])
    running = list(load.running)
    random.shuffle(running)
    for r in running:
        bucket = end_bucket(forecast, r.since, r.remaining)
        remove(forecast, bucket, r.kv - r.since, r.kv + r.remaining)
    assert not forecast.sums.any()
    assert not forecast.short.any()


def test_a_long_request_may_need_later_what_a_short_one_uses() -> None:
    # Ten tokens a request now. The first one will hold 110.
    forecast = forecast_of([Running(0, 10, 100)], longest=100)
    assert forecast.width == 1
    # When the engine learns that the short one has ended, the other has 16 tokens.
    assert peak(forecast, 0, 10, 5) == 15 + 16
    assert peak(forecast, 0, 10, 100) == 220


def test_a_long_newcomer_takes_the_place_of_those_that_end() -> None:
    forecast = forecast_of([Running(0, 100, 10)], longest=100)
    # 110 + 11 after the first ends. At its own end the newcomer holds no more than 100.
    assert peak(forecast, 0, 0, 100) == 121


def test_pages_are_taken_whole_and_when_they_begin() -> None:
    # Two pages of 16 from the start, a third one at step 15.
    forecast = forecast_of([Running(0, 18, 100)], longest=100, page_size=16)
    assert peak(forecast, 0, 1, 10) == 32 + 16
    assert peak(forecast, 0, 1, 14) == 48 + 16
    assert peak(forecast, 0, 1, 16) == 48 + 32
    # Its last token fills the last page: no further one begins.
    assert peak(make_forecast(100, 16), 0, 16, 16) == 32


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
