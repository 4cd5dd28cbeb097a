"""Orders: the promises of each policy, on jobs of all shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from order_parts.algorithm_2 import algorithm_2_order
from plan_jobs import (
    COST,
    EDGE_PROMPTS,
    PROMPTS,
    Prompt,
    make_requests,
    outputs_of,
    prefixes,
    repeated,
)
from prefix_tree_check import shared_with_previous

from sglang_batch.config import ORDERS, POLICIES
from sglang_batch.errors import ConfigError
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.costs.tree_work import leaf_work
from sglang_batch.planner.ordering.order import Order, OrderSettings, families_mixed
from sglang_batch.planner.ordering.order_functions import make_order
from sglang_batch.planner.output_lengths.estimates import OutputEstimates
from sglang_batch.planner.prefixes.prefix_groups import prefix_groups
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree

Floats = NDArray[np.float64]
SEEDS = st.integers(0, 99)
KEPT = st.sampled_from([1.0, 0.998, 0.9, 0.5, 0.0])

ESTIMATES: dict[str, Callable[[int], Floats]] = {
    "all zero": lambda n: np.zeros(n),
    "one zero": lambda n: np.arange(n, dtype=np.float64),
    "equal": lambda n: np.full(n, 7.0),
    "two kinds": lambda n: np.where(np.arange(n) % 2, 1.0, 5e3),
    "huge": lambda n: np.full(n, 2.0**31 - 1),
}
COSTS = {
    "usual": CostModel(token_time_s=1e-5, kv_read_time_s=1e-7),
    "attention": CostModel(
        token_time_s=1e-5, kv_read_time_s=1e-7, attention_time_s=1e-9
    ),
    "free reads": CostModel(token_time_s=1e-5, kv_read_time_s=0.0),
    "free compute": CostModel(token_time_s=0.0, kv_read_time_s=1e-7),
}


class Algorithm2(OrderSettings):
    """Settings of the paper's order in place of ours."""


DUAL = {
    "in two": OrderSettings(),
    "much in two": OrderSettings(min_sharing_kept=0.0),
    "algorithm 2": Algorithm2(),
    "much by algorithm 2": Algorithm2(min_sharing_kept=0.0),
}


def order_of(
    policy: str,
    prompts: Sequence[Prompt],
    est_output_len: Sequence[float] | Floats,
    *,
    cost: CostModel = COST,
    max_new_tokens: int | Sequence[int] = 1000,
    settings: OrderSettings | None = None,
) -> Order:
    requests = make_requests(prompts, max_new_tokens)
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    mean = np.array(est_output_len, dtype=np.float64)
    estimates = OutputEstimates(mean, mean**2)
    if policy == "dual-scan" and isinstance(settings, Algorithm2):
        work = leaf_work(tree, cost, mean, mean**2)
        return algorithm_2_order(tree, cost, work, settings.min_sharing_kept)
    return make_order(
        policy, tree, requests, cost, estimates, settings or OrderSettings()
    )


def shared_in(prompts: Sequence[Prompt], requests: Sequence[int]) -> int:
    """Tokens that each prompt shares with the one before it."""
    tree = build_prefix_tree(*vars_of(prompts))
    return sum(shared_with_previous(tree, tree.position[list(requests)].tolist()))


def vars_of(prompts: Sequence[Prompt]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    requests = make_requests(prompts)
    return requests.tokens, requests.offsets


def most_shared(prompts: Sequence[Prompt]) -> int:
    return sum(map(len, prompts)) - len(prefixes(prompts))


def assert_is_whole(order: Order, n: int) -> None:
    assert order.requests.dtype == np.int64
    assert sorted(order.requests.tolist()) == list(range(n))
    if order.density is None:
        assert (order.num_left, order.repeated_tokens) == (0, 0)
    else:
        assert order.density.shape == (n,)
        assert np.all(order.density >= 0)  # and none is NaN
        assert 0 <= order.num_left <= n
        assert order.repeated_tokens >= 0


# --- All policies.


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("est_output_len", ESTIMATES.values(), ids=ESTIMATES)
def test_every_policy_orders_every_job(
    est_output_len: Callable[[int], Floats], cost: CostModel
) -> None:
    for prompts in EDGE_PROMPTS.values():
        n = len(prompts)
        for policy in ORDERS:
            assert_is_whole(order_of(policy, prompts, est_output_len(n), cost=cost), n)
        for dual in DUAL.values():
            order = order_of(
                "dual-scan", prompts, est_output_len(n), cost=cost, settings=dual
            )
            assert_is_whole(order, n)


@settings(deadline=None, max_examples=examples(60))
@given(PROMPTS, SEEDS)
def test_every_policy_gives_a_permutation_and_the_same_one_again(
    prompts: list[Prompt], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    est_output_len = rng.integers(0, 3, len(prompts)) * 100.0
    for policy in ORDERS:
        order = order_of(policy, prompts, est_output_len, settings=OrderSettings(seed))
        assert_is_whole(order, len(prompts))
        again = order_of(policy, prompts, est_output_len, settings=OrderSettings(seed))
        assert order.requests.tolist() == again.requests.tolist()


def test_the_orders_are_the_policies_but_auto() -> None:
    assert set(ORDERS) == {*POLICIES} - {"auto"}


@pytest.mark.parametrize("policy", ["auto", "best", "", "DFS"])
def test_an_unknown_policy_is_named(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"policy={policy!r} is not known.*dual-scan"):
        order_of(policy, [(1,)], [1.0])


# --- Policies of one line.


def test_fcfs_is_the_input_order() -> None:
    order = order_of("fcfs", [(3,), (1,), (2,)], [1.0, 2.0, 3.0])
    assert order.requests.tolist() == [0, 1, 2]


def test_random_goes_by_the_seed() -> None:
    prompts = [(i,) for i in range(50)]
    orders = [
        order_of("random", prompts, [1.0] * 50, settings=OrderSettings(seed))
        for seed in (0, 1, 2)
    ]
    assert len({tuple(order.requests.tolist()) for order in orders}) == 3
    assert all(order.requests.tolist() != list(range(50)) for order in orders)


@settings(deadline=None)
@given(PROMPTS, SEEDS)
def test_longest_first_keeps_the_order_of_equals(
    prompts: list[Prompt], seed: int
) -> None:
    n = len(prompts)
    rng = np.random.default_rng(seed)
    most = rng.choice([0, 1, 5, 2**31 - 1], n).tolist()
    est_output_len = rng.choice([0.0, 1.0, 1.5, 1e9], n).tolist()
    lof = order_of("lof", prompts, est_output_len, max_new_tokens=most or 0)
    lpt = order_of("lpt", prompts, est_output_len, max_new_tokens=most or 0)
    # sorted() is stable.
    assert lof.requests.tolist() == sorted(range(n), key=lambda i: -most[i])
    assert lpt.requests.tolist() == sorted(range(n), key=lambda i: -est_output_len[i])


@settings(deadline=None)
@given(PROMPTS)
def test_dfs_sorts_the_prompts(prompts: list[Prompt]) -> None:
    order = order_of("dfs", prompts, np.ones(len(prompts)))
    by_prompt = sorted(range(len(prompts)), key=prompts.__getitem__)
    assert order.requests.tolist() == by_prompt


def test_dfs_weight_takes_heavy_subtrees_first() -> None:
    prompts: list[Prompt] = [
        (9,),                                               # 0: alone at the root
        (1, 1), (1, 2),                                     # 1, 2: a subtree of two
        (2, 0, 0), (2, 0, 1),                               # 3, 4: two of five
        (2, 5), (2, 7, 0), (2, 7, 1), (2, 7, 1),            # 5; 6, 7, 8: three
        (0,),                                               # 9: alone
    ]  # fmt: skip
    order = order_of("dfs-weight", prompts, np.ones(10))
    # (2, 7, 1) twice is the heavier part of (2, 7).
    assert order.requests.tolist() == [7, 8, 6, 3, 4, 5, 1, 2, 9, 0]


@settings(deadline=None)
@given(PROMPTS)
def test_dfs_weight_keeps_all_sharing(prompts: list[Prompt]) -> None:
    order = order_of("dfs-weight", prompts, np.ones(len(prompts)))
    assert shared_in(prompts, order.requests.tolist()) == most_shared(prompts)


def test_dfs_longest_takes_the_subtree_of_the_longest_answer_first() -> None:
    prompts: list[Prompt] = [(1, 1), (1, 2), (2, 1), (2, 2), (3,), (4,)]
    order = order_of("dfs-longest", prompts, np.array([1.0, 5.0, 9.0, 2.0, 7.0, 6.0]))
    assert order.requests.tolist() == [2, 3, 4, 5, 1, 0]
    assert order_of("dfs-longest", [], np.zeros(0)).requests.tolist() == []


@settings(deadline=None)
@given(PROMPTS, SEEDS)
def test_dfs_longest_keeps_all_sharing(prompts: list[Prompt], seed: int) -> None:
    order = order_of("dfs-longest", prompts, outputs_of(len(prompts), seed))
    assert shared_in(prompts, order.requests.tolist()) == most_shared(prompts)


@settings(deadline=None)
@given(PROMPTS, SEEDS)
def test_prefix_groups_stay_together(prompts: list[Prompt], seed: int) -> None:
    order = order_of("prefix-groups", prompts, outputs_of(len(prompts), seed))
    tree = build_prefix_tree(*vars_of(prompts))
    group = np.empty(len(prompts), np.int64)
    group[tree.order] = prefix_groups(tree).group_of
    in_turn = group[order.requests]
    assert np.count_nonzero(np.diff(in_turn)) == max(0, len(set(in_turn.tolist())) - 1)


# --- Dual scan.


def test_aligned_takes_the_longest_sequences_first() -> None:
    prompts = [[1] * 5, [2] * 40, [3] * 5, [4] * 20]
    order = order_of("aligned", prompts, np.array([50.0, 1.0, 2.0, 40.0]))
    assert order.requests.tolist() == [3, 0, 1, 2]


def test_aligned_keeps_long_prefixes_together_and_no_short_ones() -> None:
    long, short = [7] * 16, [8] * 15
    prompts = [[*long, 1], [*short, 1], [*long, 2], [*short, 2], [9] * 30]
    order = order_of("aligned", prompts, np.array([60.0, 50.0, 1.0, 1.0, 10.0]))
    assert order.requests.tolist() == [0, 2, 1, 4, 3]


@settings(deadline=None)
@given(PROMPTS, SEEDS)
def test_aligned_keeps_all_sharing_of_long_prefixes(
    prompts: list[Prompt], seed: int
) -> None:
    long = [tuple(t for t in prompt for _ in range(16)) for prompt in prompts]
    order = order_of("aligned", long, outputs_of(len(prompts), seed))
    assert shared_in(long, order.requests.tolist()) == most_shared(long)


@settings(deadline=None)
@given(PROMPTS, SEEDS)
def test_aligned_is_by_length_alone_without_long_prefixes(
    prompts: list[Prompt], seed: int
) -> None:
    short = [tuple(prompt[:15]) for prompt in prompts]
    outputs = outputs_of(len(prompts), seed)
    order = order_of("aligned", short, outputs)
    ends = np.array([len(prompt) for prompt in short]) + outputs
    assert (np.diff(ends[order.requests]) <= 0).all()


def test_dual_scan_has_short_answers_left_and_long_ones_right() -> None:
    # Per request 100 + 1 tokens and 100.5 reads, or 10 + 200 tokens and 22,000 reads.
    prompts = [
        *[(i,) * 100 for i in range(1, 31)],
        *[(i,) * 10 for i in range(31, 34)],
    ]
    est_output_len = [1.0] * 30 + [200.0] * 3
    # 3,660 tokens to 69,015 reads: with 2 s and 0.5 s, a density of 0.2.
    for dual in DUAL.values():
        order = order_of("dual-scan", prompts, est_output_len, settings=dual)
        assert order.num_left == 30
        assert sorted(order.requests[:30].tolist()) == list(range(30))
        assert order.repeated_tokens == 0
        assert order.density is not None
        assert order.density[:30] == pytest.approx(101 * 2 / (100.5 * 0.5))
        assert order.density[30:] == pytest.approx(210 * 2 / (22_000 * 0.5))


def test_dual_scan_takes_an_outlier_out_of_its_subtree() -> None:
    # One answer of 300 tokens among short ones to the same document of 50.
    document = tuple(range(1000, 1050))
    prompts = [(*document, i) for i in range(20)]
    est_output_len = [1.0] * 19 + [300.0]
    whole = order_of("dual-scan", prompts, est_output_len)
    assert (whole.num_left in (0, 20), whole.repeated_tokens) == (True, 0)
    generous = OrderSettings(min_sharing_kept=0.9)  # 95 of 950 shared tokens
    order = order_of("dual-scan", prompts, est_output_len, settings=generous)
    assert (order.num_left, order.repeated_tokens) == (19, 50)
    assert order.requests[-1] == 19


@settings(deadline=None, max_examples=examples(150))
@given(PROMPTS, SEEDS, KEPT)
def test_dual_scan_repeats_what_it_says_and_no_more_than_it_may(
    prompts: list[Prompt], seed: int, kept: float
) -> None:
    est_output_len = outputs_of(len(prompts), seed)
    order = order_of(
        "dual-scan",
        prompts,
        est_output_len,
        settings=OrderSettings(min_sharing_kept=kept),
    )
    sides = [
        [prompts[i] for i in side]
        for side in (order.requests[: order.num_left], order.requests[order.num_left :])
    ]
    assert order.repeated_tokens == repeated(sides)
    assert order.repeated_tokens <= (1 - kept) * most_shared(prompts)
    # On each side, requests with a common prefix are together.
    for side in sides:
        assert shared_in(side, range(len(side))) == most_shared(side)


@settings(deadline=None, max_examples=examples(100))
@given(PROMPTS, SEEDS, KEPT)
def test_algorithm_2_repeats_no_more_than_it_says(
    prompts: list[Prompt], seed: int, kept: float
) -> None:
    est_output_len = outputs_of(len(prompts), seed)
    dual = Algorithm2(min_sharing_kept=kept)
    order = order_of("dual-scan", prompts, est_output_len, settings=dual)
    lost = most_shared(prompts) - shared_in(prompts, order.requests.tolist())
    assert lost <= order.repeated_tokens <= (1 - kept) * most_shared(prompts) + 1e-9


@settings(deadline=None)
@given(st.integers(1, 60), SEEDS, st.sampled_from(list(DUAL.values())))
def test_without_sharing_density_falls_and_sides_part_at_the_jobs(
    n: int, seed: int, dual: OrderSettings
) -> None:
    rng = np.random.default_rng(seed)
    input_len = rng.integers(1, 40, n)
    output_len = np.ceil(rng.exponential(1.0, n) * rng.choice([1, 100], n))
    prompts = [(i, *[0] * int(p - 1)) for i, p in enumerate(input_len)]
    order = order_of("dual-scan", prompts, output_len, settings=dual)
    compute = COST.compute_time_s(input_len, output_len)
    memory = COST.memory_time_s(input_len, output_len)
    own = compute / memory
    target = compute.sum() / memory.sum()
    in_turn = own[order.requests]
    assert np.all(in_turn[1:] <= in_turn[:-1] * (1 + 1e-12))
    apart = np.abs(own / target - 1) > 1e-9  # not decided by rounding
    is_left = np.isin(np.arange(n), order.requests[: order.num_left])
    assert np.array_equal(is_left[apart], (own > target)[apart])
    assert order.density is not None
    assert np.all(order.density[1:] <= order.density[:-1] * (1 + 1e-9))


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_requests_of_one_kind_are_all_on_one_side(
    cost: CostModel,
) -> None:
    document = tuple(range(1000, 1064))
    prompts = [(*document, i) for i in range(32)]
    order = order_of("dual-scan", prompts, [8.0] * 32, cost=cost)
    # They are no more memory-intensive than the job is. 64 and 32 divide exactly.
    assert order.num_left == 32


def test_an_empty_answer_leaves_the_others_where_they_are() -> None:
    prompts = [(i,) * 100 for i in range(1, 11)] + [(i,) for i in range(11, 14)]
    est_output_len = [1.0] * 10 + [500.0] * 3
    before = order_of("dual-scan", prompts, est_output_len)
    order = order_of("dual-scan", [*prompts, (99,)], [*est_output_len, 0.0])
    assert order.num_left == before.num_left + 1
    assert order.requests[0] == 13  # it reads nothing: infinite density
    assert set(order.requests[-3:].tolist()) == {10, 11, 12}


# --- Orders of an order.


def test_beginning_with_a_sample() -> None:
    density = np.array([9.0, 5.0, 4.0, 0.5, 0.2])
    order = Order(np.array([4, 2, 0, 1, 3]), density, num_left=3, repeated_tokens=7)
    first = order.beginning_with(np.array([1, 2]))
    assert first.requests.tolist() == [1, 2, 4, 0, 3]
    assert first.density is not None
    assert first.density.tolist() == [5.0, 5.0, 9.0, 4.0, 0.2]
    assert (first.num_left, first.repeated_tokens) == (4, 7)  # of 1, 2 and 4, 0


@settings(deadline=None)
@given(PROMPTS, SEEDS, st.data())
def test_beginning_with_any_sample_keeps_all_requests(
    prompts: list[Prompt], seed: int, data: st.DataObject
) -> None:
    n = len(prompts)
    est_output_len = outputs_of(n, seed, 300)
    sample = data.draw(st.permutations(range(n)))
    sample = sample[: data.draw(st.integers(0, n))]
    for policy in ORDERS:
        order = order_of(policy, prompts, est_output_len)
        found = order.beginning_with(np.array(sample, np.int64))
        before = order.requests.tolist()
        after = [i for i in before if i not in sample]
        assert found.requests.tolist() == [*sample, *after]
        assert found.repeated_tokens == order.repeated_tokens
        assert (found.density is None) == (order.density is None)
        if found.density is not None:
            left = set(before[: order.num_left]) - set(sample)
            assert found.num_left == len(sample) + len(left)
            assert found.density.shape == (n,)
            assert not np.any(np.isnan(found.density))


# Before lengths are known ---------------------------------------------------------------


@pytest.mark.parametrize("name", EDGE_PROMPTS)
def test_mixed_families_are_all_requests(name: str) -> None:
    prompts = EDGE_PROMPTS[name]
    requests = make_requests(prompts, 10)
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    order = families_mixed(tree, seed=0)
    assert sorted(order.requests) == list(range(len(prompts)))
    assert order.density is None


@given(PROMPTS, SEEDS)
def test_mixed_families_are_a_permutation(prompts: Sequence[Prompt], seed: int) -> None:
    requests = make_requests(prompts, 10)
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    assert sorted(families_mixed(tree, seed).requests) == list(range(len(prompts)))


def test_families_stay_together_and_every_stretch_has_the_jobs_mix() -> None:
    asked = [(1, 10 + i // 8, 1000 + i) for i in range(400)]  # fifty groups of eight
    written = [(2, 5000 + i) for i in range(400)]
    requests = make_requests([*asked, *written], 10)
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    order = families_mixed(tree, seed=0).requests
    place = np.argsort(order)
    for first in range(0, 400, 8):
        group = np.sort(place[first : first + 8])
        assert np.array_equal(group, np.arange(group[0], group[0] + 8))
    for stretch in np.split(order < 400, 4):
        assert 0.3 < stretch.mean() < 0.7
    assert np.array_equal(order, families_mixed(tree, seed=0).requests)
    assert not np.array_equal(order, families_mixed(tree, seed=1).requests)
