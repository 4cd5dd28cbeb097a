"""Orders whose requests join by length, and the simulator that carries them out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_jobs import Prompt, make_requests

from sglang_batch.dense.admission import Row, peak_cells
from sglang_batch.planner.admission_rules.kv_forecast import (
    add_row,
    make_padded_forecast,
    peak_cells_with,
)
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.kv_lengths.batch_state import GROUPS, TREE
from sglang_batch.planner.machine_model import EngineLimits
from sglang_batch.planner.ordering.kv_length_order import (
    length_aligned_order,
    length_tree_order,
)
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.simulator.simulator import Simulation, simulate

PADDED = CostModel(
    token_time_s=1e-3,
    kv_read_time_s=1e-5,
    weight_read_time_s=1e-3,
    interference_exponent=1.0,
    padded=True,
)
PAGED = CostModel(token_time_s=1e-3, kv_read_time_s=1e-5, interference_exponent=1.0)


def tree_of(prompts: list[Prompt]) -> PrefixTree:
    requests = make_requests(prompts)
    return build_prefix_tree(requests.tokens, requests.offsets)


def shared(prefix: int, size: int, lengths: list[int]) -> list[Prompt]:
    """Prompts of these lengths with a prefix of ``size`` tokens."""
    return [
        (prefix,) * size + (prefix * 1000 + i + 1,) * (length - size)
        for i, length in enumerate(lengths)
    ]


def aligned(prompts: list[Prompt], cost: CostModel, capacity: int, steps: int) -> Order:
    tree = tree_of(prompts)
    return length_aligned_order(
        tree, cost, np.full(len(prompts), float(steps)), capacity
    )


def test_the_tree_rule_takes_each_request_by_its_own_length() -> None:
    order = length_tree_order(tree_of([(1,) * 9, (2,) * 3, (2,) * 3 + (4,)]))
    assert order.requests.tolist() == [1, 2, 0]
    assert order.lengths is not None and order.lengths.rule == TREE
    assert order.lengths.key.tolist() == [9, 3, 4]
    assert set(order.lengths.family.tolist()) == {-1}


def test_siblings_stay_together_where_that_saves_more_than_padding_costs() -> None:
    prompts = [*shared(1, 400, [410, 900]), *shared(2, 20, [30, 600])]
    # 400 tokens again take 0.4 s, the padding of 490 tokens in 10 steps 0.05 s.
    # 20 tokens again take 0.02 s, the padding of 570 tokens in 10 steps 0.06 s.
    lengths = aligned(prompts, PADDED, 10_000, 10).lengths
    assert lengths is not None and lengths.rule == GROUPS
    assert lengths.family[0] == lengths.family[1] != -1
    assert lengths.key[:2].tolist() == [900, 900]
    assert lengths.family[2:].tolist() == [-1, -1]
    assert lengths.key[2:].tolist() == [30, 600]


def test_without_padding_nobody_is_parted() -> None:
    prompts = [*shared(1, 400, [410, 900]), *shared(2, 20, [30, 600])]
    lengths = aligned(prompts, PAGED, 10_000, 10).lengths
    assert lengths is not None
    assert -1 not in lengths.family
    assert lengths.key.tolist() == [900, 900, 600, 600]


def test_a_family_is_no_larger_than_a_batch() -> None:
    prompts = shared(1, 100, [200] * 10)
    whole = aligned(prompts, PADDED, 10_000, 10).lengths
    parts = aligned(prompts, PADDED, 1_000, 10).lengths
    assert whole is not None and parts is not None
    assert len(set(whole.family.tolist())) == 1
    assert set(parts.family.tolist()) == {-1}


def test_a_prefix_of_more_than_a_batch_is_a_block() -> None:
    both = [
        shared(head, 100, [110 + 5 * i + head for i in range(20)]) for head in (1, 2)
    ]
    prompts = [prompt for pair in zip(*both, strict=True) for prompt in pair]
    order = aligned(prompts, PADDED, 500, 10)
    first = [prompts[i][0] for i in order.requests]
    changes = sum(a != b for a, b in pairwise(first))
    assert changes == 1
    lengths = [len(prompts[i]) for i in order.requests]
    assert sum(a > b for a, b in pairwise(lengths)) == 1


# Simulated


def simulated(
    prompts: list[Prompt], output_len: list[int], order: Order, limits: EngineLimits,
    cost: CostModel = PADDED,
) -> Simulation:  # fmt: skip
    return simulate(
        tree_of(prompts), cost, limits,
        order=order, output_len=np.array(output_len, np.int32),
    )  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Prompt], list[int], EngineLimits]:
    count = draw(st.integers(1, 30))
    heads = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    prompts = [
        (head,) * 20 + (100 + i,) * size
        for i, (head, size) in enumerate(zip(heads, sizes, strict=True))
    ]
    output_len = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    limits = EngineLimits(
        kv_capacity_tokens=draw(st.integers(130, 1_000)),
        step_tokens=draw(st.sampled_from([64, 4096])),
        max_running=draw(st.sampled_from([None, 1, 4])),
        as_sglang=draw(st.booleans()),
    )
    return prompts, output_len, limits


@pytest.mark.timeout(600)
@settings(deadline=None, max_examples=examples(150))
@given(jobs(), st.sampled_from([TREE, GROUPS]), st.booleans())
def test_every_request_ends_once(
    job: tuple[list[Prompt], list[int], EngineLimits], rule: int, dense: bool
) -> None:
    prompts, output_len, limits = job
    if dense:
        limits = EngineLimits(
            limits.kv_capacity_tokens, limits.step_tokens, max_running=limits.max_running,
            dense=True,
        )  # fmt: skip
    tree = tree_of(prompts)
    estimates = np.array(output_len, float)
    order = length_tree_order(tree)
    if rule == GROUPS:
        order = length_aligned_order(tree, PADDED, estimates, limits.kv_capacity_tokens)
    cost = PADDED if dense else PAGED
    run = simulated(prompts, output_len, order, limits, cost)
    assert sorted(run.admission_order) == list(range(len(prompts)))
    assert run.output_tokens == sum(output_len)
    assert 0 < run.peak_kv_tokens <= limits.kv_capacity_tokens
    if rule == GROUPS:
        assert run.mixed_steps == 0
    # The longest row reads no less than the mean, and no more than there is.
    rows, tokens, longest = run.samples[3:6]
    assert (longest * np.maximum(rows, 1) >= tokens).all()


def test_rows_of_one_length_have_no_padding() -> None:
    # Whole batches of each length: it is cheaper to run the rest of two of them together.
    prompts = [(i + 1,) * (10 if i % 2 else 400) for i in range(48)]
    limits = EngineLimits(8_000, step_tokens=1 << 20, max_running=8, dense=True)
    order = length_aligned_order(tree_of(prompts), PADDED, np.full(48, 30.0), 8_000)
    run = simulated(prompts, [30] * 48, order, limits)
    mixed = simulated(prompts, [30] * 48, Order(np.arange(48)), limits)
    _, _, _, rows, tokens, longest = run.samples.sum(axis=1)
    assert longest * rows / tokens < 1.02 * len(run.samples[0])
    assert run.memory_s < 0.75 * mixed.memory_s


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=20)
)
@settings(deadline=None)
def test_the_forecast_of_cells_is_that_of_the_dense_engine(
    pairs: list[tuple[int, int]],
) -> None:
    forecast = make_padded_forecast(len(pairs) + 1)
    for length, left in pairs[1:]:
        add_row(forecast, length, left)
    rows = [Row(length, left, 0, i) for i, (length, left) in enumerate(pairs)]
    length, left = pairs[0]
    assert peak_cells_with(forecast, 0, length, left) == peak_cells(rows)


@pytest.mark.parametrize("rule", [TREE, GROUPS])
def test_siblings_join_after_the_leader_that_computes_their_prefix(rule: int) -> None:
    """Also where all prompts are of one length, and others of that length wait."""
    prompts = [(i // 8,) * 500 + (100 + i,) * 40 for i in range(128)]
    limits = EngineLimits(6_000, step_tokens=512, max_running=40, as_sglang=True)
    if rule == TREE:
        order = length_tree_order(tree_of(prompts))
    else:
        order = length_aligned_order(tree_of(prompts), PAGED, np.full(128, 8.0), 6_000)
    run = simulated(prompts, [8] * 128, order, limits, PAGED)
    assert run.cached_tokens == 16 * 7 * 500
