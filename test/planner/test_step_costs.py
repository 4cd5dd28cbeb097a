"""Tables of steps, and the simulator that times its steps by them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from sim_jobs import build

from sglang_batch.planner.costs.bounds import lower_bounds
from sglang_batch.planner.costs.cost_model import (
    HEAD_MEMORY,
    MEMORY,
    OTHER,
    CostModel,
    StepExtras,
    linear_table,
    matrix_seconds,
)
from sglang_batch.planner.costs.hardware import Parallelism, hardware
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.costs.step_costs import StepWork, step_costs, step_seconds
from sglang_batch.planner.machine_model import EngineLimits
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.simulator.simulator import Simulation, simulate
from sglang_batch.prediction.models import MODELS

LLAMA = ModelSpec.from_hf_config(MODELS["llama-3.1-8b"])
H100 = hardware("h100")


def looked_up(cost: CostModel, tokens: int, rows: int) -> float:
    return sum(matrix_seconds(cost.step_table, tokens, rows))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-r1"])
@pytest.mark.parametrize("tokens", [1, 17, 64, 500, 4096, 20_000])
def test_the_table_has_the_operators_times(name: str, tokens: int) -> None:
    spec = ModelSpec.from_hf_config(MODELS[name])
    parallel = Parallelism(tp=4)
    cost = step_costs(spec, H100, parallel)
    exact = step_seconds(spec, H100, parallel, StepWork.of(tokens, min(tokens, 40)))
    # Between two columns a new wave may begin.
    assert looked_up(cost, tokens, min(tokens, 40)) == pytest.approx(
        float(exact.total_s), rel=0.03
    )


def test_stages_work_on_micro_batches_at_the_same_time() -> None:
    cost = step_costs(LLAMA, H100, Parallelism(pp=4))
    exact = step_seconds(LLAMA, H100, Parallelism(pp=4), StepWork.of(1000, 10))
    assert looked_up(cost, 4000, 40) == pytest.approx(float(exact.total_s), rel=0.03)
    alone = step_costs(LLAMA, H100, Parallelism())
    assert cost.kv_read_time_s == pytest.approx(alone.kv_read_time_s / 4)
    assert cost.attention_time_s == pytest.approx(alone.attention_time_s / 4)


def test_linear_costs_of_the_paper_are_a_table_as_well() -> None:
    cost = CostModel(token_time_s=3.0, kv_read_time_s=1.0, weight_read_time_s=5.0)
    np.testing.assert_array_equal(cost.step_table, linear_table(3.0, 5.0))
    assert looked_up(cost, 7, 2) == 7 * 3 + 5


def run(cost: CostModel, output: int = 4) -> Simulation:
    """Three requests of three tokens that share one of them, all known to be as long."""
    tree = build([(1, 2, 3), (1, 4, 5), (1, 6, 7)])
    return simulate(
        tree,
        cost,
        EngineLimits(1000, step_tokens=100),
        order=Order(np.arange(3)),
        output_len=np.full(3, output, np.int32),
    )


def test_steps_are_timed_by_the_table() -> None:
    table = linear_table(0.0, 0.0)
    plain = CostModel(token_time_s=0.0, kv_read_time_s=0.0, table=table)
    assert run(plain).seconds == 0
    table[OTHER] = 2.0
    assert run(plain).seconds == 2 * run(plain).num_steps
    table[OTHER] = 0.0
    table[HEAD_MEMORY] = 0.0, 1.0
    # A row of logits for each prompt, and for each token of the textbook engine.
    assert run(plain).seconds == 3 + 3 * 4


def test_what_an_engine_spends_besides_is_added() -> None:
    free = CostModel(token_time_s=0.0, kv_read_time_s=0.0)

    def seconds(extras: StepExtras) -> float:
        return run(replace(free, extras=extras)).seconds

    assert seconds(StepExtras(prompt_step_s=1.0)) == 1
    assert seconds(StepExtras(prompt_s=1.0)) == 3
    assert seconds(StepExtras(decode_s=1.0)) == 12
    assert seconds(StepExtras(mixed_decode_s=1.0)) == 0
    # Up to here, a prompt has three tokens, whether or not the first is in the cache.
    assert seconds(StepExtras(prompt_context_s=1.0)) == 9
    assert seconds(StepExtras(prompt_square_s=1.0)) == 27
    assert seconds(StepExtras(request_s=1.0)) == 3
    assert seconds(StepExtras(after_prompts_s=1.0)) == 1


def test_no_simulated_job_beats_the_bounds() -> None:
    cost = step_costs(LLAMA, H100, Parallelism())
    tree = build([(1, 2, 3), (1, 4, 5), (1, 6, 7)])
    output_len = np.full(3, 50, np.int32)
    bounds = lower_bounds(tree, cost, output_len, 1000, as_sglang=False)
    found = run(cost, 50).seconds
    assert bounds.tightest_s <= found <= 1.2 * bounds.tightest_s
    # Steps that read the weights: the critical path decides.
    assert bounds.critical_path_s == bounds.tightest_s


def test_experts_and_byte_widths_reach_the_plan() -> None:
    """Of a mixture's fp8 weights a step of few tokens reads half as much, and fewer."""
    qwen = MODELS["qwen3-30b-a3b"]
    wide = step_costs(ModelSpec.from_hf_config(qwen), H100, Parallelism())
    fp8 = ModelSpec.from_hf_config(qwen, quantization="fp8", kv_dtype="fp8_e4m3")
    narrow = step_costs(fp8, H100, Parallelism())
    assert narrow.kv_read_time_s == pytest.approx(wide.kv_read_time_s / 2)
    memory = wide.step_table[MEMORY]
    assert memory[1] < 0.25 * memory[64]
    assert narrow.step_table[MEMORY][64] == pytest.approx(memory[64] / 2, rel=0.1)


def test_light_tokens_take_little_longer_than_one() -> None:
    cost = CostModel(token_time_s=1.0, kv_read_time_s=1.0, weight_read_time_s=29.0)
    limited = replace(cost, interference_exponent=1.0)
    assert [limited.light_tokens(x) for x in (1.0, 4 / 3, 2.0)] == [1, 11, 31]
    # Reads hide arithmetic, up to as many tokens as take as long.
    assert replace(cost, interference_exponent=math.inf).light_tokens(4 / 3) == 38
    assert replace(limited, weight_read_time_s=0.0).light_tokens(4 / 3) == 1
