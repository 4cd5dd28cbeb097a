"""The simulator against jobs worked out by hand, and the laws that every job keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_jobs import (
    UNLIMITED,
    Job,
    Prompt,
    build,
    jobs,
    make_job,
    own_prompts,
    prompt_lists,
    run,
    unit_cost,
)

from sglang_batch.config import ORDERS
from sglang_batch.errors import ConfigError
from sglang_batch.planner.costs.bounds import lower_bounds
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.ordering.order_functions import make_order
from sglang_batch.planner.output_lengths.estimates import OutputEstimates
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.planner.simulator.simulator import Simulation

pytestmark = pytest.mark.timeout(600)  # the first run compiles the simulator


# --- By hand. A token takes 1 s to compute and its KV 10 s to read.


@pytest.mark.parametrize(
    ("exponent", "seconds"),
    [
        (1.0, 218.0),
        (np.inf, 215.0),
        (1.47, 5 + sum((1 + m**1.47) ** (1 / 1.47) for m in (60, 70, 80))),
    ],
)
def test_one_request(exponent: float, seconds: float) -> None:
    cost = unit_cost(interference_exponent=exponent)
    done = run(make_job([(4, 4, 4, 4, 4)], [3], cost=cost, step_tokens=2))
    assert done.samples[1].tolist() == [2, 2, 1, 1, 1, 1]
    assert done.samples[2].tolist() == [0, 0, 0, 60, 70, 80]
    assert done.seconds == pytest.approx(seconds, rel=1e-12)
    assert (done.num_steps, done.compute_s, done.memory_s) == (6, 8, 210)
    assert (done.prompt_tokens, done.output_tokens, done.peak_kv_tokens) == (5, 3, 8)
    assert (done.prefilled_tokens, done.cached_tokens, done.retractions) == (5, 0, 0)
    assert done.total_throughput == pytest.approx(8 / seconds)


@pytest.mark.parametrize(
    ("limits", "compute", "memory", "peak"),
    [
        # Both prompts at once, then both decode, then the longer answer alone.
        ({}, [5, 2, 1], [0, 70, 40], 7),
        ({"max_running": 1}, [2, 1, 1, 3, 1], [0, 30, 40, 0, 40], 4),
        # One of three tokens of the second step is the first request's decode.
        ({"step_tokens": 3}, [3, 3, 2], [0, 30, 80], 8),
        ({"step_tokens": 1}, [1, 1, 1, 1, 1, 1, 1, 1], None, 4),
    ],
)
def test_two_requests(
    limits: dict[str, int], compute: list[float], memory: list[float] | None, peak: int
) -> None:
    done = run(make_job(own_prompts(2, 3), [2, 1], **limits))
    assert done.samples[1].tolist() == compute
    if memory is not None:
        assert done.samples[2].tolist() == memory
    assert (done.num_steps, done.peak_kv_tokens) == (len(compute), peak)
    assert (done.compute_s, done.memory_s) == (8, 110)
    assert done.admission_order.tolist() == [0, 1]


def test_share_of_the_kv_in_use() -> None:
    done = run(make_job([(4, 4)], [2], capacity=10))
    assert done.mean_kv_share == pytest.approx((2 + 3 + 4) / 3 / 10)


def test_a_shared_prefix_is_computed_once() -> None:
    done = run(make_job([(1, 1, 1, 2), (1, 1, 1, 3), (5,)], [1, 1, 1]))
    assert (done.prefilled_tokens, done.cached_tokens) == (6, 3)
    assert (done.recomputed_tokens, done.peak_kv_tokens) == (0, 9)
    assert done.achieved_prefix_sharing_ratio == pytest.approx(3 / 9)


def test_a_repeated_prompt_computes_its_last_token_again() -> None:
    done = run(make_job([(1, 2, 3)] * 3, [1, 1, 1]))
    assert (done.prefilled_tokens, done.cached_tokens) == (5, 6)
    assert (done.recomputed_tokens, done.peak_kv_tokens) == (2, 6)


def test_every_step_reads_the_weights() -> None:
    cost = unit_cost(weight_read_time_s=100.0)
    done = run(make_job([(4,) * 5], [3], cost=cost, step_tokens=2))
    assert done.samples[2].tolist() == [100, 100, 100, 160, 170, 180]
    assert done.seconds == 8 + 210 + 600


@pytest.mark.parametrize("step_tokens", [1, 2, 3, 5, 100])
def test_attention_of_the_chunks_adds_up(step_tokens: int) -> None:
    prompts = [(4,) * 5, (1, 1, 1, 2), (1, 1, 1, 3)]
    cost = unit_cost(attention_time_s=1.0)
    done = run(make_job(prompts, [3, 1, 1], cost=cost, step_tokens=step_tokens))
    assert done.compute_s == (5 + 5 + 5) + 5**2 + 4**2 + (4**2 - 3**2)


def test_an_empty_prompt_costs_no_less_than_nothing() -> None:
    done = run(make_job([()], [2], cost=unit_cost(attention_time_s=5.0)))
    assert done.samples.min() >= 0


def test_shared_kv_is_read_once() -> None:
    prompts = [(1, 1, 1, 2), (1, 1, 1, 3)]
    shared = unit_cost(shared_kv_read_once=True)
    assert run(make_job(prompts, [1, 2])).samples[2].tolist() == [0, 100, 60]
    # 3 shared and two of each one's own, then one request alone.
    once = run(make_job(prompts, [1, 2], cost=shared))
    assert once.samples[2].tolist() == [0, 70, 60]


def test_a_retracted_request_computes_what_it_had_again() -> None:
    job = make_job(own_prompts(2, 2), [4, 4], capacity=9, est_output_len=[1, 1])
    done = run(job)
    # Both reach 4 tokens. Two more do not fit. The newer one waits for the older.
    assert done.samples[1].tolist() == [4, 2, 2, 1, 1, 4, 1, 1]
    assert done.samples[2].tolist() == [0, 60, 80, 50, 60, 0, 50, 60]
    assert (done.retractions, done.recomputed_tokens, done.prefilled_tokens) == (
        1,
        4,
        8,
    )
    assert done.peak_kv_tokens == 8


def test_known_lengths_are_not_retracted() -> None:
    done = run(make_job(own_prompts(2, 2), [4, 4], capacity=9))
    assert (done.retractions, done.peak_kv_tokens) == (0, 6)


def test_requests_share_room_that_one_gives_back_in_time() -> None:
    # 10 + 12 tokens at their ends, but never more than 16 at once.
    done = run(make_job(own_prompts(8, 2), [2, 10], capacity=18))
    assert (done.num_steps, done.peak_kv_tokens) == (11, 14)


# --- Eviction.


def plan_of(prefix: Prompt, between: Sequence[Prompt]) -> list[Prompt]:
    return [(*prefix, 8), *between, (*prefix, 9)]


@pytest.mark.parametrize(("planned", "cached"), [(True, 4), (False, 0)])
def test_the_plan_keeps_a_prefix_that_age_gives_up(planned: bool, cached: int) -> None:
    # When the second of the two between starts, the tokens that the first left are newer
    # than the prefix, and both do not fit.
    prompts = plan_of((1, 1, 1, 1), [(2,) * 4, (3,) * 4])
    job = make_job(
        prompts, [3, 4, 4, 3], capacity=12, max_running=1, plan_aware_eviction=planned
    )
    assert run(job).cached_tokens == cached


@pytest.mark.parametrize("planned", [True, False])
def test_an_answer_is_evicted_before_the_prefix_it_follows(planned: bool) -> None:
    # The first request left 4 tokens, exactly as many as the second one needs. Like any
    # leaf of a radix cache they are evicted before their parent.
    prompts = plan_of((1, 1, 1, 1), [(2,) * 5])
    job = make_job(
        prompts, [3, 3, 3], capacity=12, max_running=1, plan_aware_eviction=planned
    )
    assert run(job).cached_tokens == 4


def test_the_plan_gives_up_what_it_needs_last() -> None:
    long, short = (1,) * 6, (2,) * 5
    prompts = [(*long, 7), (*short, 7), (3,) * 7, (*long, 8), (*short, 8)]
    job = make_job(prompts, [1] * 5, capacity=14, max_running=1)
    assert run(job).cached_tokens == 6
    later = replace(job, order=[0, 1, 2, 4, 3])
    assert run(later).cached_tokens == 5


# --- The laws.


def check_laws(job: Job, done: Simulation) -> None:
    p = np.array([len(prompt) for prompt in job.prompts])
    d = np.maximum(job.lengths, 1)
    assert done.prompt_tokens == p.sum()
    assert done.output_tokens == d.sum()
    computed = done.prompt_tokens - done.cached_tokens + done.recomputed_tokens
    assert done.prefilled_tokens == computed
    if job.cost.attention_time_s == 0:
        compute = (computed + d.sum()) * job.cost.token_time_s
        assert done.compute_s == pytest.approx(compute, rel=1e-9)
    # A retracted request reads on where it stopped, so retractions do not matter.
    memory = (p * d + d * (d + 1) / 2).sum() * job.cost.kv_read_time_s
    memory += done.num_steps * job.cost.weight_read_time_s
    if job.cost.shared_kv_read_once:
        assert done.memory_s <= memory * (1 + 1e-9)
    else:
        assert done.memory_s == pytest.approx(memory, rel=1e-9)
    assert 0 < done.peak_kv_tokens <= job.limits.kv_capacity_tokens
    assert 0 < done.mean_kv_share <= 1
    assert sorted(done.admission_order) == list(range(len(p)))
    sums = [done.seconds, done.compute_s, done.memory_s]
    assert done.samples[:3].sum(axis=1) == pytest.approx(sums, rel=1e-9)
    assert done.samples.min() >= 0
    if done.retractions == 0:
        assert done.recomputed_tokens <= len(p)
        assert done.prefilled_tokens >= job.tree.num_unique_tokens


def check_bounds(job: Job, done: Simulation) -> None:
    bounds = lower_bounds(
        job.tree,
        job.cost,
        job.lengths,
        job.limits.kv_capacity_tokens,
        as_sglang=job.limits.as_sglang,
    )
    least = done.seconds * (1 + 1e-9)
    assert bounds.law_s <= least
    assert bounds.critical_path_s <= least
    assert bounds.kv_area_s <= least
    assert bounds.tightest_s <= least
    assert bounds.ideal_s <= least
    assert bounds.min_steps <= done.num_steps
    if job.cost.interference_exponent == 1:
        assert bounds.sum_s <= least


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(200))
@given(jobs())
def test_any_job_keeps_the_laws_and_the_bounds(job: Job) -> None:
    done = run(job)
    check_laws(job, done)
    check_bounds(job, done)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(50))
@given(jobs(dual=False))
def test_requests_are_admitted_in_order(job: Job) -> None:
    assert run(job).admission_order.tolist() == job.order


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(50))
@given(jobs(capacities=st.just(UNLIMITED), dual=False))
def test_any_order_shares_all_there_is_with_room_for_all(job: Job) -> None:
    prompts = [job.prompts[i] for i in job.order]
    new = [
        len(prompt) - cached
        for prompt, cached in zip(prompts, job.cached_in_order, strict=True)
    ]
    computed, repeated = sum(max(1, one) for one in new), new.count(0)
    done = run(job)
    assert (done.prefilled_tokens, done.recomputed_tokens) == (computed, repeated)
    assert done.cached_tokens == sum(job.cached_in_order)
    if job.limits.page_size == 1:
        assert sum(new) == job.tree.num_unique_tokens


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(40))
@given(prompt_lists())
def test_depth_first_reaches_the_sharing_ratio(prompts: list[Prompt]) -> None:
    tree = build(prompts)
    again = len(prompts) - len(set(prompts))
    done = run(make_job(prompts, [2] * len(prompts), order=tree.order.tolist()))
    expected = tree.prefix_sharing_ratio - again / tree.num_tokens
    assert done.achieved_prefix_sharing_ratio == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(40))
@given(jobs(), st.sampled_from(ORDERS))
def test_the_orders_that_plans_are_made_of(job: Job, policy: str) -> None:
    mean = np.array(job.est_output_len)
    order = make_order(
        policy,
        job.tree,
        plan_requests(job.prompts),
        job.cost,
        OutputEstimates(mean, mean**2),
        OrderSettings(),
    )
    job = replace(
        job,
        order=order.requests.tolist(),
        density=None if order.density is None else order.density.tolist(),
        num_left=order.num_left,
    )
    done = run(job)
    check_laws(job, done)
    check_bounds(job, done)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(15))
@given(jobs())
def test_the_same_job_goes_the_same_way(job: Job) -> None:
    first, second = run(job), run(job)
    for name in Simulation.__slots__:
        assert np.array_equal(getattr(first, name), getattr(second, name)), name


def test_long_jobs_are_sampled_in_fewer_columns() -> None:
    done = run(make_job([(1,), (2, 2)], [5000, 3000]))
    assert done.num_steps == 5001
    assert done.samples.shape == (6, -(-5001 // 8))
    sums = [done.seconds, done.compute_s, done.memory_s]
    assert done.samples[:3].sum(axis=1) == pytest.approx(sums, rel=1e-12)
    # Eight steps to a column: the prompts' and 7 of the decodes, and so on.
    assert done.samples[1, :2].tolist() == [3 + 7 * 2, 8 * 2]


# --- Jobs at the edge.


@pytest.mark.parametrize("density", [None, []])
def test_no_requests(density: list[float] | None) -> None:
    done = run(make_job([], [], density=density))
    assert (done.num_steps, done.seconds, done.prompt_tokens) == (0, 0, 0)
    assert (done.total_throughput, done.achieved_prefix_sharing_ratio) == (0, 0)
    assert (len(done.admission_order), done.mean_kv_share) == (0, 0)


@pytest.mark.parametrize("density", [None, [1.0]])
@pytest.mark.parametrize("num_left", [0, 1])
def test_one_request_of_any_side(density: list[float] | None, num_left: int) -> None:
    job = make_job([(4,)], [1], capacity=2, density=density, num_left=num_left)
    check_laws(job, run(job))


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.0, 1.0, np.inf])
@pytest.mark.parametrize("num_left", [0, 5, 10])
@pytest.mark.parametrize("output_len", [1, 30])
def test_all_of_one_density(density: float, num_left: int, output_len: int) -> None:
    job = make_job(
        own_prompts(*range(3, 13)),
        [output_len] * 10,
        capacity=60,
        density=[density] * 10,
        num_left=num_left,
        step_tokens=8,
    )
    check_laws(job, run(job))


@pytest.mark.parametrize("density", [None, [5.0, 4.0, 3.0, 1.0, 0.1]])
@pytest.mark.parametrize("est_output_len", [0.0, 1e5])
def test_estimates_that_say_nothing(
    density: list[float] | None, est_output_len: float
) -> None:
    job = make_job(
        own_prompts(3, 4, 5, 6, 7),
        [20, 1, 9, 30, 4],
        capacity=40,
        est_output_len=[est_output_len] * 5,
        density=density,
        num_left=2,
    )
    check_laws(job, run(job))


def test_an_output_of_no_tokens_counts_as_one() -> None:
    nothing = run(make_job(own_prompts(2, 3), [0, 0], capacity=6))
    one = run(make_job(own_prompts(2, 3), [1, 1], capacity=6))
    assert (nothing.seconds, nothing.output_tokens) == (one.seconds, 2)


def test_a_request_beyond_the_capacity_is_named() -> None:
    with pytest.raises(ConfigError, match=r"needs 11 .* capacity is 10"):
        run(make_job(own_prompts(2, 8), [1, 3], capacity=10))
    assert run(make_job(own_prompts(2, 8), [1, 2], capacity=10)).output_tokens == 3


def test_an_output_of_no_tokens_needs_room_for_one() -> None:
    with pytest.raises(ConfigError, match=r"needs 4 .* capacity is 3"):
        run(make_job([(1, 1, 1)], [0], capacity=3))


@pytest.mark.parametrize(
    "limits",
    [
        {"step_tokens": 0},
        {"min_step_tokens": 0},
        {"max_running": -1},
        {"page_size": 0},
    ],
    ids=str,
)
def test_engines_that_can_do_nothing_are_refused(limits: dict[str, int]) -> None:
    density = [2.0, 1.0] if "min_step_tokens" in limits else None
    (name,) = limits
    with pytest.raises(ConfigError, match=name):
        run(make_job(own_prompts(2, 2), [1, 1], density=density, num_left=1, **limits))


@pytest.mark.parametrize(
    "job",
    [
        # All KV is for the left when the right has no other request left, and the left
        # one does not fit next to the prompt that is half computed.
        make_job(
            own_prompts(50, 60), [5, 20], capacity=100, density=[2, 0.1], num_left=1,
            step_tokens=10,
        ),
        # Nothing decodes, and the left side has no room.
        make_job(
            own_prompts(8, 40, 2), [7, 18, 18], capacity=63, density=[50, 2, 1],
            est_output_len=[0.7, 1.8, 18], step_tokens=4, min_step_tokens=5,
        ),
        make_job(
            own_prompts(17, 37), [13, 8], capacity=54, density=[1, 0.1], num_left=1,
            est_output_len=[13, 0.8], step_tokens=10, min_step_tokens=1,
            closed_loop=False, cost=CostModel(token_time_s=1.0, kv_read_time_s=1.0),
        ),
    ],
    ids=["right side empty", "left side full", "open loop"],
)  # fmt: skip
def test_a_prompt_begun_on_the_right_is_finished(job: Job) -> None:
    done = run(job)
    check_bounds(job, done)
    assert done.output_tokens == sum(job.output_len)


def test_retracted_before_its_first_token() -> None:
    same = (1, 0, 1, 0, 0, 0)
    job = make_job(
        [same, (2, 2, 2, 2), same],
        [3, 7, 8],
        capacity=17,
        order=[1, 2, 0],
        est_output_len=[0, 0, 0],
        step_tokens=2,
    )
    job = replace(job, max_new_tokens=[1, 1, 1])
    check_laws(job, run(job))


def test_arithmetic_that_takes_no_time() -> None:
    job = make_job(own_prompts(3, 3), [2, 9], density=[2.0, 0.1], num_left=1)
    done = run(replace(job, cost=replace(job.cost, token_time_s=0.0)))
    assert (done.compute_s, done.seconds) == (0, done.memory_s)


def plan_requests(prompts: list[Prompt]) -> PlanRequests:
    n = len(prompts)
    return PlanRequests(
        tokens=np.array([token for prompt in prompts for token in prompt], np.int32),
        offsets=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        max_new_tokens=np.full(n, 2000, np.int32),
        known_output_len=np.full(n, UNKNOWN, np.int32),
    )


def test_the_tail_begins_when_fewer_than_half_are_left() -> None:
    prompts: list[Prompt] = [(i, 1) for i in range(4)]
    one_by_one = run(make_job(prompts, [2, 3, 4, 10]))
    seconds, rows = one_by_one.samples[0], one_by_one.samples[3]
    assert rows.max() == 4
    assert one_by_one.tail_s == pytest.approx(seconds[rows == 1][-6:].sum())
    assert 0 < one_by_one.tail_s < one_by_one.seconds
    together = run(make_job(prompts, [5, 5, 5, 5]))
    assert together.tail_s == 0.0
