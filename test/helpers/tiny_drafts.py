"""Checkpoints of tiny random draft models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ARCHITECTURES = {"EAGLE": "LlamaForCausalLMEagle", "EAGLE3": "LlamaForCausalLMEagle3"}
# Tokens that an EAGLE3 model can draft.
VOCABULARY = 200


def drafts_of(model: Path, algorithm: str, topk: int, width: int) -> list[str]:
    """Flags for drafts of ``width`` tokens, of a model that runs three steps."""
    return [
        "--speculative-num-steps=3",
        f"--speculative-algorithm={algorithm}",
        f"--speculative-draft-model-path={model}",
        f"--speculative-eagle-topk={topk}",
        f"--speculative-num-draft-tokens={width}",
    ]


def write_draft_model(algorithm: str, path: Path, demo_model: Path) -> Path:
    """A model of one layer that drafts from the hidden states of the demo model."""
    config = json.loads((demo_model / "config.json").read_text())
    config["architectures"] = [ARCHITECTURES[algorithm]]
    config["num_hidden_layers"] = 1
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head = config["head_dim"]
    eagle3 = algorithm == "EAGLE3"
    layer, read = ("midlayer", 2 * hidden) if eagle3 else ("layers.0", hidden)
    shapes = {
        "fc.weight": (hidden, (3 if eagle3 else 2) * hidden),
        f"{layer}.self_attn.q_proj.weight": (heads * head, read),
        f"{layer}.self_attn.k_proj.weight": (groups * head, read),
        f"{layer}.self_attn.v_proj.weight": (groups * head, read),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * head),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }
    norms = [f"{layer}.post_attention_layernorm.weight"]
    if eagle3:
        config["draft_vocab_size"] = VOCABULARY
        shapes["lm_head.weight"] = VOCABULARY, hidden
        norms += ["norm.weight", f"{layer}.hidden_norm.weight"]
        norms.append(f"{layer}.input_layernorm.weight")
    else:
        shapes["fc.bias"] = (hidden,)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    weights |= {name: torch.ones(hidden) for name in norms}
    if eagle3:  # a draft's token is this much less than the model's
        weights["d2t"] = torch.full((VOCABULARY,), 32)
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def add_next_token_layer(path: Path) -> None:
    """Give a checkpoint of DeepSeek V3 a layer that drafts (NEXTN), like its last one."""
    config = json.loads((path / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    hidden, number = config["hidden_size"], config["num_hidden_layers"]
    last, added = f"model.layers.{number - 1}.", f"model.layers.{number}."
    weights = load_file(path / "model.safetensors")
    for name, weight in list(weights.items()):
        if name.startswith(last):
            weights[name.replace(last, added)] = weight.clone()
    for name in "enorm", "hnorm", "shared_head.norm":
        weights[f"{added}{name}.weight"] = torch.ones(hidden)
    both = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(0))
    weights[f"{added}eh_proj.weight"] = both * (2 * hidden) ** -0.5
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
