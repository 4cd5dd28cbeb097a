"""Checkpoints of tiny random models for SGLang, with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, tiny_model

WINDOW = 32
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gpt_oss": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
    },
    "gemma2": {
        "num_hidden_layers": 4,  # every other one has a window
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,  # less than many of these logits
        "final_logit_softcapping": None,  # of which SGLang has a kernel for GPUs only
        "hidden_act": "gelu_pytorch_tanh",  # the name that SGLang reads
        "tie_word_embeddings": True,  # SGLang does so whatever this says
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,  # SGLang does so whatever this says
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        # SGLang reads other sizes of full layers from checkpoints with images only.
        "head_dim": 16,
        "global_head_dim": 16,
        "swa_num_key_value_heads": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "tie_word_embeddings": True,  # SGLang does so whatever this says
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_window": WINDOW,
        "head_dim": 24,
        "v_head_dim": 16,
        # By the names of its own code, which SGLang reads.
        "hybrid_layer_pattern": [1, 0, 1],
        "sliding_window_size": WINDOW - 1,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "swa_rope_theta": 1e4,
        "rope_theta": 5e6,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": 1e-5,
        "moe_layer_freq": [0, 1, 1],
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "add_swa_attention_sink_bias": True,
    },
    "qwen3_moe": {"num_hidden_layers": 2},
    "deepseek_v3": {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,  # without CUDA SGLang has none
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        # Its checkpoints name these, the configuration of transformers does not.
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {  # on a CPU SGLang knows it with these only
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "qwen3_next": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
    },
    "qwen3_5_text": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "full_attention_interval": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "kimi_linear": {
        "num_hidden_layers": 3,
        "mlp_layer_types": ["sparse"] * 3,
        "routed_scaling_factor": 1.0,  # without CUDA SGLang has none
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
    },
}
"""Fields of the configurations that differ from those of ``tiny_models``."""

# SGLang's own choices for these models need a GPU.
_EXPERTS = ("--moe-runner-backend=triton",)
_STATES = ("--mamba-radix-cache-strategy=no_buffer", "--disable-overlap-schedule")
ARGUMENTS = {
    "gpt_oss": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "mimo_v2_flash": (
        *_EXPERTS,
        # transformers writes one for each kind of layer.
        '--json-model-override-args={"rope_parameters": {"rope_type": "default"}}',
    ),
    "qwen3_next": (*_EXPERTS, *_STATES),
    "qwen3_5_text": _STATES,
    "kimi_linear": (*_EXPERTS, *_STATES),
    "granitemoehybrid": (*_EXPERTS, *_STATES),
}
# The ends of an answer that the demo model has.
ENDS = [257, 263]


def write_checkpoint(
    model_type: str, path: Path, demo_model: Path, **changed: Any
) -> Path:
    """A checkpoint with weights that bfloat16 holds: SGLang keeps some of them in it.

    changed: fields of its configuration.
    """
    fields = {"max_position_embeddings": 2048, **CHECKPOINTS[model_type], **changed}
    model = tiny_model(model_type, **fields)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.data.normal_(8.0, 4.0)  # like the largest logits
        weight.data = weight.data.bfloat16().float()
    model.config.eos_token_id = ENDS
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(path)
    for file in demo_model.iterdir():
        if "token" in file.name or "chat" in file.name:
            shutil.copy(file, path)
    return path
