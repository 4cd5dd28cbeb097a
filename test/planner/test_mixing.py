"""When prompts and decodes have steps of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sim_jobs import build

from sglang_batch.planner.costs.cost_model import (
    ALWAYS_MIXED,
    COMPUTE,
    MEMORY,
    OTHER,
    TOKENS,
    CostModel,
    MixingCost,
    StepExtras,
    mixing_loss_s,
)
from sglang_batch.planner.costs.hardware import Parallelism, hardware
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.costs.step_costs import step_costs
from sglang_batch.planner.machine_model import EngineLimits
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.simulator.simulator import Simulation, simulate
from sglang_batch.prediction.models import MODELS

LLAMA = step_costs(
    ModelSpec.from_hf_config(MODELS["llama-3.1-8b"]), hardware("h100"), Parallelism()
)
# A row takes 1 ms more in a step with prompts.
SLOW = replace(LLAMA, extras=StepExtras(decode_s=1e-4, mixed_decode_s=1.1e-3))


def mixing(cost: CostModel) -> MixingCost:
    found = MixingCost.of(cost)
    assert found is not None
    return found


def seconds(cost: CostModel, tokens: float) -> float:
    table = cost.step_table
    return float(np.interp(tokens, table[TOKENS], table[COMPUTE] + table[MEMORY]))


def test_by_datasheet_mixing_never_loses() -> None:
    assert MixingCost.of(LLAMA) is None
    assert mixing_loss_s(ALWAYS_MIXED, 1000.0, 100.0, 1e5) == 0


@pytest.mark.parametrize(("prompt", "decodes"), [(512, 4), (4096, 256), (1, 1)])
def test_it_saves_a_step_and_a_pass_over_the_weights(prompt: int, decodes: int) -> None:
    apart = seconds(LLAMA, prompt) + seconds(LLAMA, decodes)
    saved = apart - seconds(LLAMA, prompt + decodes)
    step_s = float(np.interp(1.0, LLAMA.step_table[TOKENS], LLAMA.step_table[OTHER]))
    loss = mixing_loss_s(mixing(SLOW), prompt, decodes, 0.0)
    assert loss == pytest.approx(decodes * 1e-3 - step_s - saved, rel=0.1, abs=3e-4)


def test_few_decodes_are_mixed_and_many_are_not() -> None:
    cost = mixing(SLOW)
    assert mixing_loss_s(cost, 512.0, 2.0, 2000.0) < 0
    assert mixing_loss_s(cost, 512.0, 200.0, 2e5) > 0


def test_slow_reads_of_kv_count_as_well() -> None:
    extras = StepExtras(mixed_kv_token_s=1e-6)
    cost = mixing(replace(LLAMA, extras=extras))
    assert mixing_loss_s(cost, 512.0, 8.0, 1000.0) < 0
    assert mixing_loss_s(cost, 512.0, 8.0, 1e6) > 0


def test_squares_of_kv_count_where_attention_is_computed_anew() -> None:
    cost = mixing(replace(LLAMA, extras=StepExtras(mixed_square_s=1e-8)))
    few = mixing_loss_s(cost, 512.0, 8.0, 8 * 100.0)
    long = mixing_loss_s(cost, 512.0, 8.0, 8 * 4000.0)
    assert few < 0 < long
    assert long - few == pytest.approx(8 * 1e-8 * (4000.0**2 - 100.0**2))


def test_a_simulated_step_takes_the_smaller_of_both() -> None:
    """However slow rows are in mixed steps, a job never takes longer than apart."""

    def run(extra_s: float) -> Simulation:
        extras = StepExtras(mixed_decode_s=extra_s)
        return simulate(
            build([(i, 2, 3, 4, 5, 6) for i in range(12)]),
            replace(LLAMA, extras=extras),
            EngineLimits(60, step_tokens=12, as_sglang=True),
            order=Order(np.arange(12)),
            output_len=np.full(12, 6, np.int32),
        )

    plain, slow, slower = (run(extra).seconds for extra in (0.0, 0.1, 10.0))
    assert plain < slow == pytest.approx(slower)
    # At most one more step for each.
    assert slow < 2 * plain


def costs(row: int, values: tuple[float, float], **others: Any) -> CostModel:
    """Steps take ``values`` of 0 tokens and of 1, in one row of the table."""
    table = np.zeros((6, 2))
    table[TOKENS] = 0.0, 1.0
    table[row] = values
    fields = {"token_time_s": 0.0, "kv_read_time_s": 0.0, **others}
    return CostModel(table=table, **fields)


def test_a_simulated_prompt_is_computed_to_its_end_before_rows_decode_again() -> None:
    """As in the engine: see StepsApart."""

    def seconds(extra_s: float) -> float:
        return simulate(
            build([(1, 2, 3, 4), tuple(range(10, 50))]),
            costs(OTHER, (1.0, 1.0), extras=StepExtras(mixed_decode_s=extra_s)),
            EngineLimits(1000, step_tokens=10, as_sglang=True),
            order=Order(np.arange(2)),
            output_len=np.array([12, 3], np.int32),
        ).seconds

    # Ten tokens in the first step: four, and six of the long prompt. The other 34 take four
    # steps, in which the first request decodes as well, or not.
    assert seconds(1e3) == seconds(0.0) + 4


def test_simulated_prompts_that_decodes_wait_for_are_computed_whole() -> None:
    """As the dual scanner has it in the engine, however small its budgets are."""
    prompts = [(i,) * 40 for i in range(10)] + [(50 + i,) * 4 for i in range(30)]

    def num_steps(extra_s: float) -> int:
        return simulate(
            build(prompts),
            costs(
                COMPUTE,
                (0.0, 1.0),
                token_time_s=1.0,
                kv_read_time_s=0.05,
                extras=StepExtras(mixed_decode_s=extra_s),
            ),
            EngineLimits(400, step_tokens=200, as_sglang=True),
            order=Order(np.arange(40), np.array([20.0] * 10 + [0.5] * 30), 10),
            output_len=np.array([2] * 10 + [40] * 30, np.int32),
        ).num_steps

    mixed, apart = num_steps(0.0), num_steps(1e3)
    # Each prompt takes one step more at most.
    assert mixed < apart <= mixed + len(prompts)
