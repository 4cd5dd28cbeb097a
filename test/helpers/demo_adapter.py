"""A small random LoRA adapter of the demo model, in the files of ``peft``.

Its answers differ from the base model's and from those of every other seed.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_TARGETS = {
    "q_proj": ("self_attn", "num_attention_heads"),
    "v_proj": ("self_attn", "num_key_value_heads"),
    "o_proj": ("self_attn", None),
    "gate_proj": ("mlp", None),
    "up_proj": ("mlp", None),
    "down_proj": ("mlp", None),
}


def write_demo_adapter(
    path: str | Path, model: str | Path, *, seed: int, rank: int = 4
) -> None:
    """Write an adapter for the checkpoint of ``sglang_batch.run.demo_model``.

    Args:
        path: the folder, which is created with its parents if missing.
        model: the folder of the checkpoint.
        seed: of the weights, 0 or more.
        rank: of the two factors of each matrix.
    """
    from safetensors.numpy import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, inside = int(config["hidden_size"]), int(config["intermediate_size"])
    head_dim = int(config["head_dim"])
    random = np.random.default_rng(seed)
    weights = {}
    for layer in range(int(config["num_hidden_layers"])):
        for name, (block, heads) in _TARGETS.items():
            rows = head_dim * int(config[heads]) if heads else hidden
            columns = hidden
            if name == "o_proj":
                columns = head_dim * int(config["num_attention_heads"])
            elif name in ("gate_proj", "up_proj"):
                rows = inside
            elif name == "down_proj":
                columns = inside
            prefix = f"base_model.model.model.layers.{layer}.{block}.{name}"
            down = random.normal(0.0, columns**-0.5, (rank, columns))
            up = random.normal(0.0, rank**-0.5, (rows, rank))
            weights[f"{prefix}.lora_A.weight"] = down.astype(np.float32)
            weights[f"{prefix}.lora_B.weight"] = up.astype(np.float32)
    save_file(weights, path / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_TARGETS),
    }
    (path / "adapter_config.json").write_text(json.dumps(adapter, indent=2))
