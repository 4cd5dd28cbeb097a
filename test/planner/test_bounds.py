"""The lower bounds, by hand. That no simulated job beats them is tested there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_jobs import Job, build, jobs, run, unit_cost

from sglang_batch.planner.costs.bounds import Bounds, lower_bounds
from sglang_batch.planner.costs.cost_model import CostModel

# A token takes 1 s to compute, its KV 10 s to read, without overlap.
SHARED = [(1, 1, 1, 2), (1, 1, 1, 3)]


def bounds_of(
    prompts: list[tuple[int, ...]],
    output_len: list[int],
    capacity: int = 1000,
    cost: CostModel | None = None,
) -> Bounds:
    lengths = np.array(output_len, dtype=np.int32)
    return lower_bounds(
        build(prompts), cost or unit_cost(), lengths, capacity, as_sglang=False
    )


def test_one_request() -> None:
    bounds = bounds_of([(4,) * 5], [3])
    # 5 * 3 + 3^2 / 2 tokens are read.
    assert (bounds.compute_s, bounds.memory_s) == (8, 195)
    assert (bounds.law_s, bounds.sum_s, bounds.ideal_s) == (203, 203, 195)
    # Alone: its prompt, then steps that read 6, 7 and 8 tokens.
    assert bounds.critical_path_s == bounds.tightest_s == 5 + (61 + 71 + 81)
    assert (bounds.kv_area_s, bounds.min_steps) == (195, 3)


def test_a_shared_prefix_counts_once() -> None:
    bounds = bounds_of(SHARED, [2, 4])
    assert bounds.compute_s == 4 + 1 + 2 + 4
    assert bounds.memory_s == 10 * (4 * 2 + 2**2 / 2 + 4 * 4 + 4**2 / 2)
    # One own token each, and three for as long as the longer answer takes.
    assert bounds.kv_area_s == 10 * ((2 + 2) + (4 + 8) + 3 * 4)
    once = bounds_of(SHARED, [2, 4], cost=unit_cost(shared_kv_read_once=True))
    assert once.memory_s == once.kv_area_s == 280


def test_the_prefix_of_a_prefix_is_held_for_the_longest_answer_below() -> None:
    prompts = [(1, 1, 2, 2, 8), (1, 1, 2, 2, 9), (1, 1, 3)]
    bounds = bounds_of(prompts, [2, 4, 6])
    own = (2 + 2) + (4 + 8) + (6 + 18)
    assert bounds.kv_area_s == 10 * (own + 2 * 4 + 2 * 6)


def test_attention_of_a_shared_prefix_counts_once() -> None:
    bounds = bounds_of(SHARED, [2, 4], cost=unit_cost(attention_time_s=1.0))
    assert bounds.compute_s == 11 + 4**2 + (4**2 - 3**2)


@pytest.mark.parametrize(("capacity", "steps"), [(1000, 3), (7, 3), (6, 4), (1, 20)])
def test_steps_that_the_capacity_allows(capacity: int, steps: int) -> None:
    # 19.5 token-steps.
    assert bounds_of([(4,) * 5], [3], capacity).min_steps == steps


def test_every_step_reads_the_weights() -> None:
    cost = unit_cost(weight_read_time_s=100.0)
    bounds = bounds_of([(4,) * 5], [3], 6, cost)
    assert bounds.memory_s == 195 + 4 * 100
    assert bounds.kv_area_s == 195 + 4 * 100
    assert bounds.critical_path_s == 5 + (61 + 71 + 81) + 3 * 100


@pytest.mark.parametrize(
    ("exponent", "seconds"),
    [(1.0, 203), (2.0, (8**2 + 195**2) ** 0.5), (np.inf, 195)],
)
def test_under_another_law(exponent: float, seconds: float) -> None:
    cost = replace(unit_cost(attention_time_s=0.0), interference_exponent=exponent)
    assert cost.interference_exponent == exponent
    bounds = bounds_of([(4,) * 5], [3], cost=cost)
    assert bounds.law_s == pytest.approx(seconds)
    assert (bounds.sum_s, bounds.ideal_s) == (203, 195)


def test_no_requests() -> None:
    bounds = bounds_of([], [])
    assert (bounds.compute_s, bounds.memory_s, bounds.tightest_s) == (0, 0, 0)
    assert bounds.min_steps == 0


@settings(deadline=None, max_examples=examples(40))
@given(jobs())
def test_ideal_and_no_overlap_enclose_the_law(job: Job) -> None:
    bounds = lower_bounds(job.tree, job.cost, job.lengths, 1000)
    slack = 1 + 1e-9
    assert bounds.ideal_s <= bounds.law_s * slack
    assert bounds.law_s <= bounds.sum_s * slack
    assert bounds.kv_area_s <= bounds.memory_s * slack
    for name in ("law_s", "critical_path_s", "kv_area_s"):
        assert getattr(bounds, name) <= bounds.tightest_s * slack


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(80))
@given(jobs(), st.floats(1, 10), st.booleans())
def test_no_schedule_beats_them_under_any_law(
    job: Job, exponent: float, as_sglang: bool
) -> None:
    limits = replace(job.limits, as_sglang=as_sglang)
    job = replace(
        job, cost=replace(job.cost, interference_exponent=exponent), limits=limits
    )
    done = run(job)
    bounds = lower_bounds(
        job.tree,
        job.cost,
        job.lengths,
        job.limits.kv_capacity_tokens,
        as_sglang=as_sglang,
    )
    assert bounds.tightest_s <= done.seconds * (1 + 1e-9)
    assert bounds.min_steps <= done.num_steps


def test_the_first_token_comes_with_the_prompt_in_sglang() -> None:
    bounds = lower_bounds(
        build([(4,) * 5, (7,) * 3]),
        unit_cost(),
        np.array([3, 1], np.int32),
        1000,
        as_sglang=True,
    )
    # Two steps that read 6 and 7 tokens, as two decodes with 5 before them.
    assert bounds.compute_s == 8 + 2
    assert bounds.memory_s == 10 * (5 * 2 + 2**2 / 2)
    assert bounds.critical_path_s == 5 + (61 + 71)
    assert bounds.min_steps == 2
