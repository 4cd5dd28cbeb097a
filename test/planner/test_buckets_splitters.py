"""Splitters of a sample, and the bucket of each prompt, against lists of tuples."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_jobs import EDGE_PROMPTS, PROMPTS, Prompt, make_requests

from sglang_batch.errors import ConfigError
from sglang_batch.planner.prefixes.bucket_splitters import (
    Splitters,
    buckets_of,
    choose_splitters,
    sample_numbers,
)

NUM_BUCKETS = st.integers(1, 8)


def split(sample: list[Prompt], num_buckets: int) -> Splitters:
    requests = make_requests(sample)
    return choose_splitters(requests.tokens, requests.offsets, num_buckets)


def as_tuples(splitters: Splitters) -> list[Prompt]:
    return [
        tuple(splitters.tokens[a:b].tolist()) for a, b in pairwise(splitters.offsets)
    ]


def shared_at(splitters: Splitters) -> list[int]:
    """The most tokens that prompts on both sides of each splitter share."""
    return [end - begin - 1 for begin, end in pairwise(splitters.offsets.tolist())]


def bucket_list(prompts: list[Prompt], splitters: Splitters) -> list[int]:
    requests = make_requests(prompts)
    found = buckets_of(requests.tokens, requests.offsets, splitters)
    assert found.dtype == np.int32
    return found.tolist()


def common(a: Prompt, b: Prompt) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


@settings(deadline=None, max_examples=examples(300))
@given(PROMPTS, PROMPTS, NUM_BUCKETS)
def test_buckets_are_stretches_of_the_sorted_prompts(
    sample: list[Prompt], others: list[Prompt], num_buckets: int
) -> None:
    splitters = split(sample, num_buckets)
    bounds = as_tuples(splitters)
    assert all(left < right for left, right in pairwise(bounds))
    assert splitters.num_buckets == len(bounds) + 1
    prompts = sample + others
    bucket = bucket_list(prompts, splitters)
    assert bucket == [bisect_right(bounds, prompt) for prompt in prompts]
    # What two prompts share across a splitter is known without them.
    for i, most in enumerate(shared_at(splitters)):
        for a, left in zip(prompts, bucket, strict=True):
            for b, right in zip(prompts, bucket, strict=True):
                if left <= i < right:
                    assert common(a, b) <= most


@settings(deadline=None)
@given(PROMPTS, NUM_BUCKETS)
def test_every_bucket_has_requests_of_the_sample(
    sample: list[Prompt], num_buckets: int
) -> None:
    splitters = split(sample, num_buckets)
    if sample:
        assert set(bucket_list(sample, splitters)) == set(range(splitters.num_buckets))
    else:
        assert splitters.num_buckets == 1


@pytest.mark.parametrize("num_buckets", [1, 3, 10, 64])
def test_buckets_have_their_share_of_requests(num_buckets: int) -> None:
    prompts = [(*range(50), i, i + 1) for i in range(1000)]
    splitters = split(prompts, num_buckets)
    size = np.bincount(bucket_list(prompts, splitters))
    assert size.max() <= 1000 / num_buckets
    assert size.min() >= 1000 // num_buckets // 2


def test_a_system_prompt_of_all_is_cut_and_a_family_is_not() -> None:
    rng = np.random.default_rng(0)
    system = tuple(range(300))
    families = [tuple(rng.integers(1000, 9000, 200).tolist()) for _ in range(100)]
    prompts = [
        (*system, *family, *rng.integers(0, 9000, 5).tolist())
        for family in families
        for _ in range(20)
    ]
    splitters = split(prompts, 16)
    assert 16 <= splitters.num_buckets <= 33
    assert set(shared_at(splitters)) <= {300, 301}
    bucket = np.array(bucket_list(prompts, splitters)).reshape(100, 20)
    assert (bucket == bucket[:, :1]).all()


def test_a_family_that_is_larger_than_a_bucket_is_cut() -> None:
    family = [(*range(900), i) for i in range(600)]
    others = [(10_000 + i,) for i in range(400)]
    splitters = split(family + others, 10)
    size = np.bincount(bucket_list(family + others, splitters))
    assert size.min() >= 50 and size.max() <= 100


def test_a_bucket_is_larger_for_equal_prompts() -> None:
    prompts: list[Prompt] = [(1, i) for i in range(100)] + [(2,)] * 300
    prompts += [(3, i) for i in range(100)]
    size = np.bincount(bucket_list(prompts, split(prompts, 10)))
    assert size.max() == 300 and np.sort(size)[-2] <= 50


@pytest.mark.parametrize(
    "sorted_lcp", [[0, 3, 1, 2, 3, 1, 3, 3], [0, 2, 2, 2, 2, 2, 2, 2]]
)
def test_a_bucket_ends_where_prompts_share_least(sorted_lcp: list[int]) -> None:
    prompts: list[Prompt] = []
    for number, shared in enumerate(sorted_lcp):
        prompts.append(
            (*(prompts[-1][:shared] if prompts else ()), number + 10, 0, 0, 0)
        )
    shares = shared_at(split(prompts, 2))
    # Of eight prompts, the first bucket ends after two to four.
    assert shares[0] == min(sorted_lcp[2:5])


@pytest.mark.parametrize("name", EDGE_PROMPTS)
def test_edge_cases(name: str) -> None:
    prompts = EDGE_PROMPTS[name]
    for num_buckets in (1, 2, 50):
        splitters = split(prompts, num_buckets)
        bounds = as_tuples(splitters)
        expected = [bisect_right(bounds, prompt) for prompt in prompts]
        assert bucket_list(prompts, splitters) == expected
        assert splitters.num_buckets <= max(len(set(prompts)), 1)


def test_as_many_buckets_as_distinct_prompts_at_most() -> None:
    prompts: list[Prompt] = [(1,), (2,), (2,), (3,), ()]
    assert as_tuples(split(prompts, 50)) == [(1,), (2,), (3,)]
    assert split([(7, 7)] * 30, 50).num_buckets == 1


def test_the_highest_token_is_a_splitter_as_any_other() -> None:
    high = 2**31 - 1
    prompts: list[Prompt] = [(high - 1,), (high,), (high, high), (0,)]
    splitters = split(prompts, 4)
    assert splitters.num_buckets == 4
    assert bucket_list(prompts, splitters) == [1, 2, 3, 0]


def test_the_sample_has_a_request_of_each_stretch() -> None:
    numbers = sample_numbers(1_000_003, 5, seed=1)
    assert numbers.dtype == np.int64 and len(numbers) == 5000
    stretch = np.arange(5001) * 1_000_003 // 5000
    assert (numbers >= stretch[:-1]).all() and (numbers < stretch[1:]).all()
    assert np.array_equal(numbers, sample_numbers(1_000_003, 5, seed=1))
    assert not np.array_equal(numbers, sample_numbers(1_000_003, 5, seed=2))


@pytest.mark.parametrize("num_requests", [0, 1, 2000])
def test_all_of_a_small_job_are_in_the_sample(num_requests: int) -> None:
    numbers = sample_numbers(num_requests, 2, seed=0)
    assert numbers.tolist() == list(range(num_requests))


def test_settings_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_buckets=0 must be 1 or more"):
        split([(1,)], 0)
