"""Tiny random checkpoints, one for each of many model types.

They are built from configurations alone: two layers or so, 64 channels, 300 tokens,
float32. Their weights are larger than those a training run starts from, so that greedy
answers change from token to token.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 300
"""Tokens of every tiny model."""

MAX_POSITIONS = 256
"""Positions of the tiny models that limit them."""

CAUSAL_WITHOUT_SGLANG: tuple[str, ...] = (
    "bamba",
    "bart",
    "big_bird",
    "bigbird_pegasus",
    "biogpt",
    "blenderbot",
    "blenderbot-small",
    "bloom",
    "blt",
    "codegen",
    "cpmant",
    "falcon",
    "git",
    "gpt_neo",
    "gpt_neox_japanese",
    "inkling_text",
    "jamba",
    "marian",
    "mbart",
    "megatron-bert",
    "mpt",
    "musicgen",
    "musicgen_melody",
    "mvp",
    "olmo_hybrid",
    "openai-gpt",
    "pegasus",
    "plbart",
    "prophetnet",
    "qwen4_exp",
    "qwen4_exp_text",
    "reformer",
    "rembert",
    "roformer",
    "rwkv",
    "trocr",
    "whisper",
    "xglm",
    "xlm",
    "xlnet",
    "xlstm",
    "zamba",
    "zamba2",
)
"""Types with a causal language model in transformers 5.19 that SGLang 0.5.23 runs neither
with a class of its own nor through transformers' attention interface."""

CAUSAL_OTHERS: tuple[str, ...] = (
    "cohere",
    "deepseek_v2",
    "deepseek_v3",
    "exaone4",
    "falcon_mamba",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "llama",
    "mamba",
    "mamba2",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_next",
    "smollm3",
    "stablelm",
    "starcoder2",
)
"""Types with a causal language model that SGLang runs."""

SEQ2SEQ: tuple[str, ...] = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "fsmt",
    "led",
    "longt5",
    "m2m_100",
    "marian",
    "mbart",
    "mt5",
    "mvp",
    "pegasus",
    "pegasus_x",
    "plbart",
    "prophetnet",
    "switch_transformers",
    "t5",
    "t5gemma",
    "umt5",
)
"""Types with an encoder and a decoder of text. Some also have a causal language model."""

CANNOT_BE_BUILT: dict[str, str] = {
    "musicgen": "predicts codebooks of audio, several tokens at each position",
    "musicgen_melody": "predicts codebooks of audio, several tokens at each position",
}
"""Types of the lists above that are no language models of text, and why."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size"), 64
    ),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "d_kv"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_inner", "d_ff", "dim_ff"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 128),
    **dict.fromkeys(("feed_forward_size",), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), MAX_POSITIONS),
    **dict.fromkeys(("max_target_positions", "context_length"), MAX_POSITIONS),
    **dict.fromkeys(("max_seq_len", "max_source_positions"), MAX_POSITIONS),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "is_encoder_decoder": False,
    "use_cache": True,
    "tie_word_embeddings": False,
}
"""Values of the fields that a configuration has; each type has some of them."""

_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_DELTA_NET = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4}
_HYPER = {
    **_DELTA_NET,
    "layer_types": ["linear_attention", "indexed_attention"],
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_BLT_PART = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": MAX_POSITIONS,
}
_GEMMA_PART = {
    **_BLT_PART,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 50,
        "encoder_hash_byte_group_size": [2, 3],
        "patcher_config": _BLT_PART,
        "encoder_config": {**_BLT_PART, "hidden_size_global": 64},
        "decoder_config": {**_BLT_PART, "hidden_size_global": 64},
        "global_config": _BLT_PART,
    },
    "codegen": {"rotary_dim": 8},
    "cpmant": {"position_bias_max_distance": 64, "prompt_length": 4},
    "cohere": {"logit_scale": 1.0},
    "distilbert": {"dim": 64, "hidden_dim": 128},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
    "deepseek_v2": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "exaone4": _SLIDING,
    "falcon_mamba": {"time_step_rank": 4, "state_size": 8},
    "fsmt": {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB, "langs": ["en", "de"]},
    "gemma2": {**_SLIDING, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 16},
    "git": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_oss": {
        **_SLIDING,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gptj": {"rotary_dim": 8},
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window_size": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "n_shared_experts": 1,
        "rel_extent": 32,
        "logits_mup_width_multiplier": 1.0,
    },
    "jamba": {**_MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {
        "attention_window": 16,
        "max_encoder_position_embeddings": MAX_POSITIONS,
        "max_decoder_position_embeddings": MAX_POSITIONS,
    },
    "mamba": {"time_step_rank": 4, "state_size": 8},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "megatron-bert": {"is_decoder": True},
    "mistral": {"sliding_window": 8},
    "olmo_hybrid": _DELTA_NET,
    "qwen3_next": _DELTA_NET,
    "qwen4_exp_text": _HYPER,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 16,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "rembert": {"is_decoder": True},
    "roformer": {"is_decoder": True},
    "rwkv": {"attention_hidden_size": 64},
    "t5gemma": {"encoder": _GEMMA_PART, "decoder": _GEMMA_PART},
    "xlm": {"causal": True, "use_lang_emb": False, "mask_token_id": 5},
    "xlstm": {
        "embedding_dim": 64,
        "num_blocks": 2,
        "chunk_size": 16,
        "qk_dim_factor": 1.0,
    },
    "zamba": {
        **_MAMBA,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "mamba_d_state": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "chunk_size": 16,
        "adapter_rank": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
}
"""Fields of single types, over those of ``_SIZES``."""

_MATRIX_STD = 0.3
_EMBEDDING_STD = 1.0
"""More than others: the state at a position should depend on its token first of all."""

_EMBEDDING = re.compile("emb|wpe|wte|shared.weight|relative_attention")
_KEPT = re.compile("A_log|conv|norm|time_")
"""Names of the weights that a model draws in a way of its own."""


def tiny_config(
    model_type: str, *, encoder_decoder: bool | None = None, **others: Any
) -> PretrainedConfig:
    """The configuration of a tiny model.

    encoder_decoder: with an encoder. None: where the type has no causal language model.
    others: further fields, in place of those it would have.
    Raises ValueError for a type of ``CANNOT_BE_BUILT``.
    """
    if model_type in CANNOT_BE_BUILT:
        raise ValueError(f"no tiny {model_type}: it {CANNOT_BE_BUILT[model_type]}")
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in fields(config_class)}
    values = {name: value for name, value in _SIZES.items() if name in known}
    values |= _OVERRIDES.get(model_type, {})
    if f"{model_type}_text" in CONFIG_MAPPING:
        values["text_config"] = tiny_config(f"{model_type}_text").to_dict()
    if _has_encoder(model_type, encoder_decoder):
        values |= {"is_encoder_decoder": True, "decoder_start_token_id": 1}
    elif "add_cross_attention" in known:
        values |= {"add_cross_attention": False}
    return config_class(**values | others)


def tiny_model(
    model_type: str,
    seed: int = 0,
    *,
    encoder_decoder: bool | None = None,
    **others: Any,
) -> PreTrainedModel:
    """A model in eval mode with float32 weights drawn from ``seed``, and no end token.

    encoder_decoder, others: as of :func:`tiny_config`.
    """
    config = tiny_config(model_type, encoder_decoder=encoder_decoder, **others)
    auto = (
        AutoModelForSeq2SeqLM
        if _has_encoder(model_type, encoder_decoder)
        else AutoModelForCausalLM
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config)
        _draw(model)
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = None
    return model.eval()


def tiny_encoder(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A model without a head, in eval mode, with float32 weights drawn from ``seed``.

    Of an encoder-decoder it is the encoder.
    """
    is_t5 = model_type in ("t5", "mt5", "umt5")
    config = tiny_config(model_type, encoder_decoder=is_t5)
    auto = AutoModelForTextEncoding if is_t5 else AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config)
        _draw(model)
    return model.eval()


def _draw(model: PreTrainedModel) -> None:
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight.ndim >= 2 and not _KEPT.search(name):
            std = _EMBEDDING_STD if _EMBEDDING.search(name) else _MATRIX_STD
            torch.nn.init.normal_(weight, std=std)
            _centre(weight)


def _centre(weight: torch.Tensor) -> None:
    """Takes the mean out of the rows and columns of matrices, [..., n, m].

    Activations such as GELU have a positive mean. Without this it would shift all states
    the same way, and the same token would come out at each position.
    """
    with torch.no_grad():
        for dim in (-2, -1):
            if weight.shape[dim] > 8:
                weight -= weight.mean(dim, keepdim=True)


def _has_encoder(model_type: str, encoder_decoder: bool | None) -> bool:
    if encoder_decoder is None:
        return model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return encoder_decoder
