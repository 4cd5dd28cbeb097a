"""Throughput in closed form, by hand and against the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_batch.planner.choosing.steady_state import (
    RequestMix,
    rank_kv_tokens,
    steady_state,
)
from sglang_batch.planner.costs.hardware import (
    Efficiency,
    HardwareSpec,
    Parallelism,
    hardware,
)
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.costs.step_costs import StepWork, step_costs, step_seconds
from sglang_batch.planner.machine_model import EngineLimits
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.simulator.simulator import simulate
from sglang_batch.prediction.models import MODELS

LLAMA = ModelSpec.from_hf_config(MODELS["llama-3.1-8b"])
H100 = hardware("h100")


def unshared(input_len: int, output_len: int) -> RequestMix:
    return RequestMix(input_len, output_len, input_len, input_len + output_len / 2)


def test_a_step_begins_as_many_requests_as_end() -> None:
    mix = unshared(100, 50)
    found = steady_state(LLAMA, H100, Parallelism(), mix, max_rows=200)
    assert found.rows == 200
    work = StepWork.of(
        200 + 4 * 100,
        204,
        decodes=200,
        prompt_pairs=4 * 100**2 / 2,
        kv_tokens=200 * 125,
    )
    step = step_seconds(LLAMA, H100, Parallelism(), work)
    assert found.requests_per_s == pytest.approx(4 / float(step.total_s))


def test_rows_are_limited_by_kv_and_by_the_tokens_of_a_step() -> None:
    long = unshared(20_000, 2_000)
    held = rank_kv_tokens(LLAMA, H100, Parallelism())
    found = steady_state(LLAMA, H100, Parallelism(), long)
    assert found.rows == pytest.approx(held / 21_000)
    prompts = unshared(1000, 10)
    found = steady_state(LLAMA, H100, Parallelism(), prompts, step_tokens=2020)
    assert found.rows == pytest.approx(20)


def test_shared_tokens_are_neither_computed_nor_held_twice() -> None:
    alone = steady_state(LLAMA, H100, Parallelism(), unshared(4000, 100))
    shared = steady_state(
        LLAMA, H100, Parallelism(), RequestMix(4000, 100, computed=1000, held=1050)
    )
    assert shared.requests_per_s > 2 * alone.requests_per_s


def test_replicas_add_up() -> None:
    mix = unshared(500, 500)
    one = steady_state(LLAMA, H100, Parallelism(), mix)
    four = steady_state(LLAMA, H100, Parallelism(replicas=4), mix)
    assert four.requests_per_s == pytest.approx(4 * one.requests_per_s)


@pytest.mark.parametrize(
    "parallel", [Parallelism(), Parallelism(tp=2), Parallelism(pp=2)], ids=str
)
def test_the_simulator_agrees(parallel: Parallelism) -> None:
    """Of a long job, apart from its beginning and its end."""
    device = HardwareSpec(
        "small", 100e12, 1e12, 80 << 30, link_bytes_per_s=50e9,
        efficiency=Efficiency(0.7, 0.8, 3e-6, 1e-3),
    )  # fmt: skip
    mix = unshared(200, 100)
    capacity = rank_kv_tokens(LLAMA, device, parallel)
    rows, n = 400, 12_000
    expected = steady_state(LLAMA, device, parallel, mix, max_rows=rows)
    # Requests of one length would all begin in the same steps.
    output_len = np.random.default_rng(0).integers(50, 151, n).astype(np.int32)
    tokens = np.arange(n * 200, dtype=np.int32)
    tree = build_prefix_tree(tokens, np.arange(n + 1, dtype=np.int64) * 200)
    found = simulate(
        tree,
        step_costs(LLAMA, device, parallel),
        EngineLimits(capacity, step_tokens=8192, max_running=rows),
        order=Order(np.arange(n)),
        output_len=output_len,
    )
    assert n / found.seconds == pytest.approx(expected.requests_per_s, rel=0.04)
