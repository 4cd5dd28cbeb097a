"""The simulator on models with recurrent states or windows, as SGLang goes under our scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_jobs import Job, jobs, make_job, own_prompts, run, unit_cost

from sglang_batch.planner.machine_model import PoolShares, of_states

pytestmark = pytest.mark.timeout(600)  # the first run compiles the simulator


def on_states(prompts: Any, output_len: Any, states: int = 30, **more: Any) -> Job:
    pool = of_states(states)
    job = make_job(prompts, output_len, as_sglang=True, second_pool=pool, **more)
    return replace(job, max_new_tokens=job.output_len)


def test_a_prompt_is_cut_where_others_go_on_and_others_fill_the_step() -> None:
    prompts = [(1,) * 40 + (2,) * 5, (1,) * 40 + (3,) * 5, (5,) * 10]
    done = run(on_states(prompts, [1, 1, 1]))
    assert done.samples[1].tolist() == [50, 10]
    assert done.cached_tokens == 40
    without = make_job(prompts, [1, 1, 1], as_sglang=True)
    without = replace(without, max_new_tokens=without.output_len)
    assert run(without).samples[1].tolist() == [55, 5]


def test_beside_a_cut_prompt_others_join_as_a_whole_or_wait() -> None:
    prompts = [(1,) * 40 + (2,) * 5, (1,) * 40 + (3,) * 5, (5,) * 20, (6,) * 3]
    done = run(on_states(prompts, [1] * 4, step_tokens=50))
    # Nobody passes the prompt of 20, for which there are 10 tokens.
    assert done.samples[1].tolist() == [40, 33]


def test_a_short_prefix_is_not_worth_a_state() -> None:
    prompts = [(1,) * 10 + (i,) * 5 for i in (2, 3, 4)]
    done = run(on_states(prompts, [1] * 3))
    assert (done.cached_tokens, done.prefilled_tokens) == (0, 45)
    # With enough of them it is.
    prompts = [(1,) * 10 + (i,) * 5 for i in range(2, 7)]
    assert run(on_states(prompts, [1] * 5)).cached_tokens == 4 * 10


def test_the_last_token_of_equal_prompts_is_computed() -> None:
    done = run(on_states([(1,) * 50] * 3, [1] * 3))
    assert (done.cached_tokens, done.recomputed_tokens) == (2 * 49, 0)
    assert done.samples[1].tolist() == [49, 1, 2]


def test_each_request_holds_two_states() -> None:
    # 6 may be held, of which 1 % stays free.
    done = run(on_states(own_prompts(3, 3, 3), [4] * 3, states=7))
    assert max(done.samples[3]) == 2
    assert max(run(on_states(own_prompts(3, 3, 3), [4] * 3)).samples[3]) == 3


def test_the_state_whose_use_is_furthest_away_goes_first() -> None:
    """Three groups taken in turn: with few states, each group's is gone when it is needed."""
    prompts = [(10 + g,) * 40 + (20 + i,) for i in range(3) for g in range(3)]
    order = list(range(9))
    many = run(on_states(prompts, [1] * 9, order=order, max_running=1))
    assert many.cached_tokens == 6 * 40
    few = run(on_states(prompts, [1] * 9, states=5, order=order, max_running=1))
    # Two fit beside the two of the request that runs.
    assert 0 < few.cached_tokens < 6 * 40
    assert few.prefilled_tokens == 9 * 41 - few.cached_tokens


def test_steps_that_are_not_overlapped_learn_of_an_end_at_once() -> None:
    prompts = own_prompts(2, 2, 3)
    job = make_job(prompts, [2, 3, 1], max_running=2, as_sglang=True, overlapped=False)
    job = replace(job, max_new_tokens=job.output_len)
    assert run(job).samples[1].tolist() == [4, 2, 1 + 3]
    # Also of one that stops by itself.
    assert run(replace(job, max_new_tokens=None)).samples[1].tolist() == [4, 2, 1 + 3]


def test_states_are_read_in_each_step() -> None:
    cost = unit_cost(state_reads=100.0)
    job = make_job([(4,) * 5], [3], as_sglang=True, cost=cost)
    job = replace(job, max_new_tokens=job.output_len)
    assert run(job).samples[2].tolist() == [0, 1060, 1070]
    windows = replace(job, cost=unit_cost(window=3, window_reads=2.0))
    assert run(windows).samples[2].tolist() == [0, 120, 130]


def test_windows_limit_admission() -> None:
    pool = PoolShares(20, prompt_tokens=4, answer_tokens=4, prefix_tokens=4)
    job = make_job(own_prompts(9, 9, 9), [9] * 3, as_sglang=True, second_pool=pool)
    assert max(run(job).samples[3]) == 2


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(100))
@given(jobs(), st.integers(1, 12))
def test_any_job_ends_with_any_number_of_states(job: Job, states: int) -> None:
    limits = replace(job.limits, as_sglang=True, second_pool=of_states(states))
    limits = replace(limits, page_size=1, overlapped=False, plan_aware_eviction=True)
    done = run(replace(job, limits=limits))
    computed = done.prompt_tokens - done.cached_tokens + done.recomputed_tokens
    assert done.prefilled_tokens == computed
    assert sorted(done.admission_order.tolist()) == list(range(len(job.prompts)))
