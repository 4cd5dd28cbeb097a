"""Candidates: requests that fit, simulated and chosen policies, and the order sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_jobs import EDGE_PROMPTS, Prompt, make_requests, sent_order
from sim_jobs import costs, prompt_lists

from sglang_batch.config import DENSE_ORDERS, ORDERS, PAGED_ORDERS
from sglang_batch.errors import ConfigError
from sglang_batch.planner.costs.bounds import Bounds, lower_bounds
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.ordering.order import Order, OrderSettings
from sglang_batch.planner.output_lengths.estimates import Observed
from sglang_batch.planner.plan import STAY, TIE, Candidates, best, choose, orders_for
from sglang_batch.planner.requests import UNKNOWN, Int32s, PlanRequests
from sglang_batch.planner.simulator.simulator import Simulation

COST = CostModel(token_time_s=1e-5, kv_read_time_s=1e-7)


def machine(capacity: int = 100_000, cost: CostModel = COST) -> Machine:
    return Machine(cost, EngineLimits(capacity))


def observed(answers: dict[int, int]) -> Observed:
    return Observed(
        np.array(list(answers), np.int64), np.array(list(answers.values()), np.int32)
    )


def candidates(
    requests: PlanRequests, machine: Machine, seed: int = 0, **answers: Any
) -> Candidates:
    return Candidates(requests, machine, OrderSettings(seed), **answers)


def bounds_of(job: Candidates) -> Bounds:
    cost, limits = job.machine.cost, job.machine.limits
    capacity = limits.kv_capacity_tokens
    return lower_bounds(job.tree, cost, job.output_len, capacity, as_sglang=False)


def assert_is_whole(job: Candidates, policy: str, requests: PlanRequests) -> None:
    num_fits = len(job.fits)
    assert sorted([*job.fits, *job.too_large]) == list(range(len(requests)))
    run, order = job.run(policy), job.order(policy)
    for sent in (run.admission_order, order.requests):
        assert sent.dtype == np.int64
        assert sorted(sent.tolist()) == list(range(num_fits))
    assert job.tree.num_requests == len(job.output_len) == num_fits
    for moment in (job.estimates.est_output_len, job.estimates.est_output_len_sq):
        assert moment.shape == (num_fits,)
        assert np.all(np.isfinite(moment))
    if order.density is not None:
        assert order.density.shape == (num_fits,)
        assert not np.any(np.isnan(order.density))
        assert 0 <= order.num_left <= num_fits
    assert np.isfinite(run.seconds)
    assert run.output_tokens == job.output_len.sum()


JOBS: dict[str, dict[str, Any]] = {
    **{name: {"prompts": prompts} for name, prompts in EDGE_PROMPTS.items()},
    "known and unknown": {
        "prompts": EDGE_PROMPTS["mixed"],
        "known_output_len": [UNKNOWN, 1, 500],
    },
    "answers of no token": {
        "prompts": EDGE_PROMPTS["mixed"],
        "known_output_len": [0, UNKNOWN, 30],
    },
    "no answer at all": {"prompts": EDGE_PROMPTS["mixed"], "known_output_len": 0},
    "no work at all": {"prompts": [()] * 4, "known_output_len": 0},
    "nothing to generate": {"prompts": EDGE_PROMPTS["mixed"], "max_new_tokens": 0},
    "no end in sight": {
        "prompts": EDGE_PROMPTS["mixed"],
        "max_new_tokens": 2**31 - 1,
    },
}


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_policy_orders_every_job(policy: str, job: dict[str, Any]) -> None:
    requests = make_requests(**job)
    found = candidates(requests, machine(2_000))
    assert_is_whole(found, policy, requests)
    again = candidates(requests, machine(2_000))
    assert sent_order(again, policy).tolist() == sent_order(found, policy).tolist()


def test_no_requests() -> None:
    job = candidates(make_requests([]), machine())
    assert len(job.fits) == len(job.too_large) == 0
    assert {job.run(policy).seconds for policy in PAGED_ORDERS} == {0.0}
    assert bounds_of(job).tightest_s == 0.0


@pytest.mark.parametrize("policy", PAGED_ORDERS)
@pytest.mark.parametrize("capacity", [2**31 - 1, 2**31, 10**12])
def test_any_amount_of_room(capacity: int, policy: str) -> None:
    requests = make_requests(EDGE_PROMPTS["mixed"])
    assert_is_whole(candidates(requests, machine(capacity)), policy, requests)


# --- What fits.


@pytest.mark.parametrize("policy", ORDERS)
def test_requests_that_cannot_fit_are_left_out(policy: str) -> None:
    prompts: list[Prompt] = [
        (1,) * 200,  # more than there is room for
        (2,) * 100,  # room for the prompt, none for an answer
        (2,) * 99,
        (3,) * 60,  # with its 41 known tokens, one too many
        (3,) * 60,
        (4,) * 10,
    ]
    known = [UNKNOWN, UNKNOWN, UNKNOWN, 41, 40, UNKNOWN]
    requests = make_requests(prompts, 1000, known)
    job = candidates(requests, machine(100))
    assert_is_whole(job, policy, requests)
    assert job.too_large.tolist() == [0, 1, 3]
    assert job.fits.tolist() == [2, 4, 5]
    # Drawn lengths leave room for the prompt.
    assert job.output_len.tolist()[:2] == [1, 40]
    assert np.all(np.add(job.output_len, [99, 60, 10]) <= 100)


@pytest.mark.parametrize("policy", ORDERS)
def test_no_request_fits(policy: str) -> None:
    requests = make_requests([(1,) * 200, (2,) * 300])
    job = candidates(requests, machine(100))
    assert_is_whole(job, policy, requests)
    assert job.too_large.tolist() == [0, 1]


def test_orders_of_what_fits_are_those_of_a_job_without_the_rest() -> None:
    prompts = [(i % 3,) * 5 + (i,) for i in range(12)]
    large = [(9,) * 500, *prompts[:6], (8,) * 500, *prompts[6:]]
    alone = candidates(make_requests(prompts), machine(400))
    job = candidates(make_requests(large), machine(400))
    assert job.fits.tolist() == [*range(1, 7), *range(8, 14)]
    for policy in ORDERS:
        assert sent_order(job, policy).tolist() == sent_order(alone, policy).tolist()
        order, expected = job.order(policy), alone.order(policy)
        assert order.requests.tolist() == expected.requests.tolist()


# --- What is chosen.


def bimodal(num_requests: int = 60) -> PlanRequests:
    """Long prompts with short answers, and the other way round."""
    prompts = [
        ((i,) * 4 if i % 3 == 0 else (1000 + i % 2,) * 50 + (i,) * 20)
        for i in range(num_requests)
    ]
    known = [120 if i % 3 == 0 else 2 for i in range(num_requests)]
    return make_requests(prompts, 1000, known)


@pytest.mark.parametrize("capacity", [200, 800, 10_000])
@pytest.mark.parametrize(
    ("row_share", "dense", "orders"),
    [
        (0, False, tuple(x for x in PAGED_ORDERS if not x.startswith("length-"))),
        (8, False, PAGED_ORDERS),
        (0, True, DENSE_ORDERS),
    ],
)
def test_auto_takes_the_fastest(
    capacity: int, row_share: float, dense: bool, orders: tuple[str, ...]
) -> None:
    engine = machine(capacity)
    cost = replace(engine.cost, row_share=row_share, padded=dense)
    engine = Machine(cost, replace(engine.limits, dense=dense))
    assert orders_for(engine) == orders
    job = candidates(bimodal(), engine)
    runs = {name: job.run(name) for name in orders}
    least = (1 + TIE) * min(run.seconds for run in runs.values())
    assert best(runs) == next(name for name in orders if runs[name].seconds <= least)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="policy='best' is not known"):
        candidates(bimodal(), machine()).run("best")


def test_the_seed_makes_the_random_lengths_and_the_random_order() -> None:
    requests = make_requests([(i,) * 5 for i in range(40)])
    jobs = [candidates(requests, machine(), seed) for seed in (0, 0, 1)]
    orders = [job.order("random").requests.tolist() for job in jobs]
    lengths = [job.output_len.tolist() for job in jobs]
    assert orders[0] == orders[1] != orders[2]
    assert lengths[0] == lengths[1] != lengths[2]


# --- Observed answers.


def test_observed_answers_make_the_estimates() -> None:
    prompts = [(1,) * 20 + (i,) for i in range(50, 70)]
    prompts += [(2,) * 20 + (i,) for i in range(50, 70)]
    requests = make_requests(prompts)
    blind = candidates(requests, machine())
    assert set(blind.estimates.est_output_len.tolist()) == {256.0}
    answers = {**dict.fromkeys(range(16), 4), **dict.fromkeys(range(20, 36), 700)}
    job = candidates(requests, machine(), observed=observed(answers))
    estimate = job.estimates.est_output_len
    assert estimate[:16].tolist() == [4.0] * 16
    assert estimate[20:36].tolist() == [700.0] * 16
    assert np.all(estimate[16:20] < 100)
    assert np.all(estimate[36:40] > 500)
    assert set(job.order("lpt").requests[:20].tolist()) == set(range(20, 40))
    assert job.output_len[:16].tolist() == [4] * 16
    assert job.output_len[20:36].tolist() == [700] * 16


def test_observed_answers_are_those_of_the_jobs_numbers() -> None:
    # Request 0 does not fit: the others are numbered anew inside.
    requests = make_requests([(1,) * 300, (2,), (3,), (4,)])
    answers = observed({0: 50, 3: 9})
    job = candidates(requests, machine(200), observed=answers)
    assert job.too_large.tolist() == [0]
    assert job.estimates.est_output_len[2] == 9.0
    assert job.output_len[2] == 9


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("answers", [{}, {0: 0}, {0: 0, 5: 2000, 7: 1}])
def test_any_observed_answers(policy: str, answers: dict[int, int]) -> None:
    requests = make_requests(EDGE_PROMPTS["mixed"])
    job = candidates(requests, machine(2_100), observed=observed(answers))
    assert_is_whole(job, policy, requests)
    for request, length in answers.items():
        assert job.estimates.est_output_len[request] == length


# --- Bounds.


@settings(deadline=None, max_examples=examples(60))
@given(prompt_lists(), costs(), st.integers(0, 99), st.sampled_from([0, 1, 300]))
def test_no_predicted_run_beats_the_bounds(
    prompts: list[Prompt], cost: CostModel, seed: int, spare: int
) -> None:
    rng = np.random.default_rng(seed)
    known: Sequence[int] = rng.choice([UNKNOWN, 1, 7, 60], len(prompts)).tolist()
    requests = make_requests(prompts, 100, known)
    needed = max(len(prompt) + 60 for prompt in prompts)
    job = candidates(requests, machine(needed + spare, cost), seed)
    bounds = bounds_of(job)
    for name in PAGED_ORDERS:
        assert_is_whole(job, name, requests)
        run = job.run(name)
        assert run.seconds >= bounds.tightest_s * (1 - 1e-9), name
        assert run.compute_s >= bounds.compute_s * (1 - 1e-9), name
        assert run.num_steps >= bounds.min_steps, name


def test_the_choice_is_good_for_all_draws_of_lengths() -> None:
    def run(seconds: float) -> Simulation:
        return SimpleNamespace(seconds=seconds)  # type: ignore[return-value]

    first = {"dfs": run(10.5), "dual-scan": run(10.0), "lpt": run(10.4)}
    second = {"dfs": run(100.0), "dual-scan": run(140.0), "lpt": run(130.0)}
    assert best(first) == "dual-scan"
    assert best(first, second) == "dfs"
    # Equal ones: the simplest.
    assert best({"lpt": run(10.0), "dfs": run(10.01)}) == "dfs"
    assert best({"lpt": run(0.0), "dfs": run(0.0)}) == "dfs"


def test_equal_and_hopeless_orders_are_not_simulated_again() -> None:
    seconds = {"dfs": 10.0, "dual-scan": 9.0, "random": 50.0}
    same = np.arange(3)
    orders = {
        "dfs": Order(same),
        "dfs-weight": Order(same.copy()),
        "dual-scan": Order(same, density=np.ones(3)),
        "random": Order(same[::-1]),
    }
    simulated: list[str] = []

    def run(order: Order, drawn: Int32s) -> Simulation:
        name = next(name for name, each in orders.items() if each is order)
        simulated.append(name)
        # Of the second draw, dfs is the fastest by far.
        took = seconds[name] - (4.0 if name == "dfs" and drawn[0] else 0.0)
        return SimpleNamespace(seconds=took)  # type: ignore[return-value]

    def draws(*each: int) -> list[Int32s]:
        return [np.full(3, length, np.int32) for length in each]

    assert choose(orders, draws(0), run) == "dual-scan"
    # Another order than that of the job has to gain more than it may lose.
    seconds["dfs"] = 9.0 * (1 + STAY / 2)
    assert choose(orders, draws(0), run, present="dfs") == "dfs"
    assert choose(orders, draws(0), run, present="dfs-weight") == "dfs"
    seconds["dfs"] = 10.0
    assert choose(orders, draws(0), run, present="dfs") == "dual-scan"
    simulated.clear()
    assert choose(orders, draws(0, 1), run) == "dfs"
    assert simulated == ["dfs", "dual-scan", "random", "dfs", "dual-scan"]
