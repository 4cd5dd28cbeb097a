"""Plans: requests that fit, simulated and chosen policies, and the order sent."""

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
from plan_jobs import EDGE_PROMPTS, Prompt, make_requests
from sim_jobs import costs, prompt_lists

from sglang_batch.config import DENSE_ORDERS, ORDERS, PAGED_ORDERS, POLICIES
from sglang_batch.errors import ConfigError
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.output_lengths.estimates import Observed
from sglang_batch.planner.plan import Plan, best, make_plan
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.planner.simulator.simulator import Simulation

COST = CostModel(token_time_s=1e-5, kv_read_time_s=1e-7)


def machine(capacity: int = 100_000, cost: CostModel = COST) -> Machine:
    return Machine(cost, EngineLimits(capacity))


def observed(answers: dict[int, int]) -> Observed:
    return Observed(
        np.array(list(answers), np.int64), np.array(list(answers.values()), np.int32)
    )


def assert_is_whole(plan: Plan, requests: PlanRequests) -> None:
    n = len(requests)
    assert plan.order.dtype == np.int64
    assert sorted(plan.order.tolist()) == list(range(n))
    num_large = len(plan.too_large)
    assert plan.order[n - num_large :].tolist() == plan.too_large.tolist()
    fits = [i for i in range(n) if i not in plan.too_large]
    assert plan.fits.tolist() == fits
    assert sorted(plan.scan.requests.tolist()) == fits
    assert plan.tree.num_requests == len(plan.output_len) == len(fits)
    for moment in (plan.estimates.est_output_len, plan.estimates.est_output_len_sq):
        assert moment.shape == (len(fits),)
        assert np.all(np.isfinite(moment))
    if plan.scan.lengths is not None:
        assert plan.policy in plan.predicted
    elif plan.scan.density is None:
        assert plan.order[: len(fits)].tolist() == plan.scan.requests.tolist()
    elif plan.scan.density is not None:
        assert plan.scan.density.shape == (len(fits),)
        assert not np.any(np.isnan(plan.scan.density))
        assert 0 <= plan.scan.num_left <= len(fits)
        run = plan.predicted["dual-scan"]
        sent = plan.fits[run.admission_order]
        assert plan.order[: len(fits)].tolist() == sent.tolist()
    for run in plan.predicted.values():
        assert np.isfinite(run.seconds)
        assert run.output_tokens == plan.output_len.sum()


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_policy_plans_every_job(policy: str, job: dict[str, Any]) -> None:
    requests = make_requests(**job)
    plan = make_plan(requests, machine(2_000), policy)
    assert_is_whole(plan, requests)
    assert plan.policy == policy if policy != "auto" else plan.policy in ORDERS
    again = make_plan(requests, machine(2_000), policy)
    assert again.order.tolist() == plan.order.tolist()


def test_no_requests() -> None:
    plan = make_plan(make_requests([]), machine())
    assert plan.order.tolist() == plan.too_large.tolist() == []
    assert {run.seconds for run in plan.predicted.values()} == {0.0}
    assert plan.bounds(machine()).tightest_s == 0.0


@pytest.mark.parametrize("capacity", [2**31 - 1, 2**31, 10**12])
def test_any_amount_of_room(capacity: int) -> None:
    requests = make_requests(EDGE_PROMPTS["mixed"])
    assert_is_whole(make_plan(requests, machine(capacity)), requests)


# --- What fits.


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_cannot_fit_come_last(policy: str) -> None:
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
    plan = make_plan(requests, machine(100), policy)
    assert_is_whole(plan, requests)
    assert plan.too_large.tolist() == [0, 1, 3]
    assert plan.fits.tolist() == [2, 4, 5]
    # Drawn lengths leave room for the prompt.
    assert plan.output_len.tolist()[:2] == [1, 40]
    assert np.all(np.add(plan.output_len, [99, 60, 10]) <= 100)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_fits(policy: str) -> None:
    requests = make_requests([(1,) * 200, (2,) * 300])
    plan = make_plan(requests, machine(100), policy)
    assert_is_whole(plan, requests)
    assert plan.too_large.tolist() == [0, 1]


def test_plans_of_what_fits_are_those_of_a_job_without_the_rest() -> None:
    prompts = [(i % 3,) * 5 + (i,) for i in range(12)]
    large = [(9,) * 500, *prompts[:6], (8,) * 500, *prompts[6:]]
    place = [*range(1, 7), *range(8, 14)]
    for policy in POLICIES:
        alone = make_plan(make_requests(prompts), machine(400), policy)
        plan = make_plan(make_requests(large), machine(400), policy)
        assert plan.policy == alone.policy
        assert plan.order.tolist() == [*(place[i] for i in alone.order), 0, 7]
        assert plan.scan.requests.tolist() == [place[i] for i in alone.scan.requests]


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
    ("dense", "orders"), [(False, PAGED_ORDERS), (True, DENSE_ORDERS)]
)
def test_auto_takes_the_fastest(
    capacity: int, dense: bool, orders: tuple[str, ...]
) -> None:
    engine = machine(capacity)
    if dense:
        limits = replace(engine.limits, dense=True)
        engine = Machine(replace(engine.cost, padded=True), limits)
    plan = make_plan(bimodal(), engine)
    assert set(plan.predicted) == set(orders)
    seconds = {name: run.seconds for name, run in plan.predicted.items()}
    good = [name for name in orders if seconds[name] <= 1.002 * min(seconds.values())]
    assert plan.policy == good[0]
    same = make_plan(bimodal(), engine, plan.policy)
    assert same.order.tolist() == plan.order.tolist()


def test_a_followed_order_is_simulated_only_to_compare() -> None:
    requests, here = bimodal(), machine(800)
    assert make_plan(requests, here, "dfs").predicted == {}
    assert set(make_plan(requests, here, "dual-scan").predicted) == {"dual-scan"}
    plan = make_plan(requests, here, "dfs", compare=("fcfs", "dfs", "fcfs"))
    assert (plan.policy, set(plan.predicted)) == ("dfs", {"fcfs", "dfs"})
    auto = make_plan(requests, here, compare=("lpt",))
    for name, run in plan.predicted.items():
        assert run.seconds == auto.predicted[name].seconds


def test_an_unknown_policy_is_named() -> None:
    for bad in ({"policy": "best"}, {"policy": "dfs", "compare": ("best",)}):
        with pytest.raises(ConfigError, match="policy='best' is not known"):
            make_plan(bimodal(), machine(), **bad)


def test_the_seed_makes_the_random_lengths_and_the_random_order() -> None:
    requests = make_requests([(i,) * 5 for i in range(40)])
    plans = [
        make_plan(requests, machine(), "random", settings=OrderSettings(seed))
        for seed in (0, 0, 1)
    ]
    orders = [plan.order.tolist() for plan in plans]
    lengths = [plan.output_len.tolist() for plan in plans]
    assert orders[0] == orders[1] != orders[2]
    assert lengths[0] == lengths[1] != lengths[2]


# --- Observed answers.


def test_observed_answers_make_the_estimates() -> None:
    prompts = [(1,) * 20 + (i,) for i in range(50, 70)]
    prompts += [(2,) * 20 + (i,) for i in range(50, 70)]
    requests = make_requests(prompts)
    blind = make_plan(requests, machine(), "lpt")
    assert set(blind.estimates.est_output_len.tolist()) == {256.0}
    answers = {**dict.fromkeys(range(16), 4), **dict.fromkeys(range(20, 36), 700)}
    plan = make_plan(requests, machine(), "lpt", observed=observed(answers))
    estimate = plan.estimates.est_output_len
    assert estimate[:16].tolist() == [4.0] * 16
    assert estimate[20:36].tolist() == [700.0] * 16
    assert np.all(estimate[16:20] < 100)
    assert np.all(estimate[36:40] > 500)
    assert set(plan.order[:20].tolist()) == set(range(20, 40))
    assert plan.output_len[:16].tolist() == [4] * 16
    assert plan.output_len[20:36].tolist() == [700] * 16


def test_observed_answers_are_those_of_the_jobs_numbers() -> None:
    # Request 0 does not fit: the others are numbered anew inside.
    requests = make_requests([(1,) * 300, (2,), (3,), (4,)])
    answers = observed({0: 50, 3: 9})
    plan = make_plan(requests, machine(200), "fcfs", observed=answers)
    assert plan.too_large.tolist() == [0]
    assert plan.estimates.est_output_len[2] == 9.0
    assert plan.output_len[2] == 9


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("answers", [{}, {0: 0}, {0: 0, 5: 2000, 7: 1}])
def test_any_observed_answers(policy: str, answers: dict[int, int]) -> None:
    requests = make_requests(EDGE_PROMPTS["mixed"])
    plan = make_plan(requests, machine(2_100), policy, observed=observed(answers))
    assert_is_whole(plan, requests)
    for request, length in answers.items():
        assert plan.estimates.est_output_len[request] == length


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
    here = machine(needed + spare, cost)
    plan = make_plan(requests, here, settings=OrderSettings(seed))
    assert_is_whole(plan, requests)
    bounds = plan.bounds(here)
    for name, run in plan.predicted.items():
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
