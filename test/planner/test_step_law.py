"""Costs fitted to the seconds of steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sim_jobs import build

from sglang_batch.planner.costs.cost_model import OTHER, CostModel, StepExtras
from sglang_batch.planner.costs.hardware import Parallelism, hardware
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.costs.step_costs import step_costs
from sglang_batch.planner.costs.step_law import MIN_SAMPLES, StepLaw, fit_step_law
from sglang_batch.planner.machine_model import EngineLimits
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.requests import Floats
from sglang_batch.planner.simulator.simulator import simulate
from sglang_batch.prediction.models import MODELS

LLAMA = ModelSpec.from_hf_config(MODELS["llama-3.1-8b"])
NOMINAL = step_costs(LLAMA, hardware("h100"), Parallelism())
TRUE = StepLaw(
    factors=(1.6, 1.2, 2.0, 1.4),
    fixed_s=4e-3,
    extras=StepExtras(1e-3, 2e-4, 1e-5, 3e-5, request_s=4e-4, after_prompts_s=5e-4),
    exponent=1.0,
    noise=0.0,
    num_samples=0,
)


def steps(n: int = 400, seed: int = 0) -> Floats:
    """Steps of all kinds without their seconds, float64 ``[n, 10]``."""
    rng = np.random.default_rng(seed)
    prompts = np.where(rng.random(n) < 0.6, rng.integers(1, 9, n), 0)
    tokens = np.where(prompts, rng.integers(1, 500, n) * prompts, 0)
    decodes = np.where(rng.random(n) < 0.85, rng.integers(1, 300, n), 0)
    decodes = np.where(tokens + decodes == 0, 5, decodes)
    before = np.where(prompts, rng.integers(0, 4000, n), 0)
    attended = tokens * (2 * before + tokens)
    context = np.where(prompts, before + tokens, 0)
    kv = decodes * rng.integers(100, 3000, n)
    requests = rng.integers(0, 5, n) / 2
    after_prompts = rng.integers(0, 2, n)
    columns = [np.zeros(n), tokens, prompts, decodes, attended, context, context**2]
    columns += [kv, requests, after_prompts]
    return np.stack(columns, axis=1).astype(np.float64)


def timed(found: Floats, cost: CostModel) -> Floats:
    """With the seconds of a machine with these costs."""
    table = cost.step_table
    tokens, rows = found[:, 1] + found[:, 3], found[:, 2] + found[:, 3]
    compute, memory, other = (
        np.interp(tokens, table[0], table[row]) for row in (1, 2, OTHER)
    )
    compute = compute + np.interp(rows, table[0], table[4])
    memory = memory + np.interp(rows, table[0], table[5])
    compute = compute + found[:, 4] * cost.attention_time_s
    memory = memory + found[:, 7] * cost.kv_read_time_s
    extras, prompts, decodes = cost.extras, found[:, 2], found[:, 3]
    kv = np.where(prompts > 0, found[:, 7], 0.0)
    other = other + np.where(prompts > 0, extras.prompt_step_s, 0.0)
    other = other + prompts * extras.prompt_s
    other = other + found[:, 5] * extras.prompt_context_s
    other = other + found[:, 6] * extras.prompt_square_s
    other = other + kv * extras.mixed_kv_token_s
    other = other + kv**2 / np.maximum(decodes, 1.0) * extras.mixed_square_s
    other = other + found[:, 8] * extras.request_s
    other = other + np.where(prompts > 0, 0.0, found[:, 9] * extras.after_prompts_s)
    per_decode = np.where(prompts > 0, extras.mixed_decode_s, extras.decode_s)
    seconds = cost.step_time_s(compute, memory) + other + decodes * per_decode
    return np.concatenate([seconds[:, None], found[:, 1:]], axis=1)


def predicted(law: StepLaw, found: Floats) -> Floats:
    return timed(found, law.applied(NOMINAL))[:, 0]


def test_a_machine_is_found_from_its_steps() -> None:
    found = timed(steps(), TRUE.applied(NOMINAL))
    law = fit_step_law(found, NOMINAL)
    assert law is not None
    assert law.exponent == 1
    assert law.noise < 0.01
    assert law.num_samples == 400
    other = timed(steps(seed=1), TRUE.applied(NOMINAL))
    np.testing.assert_allclose(predicted(law, other), other[:, 0], rtol=0.08)
    assert law.extras.request_s == pytest.approx(TRUE.extras.request_s, rel=0.1)
    after = law.extras.after_prompts_s
    assert after == pytest.approx(TRUE.extras.after_prompts_s, rel=0.2)
    # A dense model reads the same weights in each step: that is a fixed time as well.
    assert law.factors[0] == pytest.approx(TRUE.factors[0], rel=0.15)
    assert law.factors[3] == pytest.approx(TRUE.factors[3], rel=0.15)


def test_engines_that_compute_attention_anew_are_found() -> None:
    """As SGLang's on a CPU: of the whole prompt for each chunk, and for each mixed row."""
    extras = StepExtras(prompt_square_s=2e-9, mixed_square_s=1e-9)
    law = replace(TRUE, extras=extras)
    found = timed(steps(), law.applied(NOMINAL))
    fitted = fit_step_law(found, NOMINAL)
    assert fitted is not None
    assert fitted.extras.mixed_square_s == pytest.approx(1e-9, rel=0.15)
    other = timed(steps(seed=1), law.applied(NOMINAL))
    errors = abs(predicted(fitted, other) / other[:, 0] - 1)
    assert np.median(errors) < 0.05
    assert np.quantile(errors, 0.98) < 0.15


def test_disturbed_steps_count_less_and_the_sum_is_kept() -> None:
    found = timed(steps(), TRUE.applied(NOMINAL))
    clean = found[:, 0].copy()
    rng = np.random.default_rng(2)
    found[:, 0] *= rng.lognormal(0.0, 0.05, len(found))
    found[::37, 0] *= 8.0
    law = fit_step_law(found, NOMINAL)
    assert law is not None
    assert predicted(law, found).sum() == pytest.approx(clean.sum(), rel=0.2)
    assert np.median(abs(predicted(law, found) / clean - 1)) < 0.12


@pytest.mark.parametrize("exponent", [1.2, 1.5, 2.0])
def test_an_overlap_is_found(exponent: float) -> None:
    found = timed(steps(), replace(TRUE, exponent=exponent).applied(NOMINAL))
    law = fit_step_law(found, NOMINAL)
    assert law is not None
    assert law.exponent > 1
    np.testing.assert_allclose(predicted(law, found), found[:, 0], rtol=0.12)


def test_an_engine_without_overlap_has_none() -> None:
    found = timed(steps(), TRUE.applied(NOMINAL))
    found[:, 0] *= np.random.default_rng(3).lognormal(0.0, 0.1, len(found))
    law = fit_step_law(found, NOMINAL)
    assert law is not None
    assert law.exponent <= 1.1


def test_what_steps_say_nothing_about_is_as_slow_as_the_rest() -> None:
    found = steps()
    found[:, 1] = found[:, 2] = found[:, 4] = found[:, 5] = 0
    found[:, 3] = np.maximum(found[:, 3], 1)
    slow = StepLaw((3.0,) * 4, 0.0, StepExtras(), 1.0, 0.0, 0)
    law = fit_step_law(timed(found, slow.applied(NOMINAL)), NOMINAL)
    assert law is not None
    assert law.factors[2] == pytest.approx(3.0, rel=0.4)


def test_too_few_or_unusable_steps_give_no_law() -> None:
    found = timed(steps(MIN_SAMPLES), TRUE.applied(NOMINAL))
    assert fit_step_law(found, NOMINAL) is not None
    assert fit_step_law(found[1:], NOMINAL) is None
    found[0, 0] = np.nan
    assert fit_step_law(found, NOMINAL) is None
    assert fit_step_law(np.zeros((0, 7)), NOMINAL) is None


def test_the_same_steps_give_the_same_law() -> None:
    found = timed(steps(), TRUE.applied(NOMINAL))
    assert fit_step_law(found, NOMINAL) == fit_step_law(found, NOMINAL)


def test_a_job_is_simulated_by_its_machines_law() -> None:
    """Twice as slow in everything, a job takes twice as long."""
    double = StepLaw((2.0,) * 4, 0.0, StepExtras(), 1.0, 0.0, 0)
    plain = replace(double, factors=(1.0,) * 4)

    def seconds(law: StepLaw) -> float:
        return simulate(
            build([(1, 2, 3), (1, 4, 5)]),
            law.applied(NOMINAL),
            EngineLimits(1000),
            order=Order(np.arange(2)),
            output_len=np.full(2, 20, np.int32),
        ).seconds

    assert seconds(double) == pytest.approx(2 * seconds(plain))
