"""Seconds of operators, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang_batch.errors import ConfigError
from sglang_batch.planner.choosing.steady_state import (
    device_weight_bytes,
    rank_kv_tokens,
)
from sglang_batch.planner.costs.hardware import (
    Efficiency,
    HardwareSpec,
    Parallelism,
    hardware,
)
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.costs.step_costs import (
    Operator,
    StepWork,
    experts_used,
    operators,
    step_seconds,
)
from sglang_batch.prediction.models import MODELS

# 1 TFLOP/s, 1 TB/s, a link of 4/3 GB/s of which three quarters are reached; no idle time.
PLAIN = HardwareSpec(
    "plain",
    compute_flops=1e12,
    bandwidth_bytes_per_s=1e12,
    memory_bytes=10**12,
    fp8_flops=2e12,
    link_bytes_per_s=4e9 / 3,
    efficiency=Efficiency(1.0, 1.0, 0.0, 0.0),
)
ONE_LAYER = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "dtype": "bfloat16",
}
MIXTURE = ONE_LAYER | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def named(
    config: dict[str, object],
    work: StepWork,
    parallel: Parallelism | None = None,
    device: HardwareSpec = PLAIN,
    **options: str,
) -> dict[str, list[Operator]]:
    """The operators of a step by name."""
    found: dict[str, list[Operator]] = {}
    spec = ModelSpec.from_hf_config(config, **options)
    for each in operators(spec, device, parallel or Parallelism(), work):
        found.setdefault(each.name, []).append(each)
    return found


def test_a_matrix_takes_its_arithmetic_or_its_reads() -> None:
    qkv, out = named(ONE_LAYER, StepWork.of(10, 0))["attention matrices"]
    # 1024 inputs, and 8 + 2 + 2 heads of 128 outputs.
    assert qkv.compute_s == pytest.approx(2 * 10 * 1024 * 1536 / 1e12)
    assert qkv.memory_s == pytest.approx(
        (1024 * 1536 * 2 + 10 * (1024 + 1536) * 2) / 1e12
    )
    assert out.compute_s == pytest.approx(2 * 10 * 1024 * 1024 / 1e12)


def test_a_step_is_the_sum_of_the_longer_times() -> None:
    spec = ModelSpec.from_hf_config(ONE_LAYER)
    work = StepWork.of(np.array([1.0, 4096.0]), 1)
    parts = list(operators(spec, PLAIN, Parallelism(), work))
    longer = sum(np.maximum(each.compute_s, each.memory_s) for each in parts)
    seconds = step_seconds(spec, PLAIN, Parallelism(), work)
    np.testing.assert_allclose(seconds.total_s, longer)
    # One token reads, and thousands compute.
    assert seconds.memory_s[0] > 10 * seconds.compute_s[0]
    assert seconds.compute_s[1] > 2 * seconds.memory_s[1]


def test_the_time_of_a_product_grows_in_waves() -> None:
    waves = replace(PLAIN, num_cores=6)

    def seconds(tokens: float) -> float:
        work = StepWork.of(tokens, 0)
        return float(
            named(ONE_LAYER, work, device=waves)["attention matrices"][0].compute_s
        )

    # 1536 outputs are 6 tiles of 256: one wave for 128 tokens, and two for one more.
    full = 6 * 2 * 1024 * 128 * 256 / 1e12
    assert seconds(128) == pytest.approx(full)
    assert seconds(256) == pytest.approx(2 * full)
    # Smaller tiles waste less, and reach a lower rate.
    assert full < seconds(129) <= 2 * full
    assert seconds(128) == pytest.approx(seconds(65))


def test_the_output_matrix_counts_rows_alone() -> None:
    (head,) = named(ONE_LAYER, StepWork.of(100, 7))["output matrix"]
    assert head.compute_s == pytest.approx(2 * 7 * 1024 * 4096 / 1e12)


def test_experts_that_no_token_chose_are_not_read() -> None:
    assert experts_used(8, 2, np.array([0.0, 1.0])).tolist() == [0.0, 2.0]
    two = experts_used(8, 2, np.array([2.0]))
    assert two == pytest.approx(8 * (1 - 0.75**2))
    up, _ = named(MIXTURE, StepWork.of(2, 0))["experts"]
    weights = 1024 * 4096 * 2
    activations = 2 * 2 * (1024 + 4096) * 2
    assert up.memory_s == pytest.approx((float(two[0]) * weights + activations) / 1e12)
    assert up.compute_s == pytest.approx(2 * 2 * 2 * 1024 * 4096 / 1e12)


def test_expert_parallelism_divides_the_experts_and_not_their_matrices() -> None:
    work = StepWork.of(64, 0)
    split = named(MIXTURE, work, Parallelism(tp=4))["experts"][0]
    whole = named(MIXTURE, work, Parallelism(tp=4, ep=4))["experts"][0]
    # The same weights on each device, in other shapes.
    assert split.compute_s == pytest.approx(whole.compute_s)
    assert whole.memory_s < split.memory_s  # whose inputs are read by all


def test_all_reduces_are_never_free() -> None:
    work = StepWork.of(1000, 0)
    (alone,) = named(ONE_LAYER, work)["links"]
    assert alone.link_s == 0
    (four,) = named(ONE_LAYER, work, Parallelism(tp=4))["links"]
    sent = 2 * 3 / 4 * 1000 * 1024 * 2
    assert four.link_s == pytest.approx(2 * (sent / 1e9 + 8e-6))
    # Attention ranks do not reduce behind attention, and gather the tokens of all.
    (ranks,) = named(ONE_LAYER, work, Parallelism(tp=4, attention_ranks=4))["links"]
    assert ranks.link_s == pytest.approx(4 * sent / 1e9 + 8e-6)


def test_attention_of_prompts_and_answers() -> None:
    work = StepWork.of(10, 1, prompt_pairs=500, kv_tokens=2000)
    found = named(ONE_LAYER, work)
    assert found["attention of prompts"][0].compute_s == pytest.approx(
        4 * 1024 * 500 / 1e12
    )
    (answers,) = found["attention of answers"]
    assert answers.memory_s == pytest.approx(2000 * 2 * 2 * 128 * 2 / 1e12)
    assert answers.compute_s == pytest.approx(2000 * 4 * 1024 / 1e12)
    # Two heads of KV on four devices: each device has a copy of one.
    (spread,) = named(ONE_LAYER, work, Parallelism(tp=4))["attention of answers"]
    assert spread.memory_s == pytest.approx(float(answers.memory_s) / 2)


def test_latent_attention_computes_for_each_head_what_it_reads_once() -> None:
    work = StepWork.of(1, 1, kv_tokens=1000)
    (answers,) = named(MODELS["deepseek-r1"], work)["attention of answers"]
    assert answers.memory_s == pytest.approx(1000 * 61 * 576 * 2 / 1e12)
    assert answers.compute_s == pytest.approx(1000 * 61 * 2 * 128 * (1024 + 64) / 1e12)


def test_byte_widths_are_those_of_the_weights_and_the_kv() -> None:
    work = StepWork.of(4, 0, kv_tokens=1000)
    wide, narrow = (
        named(ONE_LAYER, work),
        named(ONE_LAYER, work, quantization="fp8", kv_dtype="fp8_e4m3"),
    )

    def reads(found: dict[str, list[Operator]], name: str) -> float:
        return float(found[name][0].memory_s)

    moved = 4 * (1024 + 1536) * 2
    name = "attention matrices"
    assert reads(narrow, name) == pytest.approx((1024 * 1536 + moved) / 1e12)
    assert reads(wide, name) == pytest.approx((2 * 1024 * 1536 + moved) / 1e12)
    assert narrow[name][0].compute_s * 2 == pytest.approx(wide[name][0].compute_s)
    name = "attention of answers"
    assert reads(narrow, name) * 2 == pytest.approx(reads(wide, name))


def test_four_bits_are_multiplied_as_such_where_the_device_can() -> None:
    work = StepWork.of(1000, 0)
    blackwell = replace(PLAIN, fp4_flops=4e12)

    def seconds(device: HardwareSpec, method: str) -> float:
        found = named(ONE_LAYER, work, device=device, quantization=method)
        return float(found["feed-forward"][0].compute_s)

    full = 2 * 1000 * 1024 * 4096 / 1e12
    assert seconds(blackwell, "modelopt_fp4") == pytest.approx(full / 4)
    assert seconds(PLAIN, "modelopt_fp4") == pytest.approx(full)
    # Weights alone have 4 bits.
    assert seconds(blackwell, "petit_nvfp4") == pytest.approx(full)


def test_states_are_read_and_written_by_every_decode() -> None:
    spec = ModelSpec.from_hf_config(MODELS["qwen3-next-80b-a3b"])
    work = StepWork.of(10, 10, decodes=10)
    (states,) = named(MODELS["qwen3-next-80b-a3b"], work)["states"]
    assert states.memory_s == pytest.approx(2 * 10 * spec.state_bytes / 1e12)


def test_starts_of_kernels_and_the_engine_take_time() -> None:
    slow = replace(PLAIN, efficiency=Efficiency(1.0, 1.0, 1e-3, 0.5))
    spec = ModelSpec.from_hf_config(ONE_LAYER)
    work = StepWork.of(1, 1)
    # 5 matrices, 7 kernels of a layer, 10 of a step.
    seconds = step_seconds(spec, slow, Parallelism(), work)
    assert seconds.other_s == pytest.approx((5 + 7 + 10) * 1e-3 + 0.5)
    # Each stage waits for the engine once in a round.
    rounds = step_seconds(spec, slow, Parallelism(pp=2), work)
    assert rounds.other_s - seconds.other_s == pytest.approx(0.5, rel=1e-4)


def test_a_model_that_was_not_counted_is_refused() -> None:
    spec = ModelSpec(10, 10, 1, 1, 1, 20)
    with pytest.raises(ConfigError, match="from_hf_config"):
        step_seconds(spec, PLAIN, Parallelism(), StepWork.of(1, 1))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_matrices_are_nearly_all_parameters(name: str) -> None:
    spec = ModelSpec.from_hf_config(MODELS[name])
    shape = spec.shape
    assert shape is not None
    inside = sum(matrix.params for matrix in (*shape.mixers, *shape.feed_forward))
    tables = 2 * shape.head.params
    # Norms, biases and what convolutions have.
    assert 0.999 < (inside + tables) / spec.num_params < 1.0005
    active = sum(
        matrix.params * (matrix.chosen / matrix.experts if matrix.experts else 1)
        for matrix in (*shape.mixers, *shape.feed_forward)
    )
    assert 0.99 < (active + tables) / spec.num_active_params < 1.0005


def test_memory_of_attention_ranks() -> None:
    spec = ModelSpec.from_hf_config(MODELS["deepseek-r1"], quantization="fp8")
    h200 = hardware("h200")
    shared = rank_kv_tokens(spec, h200, Parallelism(tp=8, ep=8))
    own = rank_kv_tokens(spec, h200, Parallelism(tp=8, ep=8, attention_ranks=8))
    # Under TP each device has a copy of all KV. Ranks have eight times as much in all, less
    # what their copies of attention's matrices take.
    assert shared > own > shared / 2
    weights = device_weight_bytes(spec, Parallelism(tp=8, ep=8))
    assert weights == pytest.approx(spec.weight_bytes / 8, rel=0.05)


def test_what_does_not_fit_is_refused() -> None:
    spec = ModelSpec.from_hf_config(MODELS["llama-3.1-70b"])
    with pytest.raises(ConfigError, match=r"141\.1 GB of the 77\.3 GB"):
        rank_kv_tokens(spec, hardware("h100"), Parallelism())
    assert rank_kv_tokens(spec, hardware("h100"), Parallelism(tp=2)) > 1000
    half = rank_kv_tokens(spec, hardware("h100"), Parallelism(pp=2))
    assert half == pytest.approx(
        rank_kv_tokens(spec, hardware("h100"), Parallelism(tp=2)), rel=0.01
    )


@pytest.mark.parametrize(
    ("wrong", "text"),
    [({"tp": 0}, "tp=0"), ({"tp": 4, "ep": 3}, "ep=3"), ({"pp": True}, "pp=True")],
)
def test_bad_parallelism(wrong: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Parallelism(**wrong)


def test_parallelism_as_options() -> None:
    spread = Parallelism(tp=8, attention_ranks=4, ep=8)
    assert spread.arguments == [
        *("--tp-size", "8", "--attn-dp-size", "4", "--ep-size", "8")
    ]
    assert str(spread) == "TP8 attention-DP4 EP8"
    assert Parallelism(tp=2, replicas=4).devices == 8
    assert Parallelism().arguments == []
