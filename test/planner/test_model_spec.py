"""Counting models from their configurations, against published sizes."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_checkpoints import CHECKPOINTS
from tiny_models import tiny_config, tiny_model

from sglang_batch.errors import ConfigError
from sglang_batch.planner.costs.cost_model import CostModel, kv_capacity_tokens
from sglang_batch.planner.costs.hardware import hardware
from sglang_batch.planner.costs.model_spec import ModelSpec, counted_model
from sglang_batch.planner.machine_model import second_pool
from sglang_batch.prediction.models import MODELS

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GEMMA_2B = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 256000,
    "torch_dtype": "bfloat16",
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN15_MOE = {
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "vocab_size": 102400,
    "quantization_config": None,
}
LLAMA4_SCOUT = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "vocab_size": 202048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA4_MAVERICK = LLAMA4_SCOUT | {
    "num_local_experts": 128,
    "interleave_moe_layer_step": 2,
}


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        # The exact counts on the models' pages.
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_70B, 70_553_706_496),
        (LLAMA_1B, 1_235_814_400),
        (QWEN25_7B, 7_615_616_512),
        (GEMMA_2B, 2_506_172_416),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN15_MOE, 14_315_784_192),
        (QWEN3_30B_A3B, 30_532_122_624),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_exact_parameter_counts(config: dict[str, Any], num_params: int) -> None:
    assert ModelSpec.from_hf_config(config).num_params == num_params


@pytest.mark.parametrize(
    ("config", "num_params", "num_active_params"),
    [
        (MIXTRAL_8X7B, 46.7e9, 12.9e9),
        (QWEN15_MOE, 14.3e9, 2.7e9),
        (QWEN3_30B_A3B, 30.5e9, 3.3e9),
        (DEEPSEEK_V3, 671e9, 37e9),
        (DEEPSEEK_V2_LITE, 15.7e9, 2.7e9),
        (LLAMA4_SCOUT, 109e9, 17e9),
        (LLAMA4_MAVERICK, 400e9, 17e9),
    ],
    ids=["mixtral", "qwen1.5", "qwen3", "v3", "v2-lite", "scout", "maverick"],
)
def test_active_parameters_of_experts(
    config: dict[str, Any], num_params: float, num_active_params: float
) -> None:
    spec = ModelSpec.from_hf_config(config)
    assert spec.num_params == pytest.approx(num_params, rel=0.02)
    # Vendors round, and some leave the embedding table out, which is counted here.
    embedding = config["vocab_size"] * config["hidden_size"]
    low, high = num_active_params * 0.98, num_active_params * 1.02 + embedding
    assert low < spec.num_active_params < high


def test_all_parameters_of_a_dense_model_are_active() -> None:
    spec = ModelSpec.from_hf_config(LLAMA_8B)
    assert spec.num_active_params == spec.num_params
    none_routed = LLAMA_8B | {"n_routed_experts": None, "num_experts": 0}
    assert ModelSpec.from_hf_config(none_routed) == spec


def test_the_papers_model() -> None:
    spec = ModelSpec.from_hf_config(LLAMA_8B)
    assert (spec.num_layers, spec.hidden) == (32, 4096)
    assert spec.kv_bytes_per_token == 131072
    assert spec.weight_bytes == 2 * spec.num_params
    assert spec.kv_shards == 8


def test_dense_layers_among_experts() -> None:
    every_other = ModelSpec.from_hf_config(QWEN3_30B_A3B | {"decoder_sparse_step": 2})
    by_list = {"mlp_only_layers": list(range(0, 48, 2))}
    assert ModelSpec.from_hf_config(QWEN3_30B_A3B | by_list) == every_other
    all_sparse = ModelSpec.from_hf_config(QWEN3_30B_A3B)
    sparse = 3 * 2048 * 768 * 128 + 2048 * 128
    assert all_sparse.num_params - every_other.num_params == 24 * (
        sparse - 3 * 2048 * 6144
    )


def test_latent_attention_keeps_one_latent_per_token_and_layer() -> None:
    spec = ModelSpec.from_hf_config(DEEPSEEK_V3)
    assert spec.kv_bytes_per_token == (512 + 64) * 61 * 2
    assert spec.hidden == 128 * (192 + 128) / 2
    assert spec.kv_shards == 1


def test_heads_share_the_kv_as_far_as_there_are_kv_heads() -> None:
    spec = ModelSpec.from_hf_config(QWEN25_7B)
    assert [spec.kv_replicas(tp) for tp in (1, 2, 4, 8)] == [1, 1, 1, 2]
    assert ModelSpec(1, 1, 1, 1, 1, 1).kv_replicas(64) == 1


def test_kv_dtype() -> None:
    def kv_bytes(**settings: str) -> float:
        return ModelSpec.from_hf_config(LLAMA_8B, **settings).kv_bytes_per_token

    assert kv_bytes(kv_dtype="auto") == kv_bytes(kv_dtype="bfloat16") == 131072
    assert kv_bytes(kv_dtype="fp8") == kv_bytes(kv_dtype="fp8_e4m3") == 65536
    with pytest.raises(ConfigError, match="dtype='fp7' is not known"):
        kv_bytes(kv_dtype="fp7")


def weight_gb(config: dict[str, Any], **settings: str) -> float:
    return ModelSpec.from_hf_config(config, **settings).weight_bytes / 1e9


def test_the_dtype_of_weights() -> None:
    plain = 2 * 8.030261248
    assert weight_gb(LLAMA_8B) == pytest.approx(plain)
    # Engines load a float32 checkpoint in 16 bits. A torch dtype prints its module.
    for stored in ("float32", "torch.float16"):
        assert weight_gb(LLAMA_8B | {"torch_dtype": stored}) == pytest.approx(plain)
    newer = {k: v for k, v in LLAMA_8B.items() if k != "torch_dtype"}
    assert weight_gb(newer | {"dtype": "bfloat16"}) == weight_gb(newer)


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm}


def compressed(weights: dict[str, Any], inputs: int | None = None) -> dict[str, Any]:
    group: dict[str, Any] = {"weights": weights}
    if inputs:
        group["input_activations"] = {"num_bits": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def quark(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    scheme = {"weight": weights, **more}
    return {"quant_method": "quark", "global_quant_config": scheme}


FP8 = {"dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("config", "quantization", "size_gb", "in_8_bits"),
    [
        # Sizes of published checkpoints.
        (DEEPSEEK_V3, DEEPSEEK_V3["quantization_config"], 673, True),
        (LLAMA_8B, {"quant_method": "fbgemm_fp8"}, 9.08, True),
        (LLAMA_8B, {"quant_method": "awq", "bits": 4, "group_size": 128}, 5.73, False),
        (
            LLAMA_70B,
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
            39.8,
            False,
        ),
        (LLAMA_8B, {"quant_method": "gptq", "bits": 8, "group_size": -1}, 9.08, False),
        (LLAMA_8B, {"quant_method": "bitsandbytes", "load_in_4bit": True}, 5.81, False),
        # Of 6.98e9 weights in the layers, each bit is 0.872 GB, and the rest 2.10 GB.
        (LLAMA_8B, {"quant_method": "bitsandbytes"}, 9.08, False),
        (
            LLAMA_8B,
            {"quant_method": "auto-round", "bits": 4, "group_size": 128},
            5.73,
            0,
        ),
        (LLAMA_8B, compressed({"num_bits": 8}), 9.08, False),
        (LLAMA_8B, compressed({"num_bits": 8, "type": "int"}, 8), 9.08, True),
        (LLAMA_8B, compressed({"num_bits": 8, "type": "float"}, 8), 9.08, True),
        (LLAMA_8B, compressed({"num_bits": 4, "group_size": 128}), 5.73, False),
        (
            LLAMA_8B,
            compressed({"num_bits": 4, "type": "float", "group_size": 16}, 4),
            6.03,
            False,
        ),
        (LLAMA_8B, modelopt("FP8"), 9.08, True),
        (LLAMA_8B, modelopt("NVFP4"), 6.03, False),
        (LLAMA_8B, {"quant_method": "mxfp8"}, 9.30, True),
        (LLAMA_8B, quark(FP8, input_tensors=FP8), 9.08, True),
        (LLAMA_8B, quark(FP8), 9.08, False),
        (LLAMA_8B, quark({"dtype": "fp4", "group_size": 32}), 5.81, False),
        (LLAMA_8B, quark({"dtype": "uint4", "group_size": 128}), 5.73, False),
    ],
)
def test_quantised_weights(
    config: dict[str, Any],
    quantization: dict[str, Any],
    size_gb: float,
    in_8_bits: bool,
) -> None:
    config = config | {"quantization_config": quantization}
    spec = ModelSpec.from_hf_config(config)
    assert spec.weight_bytes / 1e9 == pytest.approx(size_gb, rel=0.01)
    assert spec.in_8_bits == in_8_bits
    # A quantised checkpoint keeps its KV in the dtype of the activations.
    plain = ModelSpec.from_hf_config({**config, "quantization_config": None})
    assert spec.kv_bytes_per_token == plain.kv_bytes_per_token


@pytest.mark.parametrize(
    ("method", "size_gb", "in_8_bits"),
    [
        ("fp8", 9.08, True),
        ("w8a8_int8", 9.08, True),
        ("w8a8_fp8", 9.08, True),
        ("mxfp8", 9.30, True),
        ("modelopt_fp4", 6.03, False),
        ("nvfp4_online", 6.03, False),
        ("quark_mxfp4", 5.81, False),
        ("bitsandbytes", 5.81, False),
        ("unquant", 16.06, False),
        (None, 16.06, False),
    ],
)
def test_weights_quantised_while_loading(
    method: str | None, size_gb: float, in_8_bits: bool
) -> None:
    spec = ModelSpec.from_hf_config(LLAMA_8B, quantization=method)
    assert spec.weight_bytes / 1e9 == pytest.approx(size_gb, rel=0.01)
    assert spec.in_8_bits == in_8_bits


def test_a_stored_quantisation_comes_before_the_flag() -> None:
    stored = LLAMA_8B | {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    flagged = ModelSpec.from_hf_config(stored, quantization="nvfp4_online")
    assert flagged == ModelSpec.from_hf_config(stored)


def test_experts_of_four_bits_beside_attention_of_eight() -> None:
    spec = ModelSpec.from_hf_config(MIXTRAL_8X7B, quantization="w4afp8")
    plain = ModelSpec.from_hf_config(MIXTRAL_8X7B)
    experts = 32 * 8 * (3 * 4096 * 14336 + 4096)
    attention = 32 * 4096 * (2 * 4096 + 2 * 1024)
    saved = experts * (16 - 4.125) + attention * (16 - 8)
    assert (plain.weight_bytes - spec.weight_bytes) * 8 == pytest.approx(saved)
    assert spec.in_8_bits


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("fp8_e4m3", 8),
        ("fp8_e5m2", 8),
        ("mxfp8", 8.25),
        ("nvfp4", 4.5),
        ("fp4_mx_block16", 4.5),
        ("auto", 16),
        ("bf16", 16),
    ],
)
def test_kv_counts_its_scales(dtype: str, bits: float) -> None:
    spec = ModelSpec.from_hf_config(LLAMA_8B, kv_dtype=dtype)
    assert spec.kv_bytes_per_token == 32 * 2 * 8 * 128 * bits / 8


def test_mxfp4_quantises_the_experts_only() -> None:
    config = {**MIXTRAL_8X7B, "quantization_config": {"quant_method": "mxfp4"}}
    experts = 32 * 8 * (3 * 4096 * 14336 + 4096)
    saved = experts * (16 - 4.25) / 8 / 1e9
    assert weight_gb(MIXTRAL_8X7B) - weight_gb(config) == pytest.approx(saved)


def test_a_quantisation_without_bits_is_counted_with_16(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = LLAMA_8B | {"quantization_config": {"quant_method": "new"}}
    with pytest.raises(ConfigError, match=r"quantization 'new', only for .*\bawq\b"):
        ModelSpec.from_hf_config(config)
    found = counted_model(config, kv_dtype="fp8", quantization=None)
    assert found == ModelSpec.from_hf_config(LLAMA_8B, kv_dtype="fp8")
    assert "weights of 16 bits" in caplog.text


def test_the_language_model_of_a_multimodal_one() -> None:
    text = {k: v for k, v in LLAMA_1B.items() if k != "tie_word_embeddings"}
    outer = {"tie_word_embeddings": True, "vision_config": {"hidden_size": 1280}}
    for key in ("text_config", "llm_config"):
        spec = ModelSpec.from_hf_config(outer | {key: text})
        assert spec == ModelSpec.from_hf_config(LLAMA_1B)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((LLAMA_8B, key) for key in ("hidden_size", "intermediate_size")),
        *((LLAMA_8B, key) for key in ("num_hidden_layers", "num_attention_heads")),
        (LLAMA_8B, "vocab_size"),
        (QWEN3_30B_A3B, "num_experts_per_tok"),
        *((DEEPSEEK_V3, key) for key in ("qk_rope_head_dim", "v_head_dim")),
        (DEEPSEEK_V3, "qk_nope_head_dim"),
    ],
)
def test_a_missing_key_is_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"has {key}=None"):
        ModelSpec.from_hf_config({k: v for k, v in config.items() if k != key})
    with pytest.raises(ConfigError, match=f"has {key}='many'"):
        ModelSpec.from_hf_config(config | {key: "many"})


@pytest.mark.parametrize(
    "part",
    [
        {"layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": ["conv", "full_attention"]},
        {"mamba_d_state": 16},
        {"index_topk": 2048},
        {"is_encoder_decoder": True},
    ],
)
def test_parts_that_are_not_counted_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be counted"):
        ModelSpec.from_hf_config(LLAMA_8B | part)


def test_half_of_the_layers_have_a_sliding_window() -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 16}
    spec = ModelSpec.from_hf_config(LLAMA_8B | layers | {"sliding_window": 512})
    assert spec.kv_bytes_per_token == 131072
    assert spec.window_kv_bytes_per_token == spec.full_kv_bytes_per_token == 65536
    assert (spec.window, spec.num_layers) == (512, 16)
    assert spec.other_flops_per_token == 4 * 512 * 4096 * 16
    # Without a window, or without a layer that reads all tokens.
    plain = ModelSpec.from_hf_config(LLAMA_8B)
    assert ModelSpec.from_hf_config(LLAMA_8B | layers) == plain
    windows = {"layer_types": ["sliding_attention"] * 32, "sliding_window": 512}
    assert ModelSpec.from_hf_config(LLAMA_8B | windows) == plain


def test_recurrent_layers_have_states_and_no_kv() -> None:
    spec = ModelSpec.from_hf_config(MODELS["qwen3-next-80b-a3b"])
    assert spec.num_params == 79_674_391_296
    # 12 of 48 layers have KV: 2 heads of 256 keys and values, in 2 bytes.
    assert spec.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    # 36 have 32 matrices of 128 x 128 in 4 bytes, and 3 inputs of 8,192 channels in 2.
    assert spec.state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert spec.other_flops_per_token == 36 * 32 * 128 * 128 * 7
    types = ["linear_attention"] * 48
    with pytest.raises(ConfigError, match="no layer with attention"):
        ModelSpec.from_hf_config(MODELS["qwen3-next-80b-a3b"] | {"layer_types": types})


def test_kimi_delta_attention_has_a_decay_for_each_channel() -> None:
    spec = ModelSpec.from_hf_config(MODELS["kimi-linear-48b-a3b"])
    # 7 of 27 layers have latents of 512 and 64 in 2 bytes.
    assert spec.kv_bytes_per_token == 7 * (512 + 64) * 2
    # 20 have 32 matrices of 128 x 128 in 4 bytes, and 3 inputs of 3 x 4,096 channels in 2.
    assert spec.state_bytes == 20 * (32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2)
    assert spec.other_flops_per_token == 20 * 32 * 128 * 128 * 7
    assert spec.num_active_params == pytest.approx(3.5e9, rel=0.02)
    other = MODELS["kimi-linear-48b-a3b"] | {"linear_attn_config": {"layers": [1]}}
    with pytest.raises(ConfigError, match=r"linear_attn_config.*give ModelSpec"):
        ModelSpec.from_hf_config(other)


# Gemma 4 without inputs of each layer, as its larger models are.
PLAIN_GEMMA = {
    **CHECKPOINTS["gemma4_text"],
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 32,
}
LARGE_GEMMA = {
    **PLAIN_GEMMA,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
COUNTED = [
    *((name, fields) for name, fields in CHECKPOINTS.items() if name != "gemma4_text"),
    ("gemma4_text", PLAIN_GEMMA),
    ("gemma4_text", LARGE_GEMMA),
]


@pytest.mark.parametrize(("model_type", "fields"), COUNTED)
def test_tiny_models_have_the_parameters_counted(
    model_type: str, fields: dict[str, Any]
) -> None:
    model = tiny_model(model_type, **{"max_position_embeddings": 2048, **fields})
    spec = ModelSpec.from_hf_config(model.config.to_dict())
    # Biases of gpt-oss's experts and sinks are not counted.
    assert spec.num_params == pytest.approx(model.num_parameters(), rel=0.02)
    if model_type not in ("gpt_oss", "mimo_v2_flash"):
        assert spec.num_params == model.num_parameters()


def test_layers_with_windows_have_heads_of_their_own() -> None:
    config = tiny_config("gemma4_text", **LARGE_GEMMA).to_dict()
    spec = ModelSpec.from_hf_config(config, kv_dtype="bfloat16")
    assert (spec.num_layers, spec.hidden) == (2, 4 * 32)
    assert spec.full_kv_bytes_per_token == 2 * (32 + 32) * 2
    assert spec.window_kv_bytes_per_token == 2 * 2 * (16 + 16) * 2
    # As the file of a checkpoint has it.
    config["per_layer_config"] = {}
    file = config | {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert ModelSpec.from_hf_config(file, kv_dtype="bfloat16") == spec
    config = tiny_config("mimo_v2_flash", **CHECKPOINTS["mimo_v2_flash"]).to_dict()
    spec = ModelSpec.from_hf_config(config, kv_dtype="bfloat16")
    assert spec.full_kv_bytes_per_token == 2 * (24 + 16) * 2
    assert spec.window_kv_bytes_per_token == 2 * 4 * (24 + 16) * 2


def test_what_cannot_be_counted_is_refused() -> None:
    config = tiny_config("gemma4_text", **CHECKPOINTS["gemma4_text"]).to_dict()
    with pytest.raises(
        ConfigError, match=r"hidden_size_per_layer_input.*give ModelSpec"
    ):
        ModelSpec.from_hf_config(config)


def test_states_are_read_and_written_and_windows_end() -> None:
    spec = ModelSpec.from_hf_config(MODELS["qwen3-next-80b-a3b"])
    device = hardware("h100-sxm")
    cost = CostModel.of(spec, device)
    # As many tokens of KV as two states have bytes.
    assert (
        cost.more_reads(1) == cost.more_reads(10**6) == round(2 * 77_266_944 / 24_576)
    )
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 16}
    windows = ModelSpec.from_hf_config(LLAMA_8B | layers | {"sliding_window": 512})
    cost = CostModel.of(windows, device)
    assert [cost.more_reads(p) for p in (100, 512, 9999)] == [100, 512, 512]
    plain = CostModel.of(ModelSpec.from_hf_config(LLAMA_8B), device)
    assert cost.kv_read_time_s == plain.kv_read_time_s / 2


def test_pools_share_the_memory_as_in_sglang() -> None:
    spec, device = (
        ModelSpec.from_hf_config(MODELS["qwen3-next-80b-a3b"]),
        hardware("h200-sxm"),
    )
    tokens = kv_capacity_tokens(spec, device, 2)
    pool, rows = second_pool(spec, tokens, 8192, 2)
    states = pool.capacity + 1
    left = 2 * device.memory_bytes * 0.9 - spec.weight_bytes
    assert tokens * 24_576 + states * spec.state_bytes == pytest.approx(left, rel=0.01)
    assert states * spec.state_bytes == pytest.approx(left * 0.9 / 1.9, rel=0.01)
    assert rows == states // 3
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 16}
    config = LLAMA_8B | layers | {"sliding_window": 512, "model_type": "gpt_oss"}
    spec = ModelSpec.from_hf_config(config)
    tokens = kv_capacity_tokens(spec, device)
    left = device.memory_bytes * 0.9 - spec.weight_bytes
    assert tokens * 65_536 * (1 + 0.8) == pytest.approx(left, rel=0.01)
    pool, rows = second_pool(spec, tokens, 8192)
    assert pool.capacity == int(tokens * 0.8) - 8192
    assert (pool.prefix_tokens, rows) == (513, None)


def test_figures_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_layers=0 must be a positive number"):
        ModelSpec(10, 10, 0, 1, 1, 1)
    with pytest.raises(ConfigError, match="num_active_params=11 is more than"):
        ModelSpec(10, 11, 1, 1, 1, 1)
