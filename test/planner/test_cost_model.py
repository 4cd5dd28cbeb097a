"""The cost model against the paper's worked examples, and its laws."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.errors import ConfigError
from sglang_batch.planner.costs.cost_model import (
    CostModel,
    ModelSpec,
    compute_density,
    kv_capacity_tokens,
    overlapped,
)
from sglang_batch.planner.costs.hardware import GIB, hardware

# Llama-3.1-8B on an A100 80GB SXM with the paper's rounding.
LLAMA_8B = ModelSpec(
    num_params=8_000_000_000,
    num_active_params=8_000_000_000,
    num_layers=32,
    hidden=4096,
    kv_bytes_per_token=131072,
    weight_bytes=16_000_000_000,
    kv_shards=8,
)
A100 = hardware("a100-sxm-80gb")
PAPER = CostModel.of(LLAMA_8B, A100)

times = st.one_of(st.just(0.0), st.floats(1e-12, 1e12))
exponents = st.one_of(st.floats(1, 1e4), st.just(math.inf))
lengths = st.integers(0, 200_000)


def density(input_len: float, output_len: float, cost: CostModel = PAPER) -> float:
    compute = cost.compute_time_s(input_len, output_len)
    return float(compute_density(compute, cost.memory_time_s(input_len, output_len)))


def test_constants_of_the_papers_example() -> None:
    assert PAPER.token_time_s == 2 * 8e9 / 312e12
    assert PAPER.kv_read_time_s == 131072 / 2.039e12
    assert (PAPER.attention_time_s, PAPER.weight_read_time_s) == (0.0, 0.0)
    raw = CostModel(token_time_s=16e9 / 312e12, kv_read_time_s=131072 / 2.039e12)
    assert raw == PAPER


def test_densities_of_the_papers_example() -> None:
    assert round(density(512, 256), 3) == 3.740
    assert round(density(256, 16384), 4) == 0.0959


# Average input, output, sharing, density (1 - s) * Comp / Mem, and E[p*d] + E[d^2] / 2.
TRACES = {
    "burstgpt": (244, 27, 0.02, 17.78, 11_916),
    "azure": (2508, 23, 0.01, 33.2, 60_209),
    "wildchat": (496, 256, 0.19, 2.13, 228_137),
    "openvid": (121, 16_384, 0.00, 0.05, 2.633e8),
    "mmlu": (804, 2, 0.8646, 54.91, 1_586),
}


@pytest.mark.parametrize("name", TRACES)
def test_densities_of_the_papers_traces(name: str) -> None:
    p, d, sharing, expected, reads = TRACES[name]
    memory = PAPER.memory_time_s(p, d, 2 * (reads - p * d))
    rho = (1 - sharing) * compute_density(PAPER.compute_time_s(p, d), memory)
    assert float(rho) == pytest.approx(expected, rel=0.01)


def test_a_group_of_equal_requests_keeps_its_raw_density_less_the_sharing() -> None:
    assert (1 - 0.8646) * density(804, 2) == pytest.approx(54.1, abs=0.05)


def test_times_of_the_papers_first_trace() -> None:
    count = np.array([326_634, 196, 73_168])
    names = ("burstgpt", "openvid", "mmlu")
    p, d, _, _, reads = np.array([TRACES[name] for name in names]).T
    compute = (count * PAPER.compute_time_s(p, d)).sum()
    memory = (count * PAPER.memory_time_s(p, d, 2 * (reads - p * d))).sum()
    assert (1 - 0.35) * compute == pytest.approx(5025, abs=1)
    assert memory == pytest.approx(3589, rel=0.005)
    assert (1 - 0.35) * compute / memory == pytest.approx(1.4, abs=0.01)
    ideal = CostModel(token_time_s=0, kv_read_time_s=0, interference_exponent=math.inf)
    total = CostModel(token_time_s=0, kv_read_time_s=0, interference_exponent=1)
    spent = (1 - 0.35) * compute, memory
    assert ideal.step_time_s(*spent) / 3600 == pytest.approx(1.40, abs=0.005)
    assert total.step_time_s(*spent) / 3600 == pytest.approx(2.39, abs=0.005)


def test_attention_reads_per_layer_of_the_published_version() -> None:
    # 512 to 1024 requests of 1024 tokens: ms per layer at the rate behind its Table 1.
    cost = CostModel.of(LLAMA_8B, hardware("a100", bandwidth_bytes_per_s=1.733e12))
    requests = np.array([512, 768, 1024])
    per_layer_ms = requests * 1024 * cost.kv_read_time_s / 32 * 1e3
    assert per_layer_ms == pytest.approx([1.239, 1.859, 2.478], abs=0.001)


def test_attention_and_weights_are_counted_on_request() -> None:
    cost = CostModel.of(LLAMA_8B, A100, attention_flops=True, weight_reads=True)
    assert cost.attention_time_s == 4 * 4096 * 32 / 312e12
    assert cost.weight_read_time_s == 16e9 / 2.039e12
    extra = cost.compute_time_s(1000, 10) - PAPER.compute_time_s(1000, 10)
    assert extra == pytest.approx(1000**2 * 4 * 4096 * 32 / 312e12)
    assert cost.memory_time_s(1000, 10) == PAPER.memory_time_s(1000, 10)


def test_only_active_parameters_compute() -> None:
    half = ModelSpec(8, 4, 1, 1, 1, 16)
    cost = CostModel.of(half, A100, weight_reads=True)
    assert cost.token_time_s == 8 / 312e12
    assert cost.weight_read_time_s == 16 / 2.039e12


def test_fp8_speeds_up_matrices_not_attention() -> None:
    h200 = hardware("h200")
    plain = CostModel.of(LLAMA_8B, h200, attention_flops=True)
    fp8 = CostModel.of(LLAMA_8B, h200, attention_flops=True, fp8=True)
    assert fp8.token_time_s == 16e9 / 1979e12
    assert fp8.attention_time_s == plain.attention_time_s
    with pytest.raises(ConfigError, match="a100-sxm-80gb has no fp8_flops"):
        CostModel.of(LLAMA_8B, A100, fp8=True)


def test_lengths_are_squared_in_floating_point() -> None:
    cost = CostModel.of(LLAMA_8B, A100, attention_flops=True)
    long = np.array([131_072], dtype=np.int32)
    assert cost.compute_time_s(long, long)[0] == cost.compute_time_s(131_072, 131_072)
    assert cost.memory_time_s(long, long)[0] == pytest.approx(
        1.5 * 131_072**2 * 131072 / 2.039e12
    )
    assert cost.prefill_time_s(long, long)[0] == pytest.approx(
        131_072 * cost.token_time_s + 3 * 131_072**2 * cost.attention_time_s
    )


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8))
def test_chunks_of_a_prefill_add_up_to_the_whole(chunks: list[int]) -> None:
    cost = CostModel.of(LLAMA_8B, A100, attention_flops=True)
    new = np.array(chunks)
    prefix = np.cumsum(new) - new
    assert cost.prefill_time_s(new, prefix).sum() == pytest.approx(
        float(cost.compute_time_s(sum(chunks), 0))
    )


@settings(deadline=None, max_examples=examples(100))
@given(lengths, lengths, st.sampled_from([2, 4, 8]), st.booleans())
def test_tensor_parallelism_leaves_the_density(
    input_len: int, output_len: int, tp: int, attention_flops: bool
) -> None:
    one = CostModel.of(LLAMA_8B, A100, attention_flops=attention_flops)
    many = CostModel.of(LLAMA_8B, A100, attention_flops=attention_flops, tp=tp)
    assert density(input_len, output_len, many) == pytest.approx(
        density(input_len, output_len, one)
    )
    assert many.compute_time_s(input_len, output_len) == pytest.approx(
        one.compute_time_s(input_len, output_len) / tp
    )


def test_devices_beyond_the_kv_heads_read_copies() -> None:
    eight, sixteen = (CostModel.of(LLAMA_8B, A100, tp=tp) for tp in (8, 16))
    assert sixteen.kv_read_time_s == eight.kv_read_time_s == PAPER.kv_read_time_s / 8
    assert sixteen.token_time_s == PAPER.token_time_s / 16


def test_density_where_nothing_is_read_or_done() -> None:
    compute = np.array([1.0, 0.0, 0.0, 1e300])
    memory = np.array([0.0, 0.0, 1.0, 1e-300])
    assert compute_density(compute, memory).tolist() == [math.inf, 1.0, 0.0, math.inf]
    assert compute_density(0.0, 0.0) == 1.0
    assert density(100, 0) == math.inf


@settings(deadline=None, max_examples=examples(300))
@given(times, times, exponents, exponents)
def test_overlap_lies_between_maximum_and_sum_and_falls_with_the_exponent(
    compute: float, memory: float, a: float, b: float
) -> None:
    low, high = min(a, b), max(a, b)
    more, less = overlapped(compute, memory, low), overlapped(compute, memory, high)
    rounding = 1 + 1e-12
    assert max(compute, memory) <= less <= more * rounding
    assert more <= (compute + memory) * rounding
    assert overlapped(memory, compute, low) == more


@settings(deadline=None, max_examples=examples(300))
@given(times, times, exponents, st.floats(1e-6, 1e6))
def test_overlap_scales_with_its_times(
    compute: float, memory: float, k: float, factor: float
) -> None:
    assert overlapped(factor * compute, factor * memory, k) == pytest.approx(
        factor * overlapped(compute, memory, k), rel=1e-9
    )


def test_overlap_at_its_ends() -> None:
    assert overlapped(3.0, 4.0, 1.0) == 7.0
    assert overlapped(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert overlapped(3.0, 4.0, math.inf) == 4.0
    assert overlapped(1e-300, 4e-300, 500.0) == pytest.approx(4e-300)
    for k in (1.0, 1.47, 1e6, math.inf):
        assert overlapped(0.0, 0.0, k) == 0.0
        assert overlapped(0.0, 2.0, k) == overlapped(2.0, 0.0, k) == 2.0
        assert overlapped(math.inf, math.inf, k) == math.inf
    # Perfect blending against none at the paper's densities: its Fig. 9 has 1.2257.
    gains = [(rho + 1) / overlapped(rho, 1.0, 1.47) for rho in (0.8, 1.0, 1.2, 1.4)]
    assert all(1.23 < gain < 1.26 for gain in gains)


def test_steps_of_arrays_numbers_and_both() -> None:
    memory = np.array([[0.0, 1.0], [2.0, 3.0]])
    steps = PAPER.step_time_s(memory.T, memory)
    assert steps.shape == (2, 2)
    assert steps[0, 1] == overlapped(2.0, 1.0, 1.47)
    assert PAPER.step_time_s(1.0, memory)[1, 1] == overlapped(1.0, 3.0, 1.47)
    assert float(PAPER.step_time_s(1.0, 2.0)) == overlapped(1.0, 2.0, 1.47)
    assert PAPER.step_time_s(np.empty(0), np.empty(0)).shape == (0,)


def test_capacity_is_what_the_weights_leave() -> None:
    # The paper's 80 - 20 GB, with its gigabytes.
    gb80 = replace(A100, memory_bytes=80_000_000_000)
    gb76 = replace(A100, memory_bytes=76_000_000_000)
    sixty = kv_capacity_tokens(LLAMA_8B, gb76, 1, 1.0)
    assert sixty == 60_000_000_000 // 131072
    two = kv_capacity_tokens(LLAMA_8B, gb80, tp=2, mem_fraction=0.5)
    assert two == 64_000_000_000 // 131072
    usable = 80 * GIB * 0.9 - 16e9
    assert kv_capacity_tokens(LLAMA_8B, A100) == math.floor(usable / 131072)
    # Sixteen devices hold the eight KV heads twice.
    sixteen = kv_capacity_tokens(LLAMA_8B, gb80, 16, 1.0)
    assert sixteen == math.floor((16 * 80e9 - 16e9) / (2 * 131072))


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    big = ModelSpec(70_553_706_496, 70_553_706_496, 80, 8192, 327680, 141_107_412_992)
    with pytest.raises(ConfigError, match=r"take 141\.1 GB .* 77\.3 GB usable of a100"):
        kv_capacity_tokens(big, A100)
    assert kv_capacity_tokens(big, A100, tp=4) > 0
    with pytest.raises(ConfigError, match=r"mem_fraction=1\.5"):
        kv_capacity_tokens(LLAMA_8B, A100, mem_fraction=1.5)
    with pytest.raises(ConfigError, match="tp=0"):
        kv_capacity_tokens(LLAMA_8B, A100, tp=0)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["token_time_s", "kv_read_time_s"])
def test_times_are_checked(name: str, value: float) -> None:
    figures = {"token_time_s": 1.0, "kv_read_time_s": 1.0, name: value}
    with pytest.raises(ConfigError, match=f"{name}="):
        CostModel(**figures)


@pytest.mark.parametrize("exponent", [0.5, math.nan])
def test_the_exponent_is_checked(exponent: float) -> None:
    with pytest.raises(ConfigError, match="interference_exponent="):
        CostModel.of(LLAMA_8B, A100, interference_exponent=exponent)
