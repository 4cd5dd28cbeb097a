"""The simulator as SGLang goes under our scheduler: by hand, and the laws it keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_jobs import Job, jobs, make_job, own_prompts, run, unit_cost

from sglang_batch.planner.costs.tree_work import planned_work

pytestmark = pytest.mark.timeout(600)  # the first run compiles the simulator


def known(job: Job) -> Job:
    """The same job with answers that end by their limit."""
    return replace(job, max_new_tokens=job.output_len)


# --- By hand. A token takes 1 s to compute and its KV 10 s to read.


def test_the_first_token_comes_with_the_prompt() -> None:
    done = run(known(make_job([(4,) * 5], [3], step_tokens=2, as_sglang=True)))
    assert done.samples[1].tolist() == [2, 2, 1, 1, 1]
    assert done.samples[2].tolist() == [0, 0, 0, 60, 70]
    assert (done.num_steps, done.output_tokens, done.peak_kv_tokens) == (5, 3, 7)


def test_an_answer_that_stops_by_itself_decodes_once_more() -> None:
    done = run(make_job([(4,) * 5], [3], step_tokens=2, as_sglang=True))
    assert done.samples[1].tolist() == [2, 2, 1, 1, 1, 1]


def test_an_answer_of_one_token_takes_no_decode() -> None:
    done = run(known(make_job(own_prompts(2, 3), [1, 1], as_sglang=True)))
    assert (done.samples[1].tolist(), done.memory_s) == ([5], 0)


def test_a_request_holds_its_row_for_a_step_after_its_last() -> None:
    prompts = own_prompts(2, 2, 3)
    job = known(make_job(prompts, [2, 3, 1], max_running=2, as_sglang=True))
    # Both prompts, both decode, the second one again. Then the third joins.
    assert run(job).samples[1].tolist() == [4, 2, 1, 3]
    # An engine in which nothing runs takes no step.
    alone = replace(job, limits=replace(job.limits, max_running=1))
    assert run(alone).samples[1].tolist() == [2, 1, 2, 1, 1, 3]


def test_a_request_holds_its_kv_for_a_step_after_its_last() -> None:
    # The third prompt needs the KV that the first one frees.
    job = make_job(own_prompts(4, 2, 4), [2, 4, 1], capacity=13, as_sglang=True)
    assert run(known(job)).samples[1].tolist() == [6, 2, 1, 5]


def test_followers_wait_for_the_step_after_their_leader() -> None:
    prompts = [(1,) * 8 + (2,), (1,) * 8 + (3,), (5,)]
    done = run(known(make_job(prompts, [1, 1, 1], as_sglang=True)))
    assert done.samples[1].tolist() == [10, 1]
    assert (done.prefilled_tokens, done.cached_tokens) == (11, 8)
    assert done.admission_order.tolist() == [0, 2, 1]


def test_nobody_waits_for_a_few_tokens() -> None:
    prompts = [(1,) * 7 + (2,), (1,) * 7 + (3,), (5,)]
    done = run(known(make_job(prompts, [1, 1, 1], as_sglang=True)))
    assert done.samples[1].tolist() == [8 + 8 + 1]
    assert (done.prefilled_tokens, done.cached_tokens) == (17, 0)
    assert done.admission_order.tolist() == [0, 1, 2]


def test_followers_go_on_when_their_part_of_a_long_prompt_is_there() -> None:
    prompts = [(1, 1, 2, 2, 2, 2), (1, 1, 3), (2, 2)]
    job = make_job(prompts, [1, 1, 1], step_tokens=3, as_sglang=True)
    done = run(known(job))
    # The prompt that was begun goes first, also before those it held up.
    assert done.samples[1].tolist() == [3, 3, 3]
    assert done.admission_order.tolist() == [0, 1, 2]


@pytest.mark.parametrize("capacity", [80, 100, 120, 140, 160, 200, 300])
def test_no_prefix_is_computed_in_room_that_followers_need(capacity: int) -> None:
    """Four documents below one prefix, then three others, of four questions each.

    While one computes the first prefix, the others below it wait. A document of the
    other three that was computed meanwhile had to go before its turn came.
    """
    asked = [(100 + question,) * 4 for question in range(4)]
    prompts = [
        (1,) * 20 + (10 + document,) * 20 + question
        for document in range(4)
        for question in asked
    ]
    prompts += [(30 + i,) * 30 + question for i in range(3) for question in asked]
    lengths = [8] * len(prompts)
    job = make_job(prompts, lengths, capacity=capacity, step_tokens=100, as_sglang=True)
    done = run(known(job))
    assert done.prefilled_tokens == 20 + 4 * 20 + 3 * 30 + len(prompts) * 4


def test_offloaded_requests_come_back_without_computing_anything_again() -> None:
    job = make_job(
        own_prompts(2, 2, 2),
        [4, 4, 2],
        capacity=9,
        est_output_len=[1] * 3,
        as_sglang=True,
    )
    done = run(job)
    assert done.retractions > 0
    assert (done.prefilled_tokens, done.recomputed_tokens) == (6, 0)
    # Each of these answers decodes as many times as it has tokens.
    assert done.compute_s == 6 + 10
    assert done.peak_kv_tokens <= 9
    # None is admitted while others are offloaded.
    assert done.admission_order.tolist() == [0, 1, 2]


def test_the_work_planned_is_the_work_done() -> None:
    job = known(make_job(own_prompts(3, 5, 2), [4, 1, 7], as_sglang=True))
    steps = np.array(job.output_len, float) - 1
    cost = unit_cost()
    done = run(job)
    compute, memory = planned_work(job.tree, cost, steps, steps**2, 0)
    assert compute == done.compute_s
    # By the integral over a request's life, half a token a step less.
    assert memory == done.memory_s - 10 * (3 + 0 + 6) / 2


# --- The laws.


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(200))
@given(jobs(), st.booleans())
def test_any_job_keeps_the_laws(job: Job, by_limit: bool) -> None:
    job = replace(job, limits=replace(job.limits, as_sglang=True))
    if by_limit:
        job = known(job)
    done = run(job)
    p = np.array([len(prompt) for prompt in job.prompts])
    most = job.max_new_tokens or [np.iinfo(np.int32).max] * len(p)
    decodes = np.array(job.output_len) - (job.lengths >= most)
    assert done.output_tokens == job.lengths.sum()
    computed = done.prompt_tokens - done.cached_tokens + done.recomputed_tokens
    assert done.prefilled_tokens == computed
    if job.cost.attention_time_s == 0:
        compute = (computed + decodes.sum()) * job.cost.token_time_s
        assert done.compute_s == pytest.approx(compute, rel=1e-9)
    if not job.cost.shared_kv_read_once:
        memory = (p * decodes + decodes * (decodes + 1) / 2).sum()
        memory = memory * job.cost.kv_read_time_s
        memory += done.num_steps * job.cost.weight_read_time_s
        assert done.memory_s == pytest.approx(memory, rel=1e-9)
    assert 0 < done.peak_kv_tokens <= job.limits.kv_capacity_tokens
    assert sorted(done.admission_order) == list(range(len(p)))
    sums = [done.seconds, done.compute_s, done.memory_s]
    assert done.samples[:3].sum(axis=1) == pytest.approx(sums, rel=1e-9)
    if job.max_new_tokens == job.output_len and job.est_output_len == job.output_len:
        assert done.retractions == 0


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(50))
@given(jobs(capacities=st.just(10**9), dual=False))
def test_with_room_for_all_each_prefix_is_computed_once(job: Job) -> None:
    # Nobody waits for less than eight tokens.
    prompts = [
        tuple(token for token in prompt for _ in range(8)) for prompt in job.prompts
    ]
    limits = replace(job.limits, as_sglang=True)
    job = replace(job, prompts=prompts, limits=limits)
    done = run(job)
    assert done.cached_tokens == sum(job.cached_in_order)
    if job.limits.page_size == 1:
        assert done.prompt_tokens - done.cached_tokens == job.tree.num_unique_tokens


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("length", [50, 63, 64, 65])
def test_known_lengths_fill_the_pages_without_an_offload(
    length: int, page_size: int
) -> None:
    prompts = own_prompts(*[50] * 160)
    job = known(
        make_job(
            prompts,
            [length] * 160,
            capacity=4096,
            step_tokens=512,
            page_size=page_size,
            as_sglang=True,
        )
    )
    done = run(job)
    assert (done.retractions, done.recomputed_tokens) == (0, 0)
    # All but the margin and less than one request: it was not bought with idle KV.
    needed = -(-(50 + length - 1) // page_size) * page_size
    assert done.peak_kv_tokens > 0.99 * 4096 - needed
