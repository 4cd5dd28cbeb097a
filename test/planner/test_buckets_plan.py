"""A job dealt to buckets and planned bucket by bucket, against one tree of all prompts."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_jobs import (
    ATTENTIVE,
    EDGE_PROMPTS,
    PROMPTS,
    Prompt,
    make_requests,
    prefixes,
    repeated,
)

from sglang_batch.errors import ConfigError
from sglang_batch.planner.buckets.bucket_dealing import deal_prompts
from sglang_batch.planner.buckets.bucket_units import (
    BucketPlan,
    Units,
    join_units,
    plan_bucket,
)
from sglang_batch.planner.buckets.splitters import Splitters, choose_splitters
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.requests import FIRST_PLACEHOLDER, Int64s, PlanRequests

CUTS = st.lists(st.integers(0, 20), max_size=4)
NUM_BUCKETS = st.integers(1, 6)
UNIT_REQUESTS = st.integers(1, 5)


class Bucket(NamedTuple):
    requests: PlanRequests
    numbers: Int64s


def part(requests: PlanRequests, begin: int, end: int) -> PlanRequests:
    return requests.take(np.arange(begin, end))


def split(requests: PlanRequests, num_buckets: int) -> Splitters:
    n = len(requests)
    return choose_splitters(
        requests.tokens, requests.offsets, n, num_buckets, max_repeated=1.0
    )


def dealt(
    requests: PlanRequests, splitters: Splitters, cuts: list[int]
) -> list[Bucket]:
    """The buckets of a job, dealt range by range."""
    n = len(requests)
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    ranges = [
        deal_prompts(part(requests, begin, end), begin, splitters)
        for begin, end in pairwise(edges)
    ]
    buckets = []
    for b in range(splitters.num_buckets):
        parts = [
            Bucket(part(each.requests, x, y), each.numbers[x:y])
            for each in ranges
            for x, y in [each.begin[b : b + 2]]
        ]
        lengths = np.concatenate([np.diff(each.requests.offsets) for each in parts])
        joined = PlanRequests(
            tokens=np.concatenate([each.requests.tokens for each in parts]),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            max_new_tokens=np.concatenate([x.requests.max_new_tokens for x in parts]),
            known_output_len=np.concatenate(
                [x.requests.known_output_len for x in parts]
            ),
        )
        buckets.append(Bucket(joined, np.concatenate([x.numbers for x in parts])))
    return buckets


def planned(
    buckets: list[Bucket], unit_requests: int = 3, max_repeated: float = 0.005
) -> list[BucketPlan]:
    return [
        plan_bucket(
            *bucket, number, ATTENTIVE, unit_requests, max_repeated=max_repeated
        )
        for number, bucket in enumerate(buckets)
    ]


def job(prompts: list[Prompt]) -> PlanRequests:
    n = len(prompts)
    return make_requests(prompts, [4 + i for i in range(n)], [i % 5 for i in range(n)])


def rows(units: Units) -> list[dict[str, float]]:
    columns = units._asdict()
    return [
        dict(zip(columns, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


@settings(deadline=None, max_examples=200)
@given(PROMPTS, NUM_BUCKETS, CUTS)
def test_any_ranges_give_the_same_buckets(
    prompts: list[Prompt], num_buckets: int, cuts: list[int]
) -> None:
    requests = job(prompts)
    splitters = split(requests, num_buckets)
    buckets = dealt(requests, splitters, cuts)
    numbers = np.concatenate([bucket.numbers for bucket in buckets])
    assert sorted(numbers.tolist()) == list(range(len(prompts)))
    for bucket, whole in zip(buckets, dealt(requests, splitters, []), strict=True):
        assert bucket.numbers.tolist() == sorted(bucket.numbers.tolist())
        expected = requests.take(bucket.numbers)
        for each in (bucket, whole):
            assert np.array_equal(each.numbers, bucket.numbers)
            assert np.array_equal(each.requests.tokens, expected.tokens)
            assert np.array_equal(each.requests.offsets, expected.offsets)
            assert np.array_equal(each.requests.max_new_tokens, expected.max_new_tokens)
            assert np.array_equal(
                each.requests.known_output_len, expected.known_output_len
            )


def test_adapters_are_dealt_too() -> None:
    plain = job([(9,), (1,), (9, 9), (1, 1)])
    requests = PlanRequests(
        plain.tokens,
        plain.offsets,
        plain.max_new_tokens,
        plain.known_output_len,
        np.array([2, 1, 2, 1], np.int32),
    )
    found = deal_prompts(requests, 10, split(requests, 2))
    assert found.numbers.tolist() == [11, 13, 10, 12]
    assert found.requests.adapter is not None
    assert found.requests.adapter.tolist() == [1, 1, 2, 2]


@settings(deadline=None, max_examples=200)
@given(PROMPTS, NUM_BUCKETS, UNIT_REQUESTS)
def test_buckets_one_after_the_other_are_the_order_of_one_tree(
    prompts: list[Prompt], num_buckets: int, unit_requests: int
) -> None:
    check_whole(prompts, num_buckets, unit_requests)


@pytest.mark.parametrize("name", EDGE_PROMPTS)
@pytest.mark.parametrize("num_buckets", [1, 3, 100])
def test_edge_cases(name: str, num_buckets: int) -> None:
    check_whole(EDGE_PROMPTS[name], num_buckets, 3)


def check_whole(prompts: list[Prompt], num_buckets: int, unit_requests: int) -> None:
    requests = job(prompts)
    splitters = split(requests, num_buckets)
    plans = planned(dealt(requests, splitters, [3]), unit_requests)
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    order = np.concatenate([plan.order for plan in plans])
    assert np.array_equal(order, tree.order)

    units = join_units([plan.summary for plan in plans])
    assert units.num_unique_tokens == tree.num_unique_tokens
    assert units.prompt_tokens.sum() == tree.num_tokens
    # Buckets that know nothing of each other compute only what splitters cut again.
    alone = sum(plan.summary.units.num_unique_tokens for plan in plans)
    parts = [[prompts[i] for i in plan.order] for plan in plans]
    assert alone - tree.num_unique_tokens == repeated(parts)
    firsts = np.cumsum([0, *(len(plan.order) for plan in plans[:-1])])
    firsts = firsts[firsts < len(prompts)]
    assert alone - tree.num_unique_tokens == tree.lcp[firsts].sum()
    assert alone - tree.num_unique_tokens <= splitters.common.sum()


@settings(deadline=None, max_examples=100)
@given(PROMPTS, NUM_BUCKETS)
def test_splitters_between_families_lose_nothing(
    prompts: list[Prompt], num_buckets: int
) -> None:
    requests = job([(100 + i % 7, *prompt) for i, prompt in enumerate(prompts)])
    n = len(requests)
    # At a share of 0, only prompts without a common token are parted.
    splitters = choose_splitters(
        requests.tokens, requests.offsets, n, num_buckets, max_repeated=0.0
    )
    assert not splitters.common.any()
    plans = planned(dealt(requests, splitters, []))
    exact = build_prefix_tree(requests.tokens, requests.offsets).num_unique_tokens
    assert sum(plan.summary.units.num_unique_tokens for plan in plans) == exact


@settings(deadline=None, max_examples=200)
@given(PROMPTS, UNIT_REQUESTS, st.sampled_from([0.0, 0.05, 1.0]))
def test_units_are_counted_as_sets_of_prefixes(
    prompts: list[Prompt], unit_requests: int, max_repeated: float
) -> None:
    requests = job(prompts)
    whole = Bucket(requests, np.arange(len(prompts)))
    (plan,) = planned([whole], unit_requests, max_repeated)
    (again,) = planned([whole], unit_requests, max_repeated)
    units = plan.summary.units
    assert all(map(np.array_equal, units, again.summary.units))
    place, before = 0, set[Prompt]()
    for row in rows(units):
        members = plan.order[place : place + int(row["num_requests"])]
        own = [prompts[i] for i in members]
        found = prefixes(own)
        assert row["bucket"] == 0 and row["first"] == place
        assert row["prompt_tokens"] == sum(map(len, own))
        assert row["unique_tokens"] == len(found)
        assert row["shared_tokens"] == len(prefixes(own[:1]) & before)
        inside = set.intersection(*(prefixes([each]) for each in own))
        assert row["common_tokens"] == len(inside)
        # The d-th token of a prompt costs 2 d - 1 of attention. Some lengths are known
        # to be 0, and nothing is unknown.
        outputs = requests.known_output_len[members].astype(float)
        prefill = sum(2.0 + 0.25 * (2 * len(prefix) - 1) for prefix in found)
        assert row["compute_s"] == pytest.approx(prefill + 2.0 * outputs.sum())
        lengths = np.array([len(each) for each in own])
        reads = (lengths * outputs + outputs**2 / 2).sum()
        assert row["memory_s"] == pytest.approx(0.5 * reads)
        place += len(members)
        before = prefixes(own[-1:])
    assert place == len(prompts)


def test_units_keep_a_family_that_is_worth_less_than_its_prefix() -> None:
    # Families of 7 requests that share 100 tokens, and 70 requests alone.
    families = [(f, *range(100), i) for f in range(10) for i in range(7)]
    alone = [(1000 + i,) for i in range(70)]
    requests = make_requests(families + alone, known_output_len=1)
    (plan,) = planned([Bucket(requests, np.arange(140))], 4)
    first = plan.summary.units.first
    assert [x for x in first if x <= 70] == list(range(0, 71, 7))
    sizes = plan.summary.units.num_requests[plan.summary.units.first >= 70]
    assert set(sizes.tolist()) <= {2, 3, 4, 5, 6}
    # With answers of 500,000 tokens, parts of a family are worth it.
    requests = make_requests(families, 600_000, known_output_len=500_000)
    (plan,) = planned([Bucket(requests, np.arange(70))], 2)
    assert plan.summary.units.num_requests.max() <= 3


def test_images_count_as_work_of_the_encoder() -> None:
    image = tuple(range(FIRST_PLACEHOLDER, FIRST_PLACEHOLDER + 8))
    requests = make_requests([(1, *image, 2), (1, *image, 3)], known_output_len=0)
    seconds = []
    for encoder in (0.0, 10.0):
        cost = type(ATTENTIVE)(
            token_time_s=2.0, kv_read_time_s=0.5, encoder_token_time_s=encoder
        )
        plan = plan_bucket(requests, np.arange(2), 0, cost, 2)
        seconds.append(plan.summary.units.compute_s.sum())
    assert seconds[1] - seconds[0] == pytest.approx(80.0)


def test_an_empty_bucket_between_others_hides_nothing() -> None:
    first, none, last = job([(1, 2, 3)]), job([]), job([(1, 2, 4)])
    buckets = [
        Bucket(first, np.array([0])),
        Bucket(none, np.zeros(0, np.int64)),
        Bucket(last, np.array([1])),
    ]
    units = join_units([plan.summary for plan in planned(buckets)])
    assert units.bucket.tolist() == [0, 2]
    assert units.shared_tokens.tolist() == [0, 2]
    assert units.num_unique_tokens == 4


def test_settings_that_are_refused() -> None:
    whole = Bucket(job([(1,)]), np.arange(1))
    with pytest.raises(ConfigError, match="unit_requests=0 must be 1 or more"):
        planned([whole], 0)
    with pytest.raises(ConfigError, match="max_repeated=-1 must be 0 to 1"):
        planned([whole], 1, max_repeated=-1)
