"""Models that ``simulate`` has by name: the part of config.json that gives the size."""

from __future__ import annotations

from typing import Any

_SIZES = (
    "vocab_size",
    *("hidden_size", "num_hidden_layers"),
    "num_attention_heads",
    *("num_key_value_heads", "intermediate_size"),
)


def _model(family: str, /, *sizes: int | None, **others: Any) -> dict[str, Any]:
    """A ``config.json`` with ``_SIZES``, None for one that the family does not have."""
    named = zip(_SIZES, sizes, strict=True)
    found = {name: size for name, size in named if size is not None}
    return {"model_type": family, "dtype": "bfloat16", **found, **others}


_QWEN3_MOE: dict[str, Any] = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_LLAMA_8B = _model("llama", 128256, 4096, 32, 32, 8, 14336)
_LLAMA_70B = _model("llama", 128256, 8192, 80, 64, 8, 28672)
_DEEPSEEK_V3 = _model(
    "deepseek_v3",
    *(129280, 7168, 61, 128, 128, 18432),
    **_LATENT,
    q_lora_rank=1536,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _model(
        "gpt_oss",
        *(201088, 2880, layers, 64, 8, 2880),
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        attention_bias=True,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )


MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA_8B,
    "llama-3.1-8b": _LLAMA_8B,
    "llama-2-70b": {**_LLAMA_70B, "vocab_size": 32000},
    "llama-3-70b": _LLAMA_70B,
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.3-70b": _LLAMA_70B,
    "llama-3.1-405b": _model("llama", 128256, 16384, 126, 128, 8, 53248),
    "qwen2.5-7b": _model("qwen2", 152064, 3584, 28, 28, 4, 18944),
    "qwen2-72b": _model("qwen2", 152064, 8192, 80, 64, 8, 29568),
    "qwen3-32b": _model("qwen3", 151936, 5120, 64, 64, 8, 25600, head_dim=128),
    "mixtral-8x7b": _model(
        "mixtral",
        *(32000, 4096, 32, 32, 8, 14336),
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3-30b-a3b": _model(
        "qwen3_moe",
        *(151936, 2048, 48, 32, 4, 6144),
        **_QWEN3_MOE,
        moe_intermediate_size=768,
    ),
    "qwen3-235b-a22b": _model(
        "qwen3_moe",
        *(151936, 4096, 94, 64, 4, 12288),
        **_QWEN3_MOE,
        moe_intermediate_size=1536,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "qwen3-next-80b-a3b": _model(
        "qwen3_next",
        *(151936, 2048, 48, 16, 2, None),
        full_attention_interval=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        decoder_sparse_step=1,
    ),
    "kimi-linear-48b-a3b": _model(
        "kimi_linear",
        *(163840, 2304, 27, 32, None, 9216),
        **_LATENT,
        linear_attn_config={
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [x for x in range(1, 27) if x % 4],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        moe_intermediate_size=1024,
        first_k_dense_replace=1,
    ),
}
