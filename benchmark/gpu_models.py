"""Models of real sizes with random weights, for GPUs: the time of a step depends on shapes
alone. They have the demo model's tokenizer, whose ids are bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.prediction.models import MODELS
from sglang_batch.run.demo_model import write_demo_model

LLAMA = "llama-3.1-8b"
# What the configurations need beyond the sizes that plans count with.
LOADABLE: dict[str, dict[str, Any]] = {
    LLAMA: {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    # Windows of 128 tokens in every other layer, and sinks.
    "gpt-oss-20b": {"architectures": ["GptOssForCausalLM"]},
    # Gated delta nets in three of four layers.
    "qwen3-next-80b-a3b": {
        "architectures": ["Qwen3NextForCausalLM"],
        "max_position_embeddings": 32768,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
}
# Of the smallest card that the list of commands is for, and SGLang's share of it.
CARD_BYTES, USABLE = 80e9, 0.85


def config_of(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """The ``config.json`` of a model of ``LOADABLE``, with fewer layers if asked."""
    config = {**MODELS[name], **LOADABLE[name]}
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:num_layers]
    return config


def write_model(path: Path, name: str = LLAMA, num_layers: int | None = None) -> None:
    """A folder with configuration and tokenizer, for ``--load-format=dummy``."""
    write_demo_model(path)
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    ids = json.loads((path / "config.json").read_text())
    kept = {key: ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = {**config_of(name, num_layers), **kept}
    (path / "config.json").write_text(json.dumps(config))


def room_for_kv(config: dict[str, Any], card_bytes: float = CARD_BYTES) -> int:
    """Tokens of KV beside the weights on one card.

    Raises:
        ConfigError: the configuration lacks a size, or is of an unknown kind.
        ValueError: the weights do not fit.
    """
    spec = ModelSpec.from_hf_config(config)
    free = USABLE * card_bytes - spec.weight_bytes
    if free <= 0:
        raise ValueError(
            f"the weights take {spec.weight_bytes / 1e9:.0f} of {card_bytes / 1e9:.0f} GB:"
            " use fewer layers."
        )
    return int(free / spec.kv_bytes_per_token)
