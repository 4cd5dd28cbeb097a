"""Lines that run with LoRA adapters: how many of each, and their shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from demo_adapter import write_demo_adapter

from sglang_batch.run.demo_model import write_demo_model

# Tokens of each part of a prompt: what all lines of an adapter begin with, what those of a
# document share, and a line's own.
SYSTEM, DOCUMENT, QUESTION = 48, 64, 12


class Line(NamedTuple):
    """adapter: the number of the adapter, -1 for the model alone."""

    adapter: int
    prompt: list[int]
    max_new_tokens: int


def lines(
    number: int, num_adapters: int, *, seed: int = 0, base: int = 0
) -> list[Line]:
    """Lines in random order. Those of different adapters have equal prompts, too.

    Args:
        base: further lines, for the model alone.
    """
    rng = np.random.default_rng(seed)
    system = _tokens(rng, SYSTEM)
    documents = [_tokens(rng, DOCUMENT) for _ in range(6)]
    made = []
    for i in range(number + base):
        adapter = i % num_adapters if i < number else -1
        document = documents[i // num_adapters % len(documents)]
        question = _tokens(rng, QUESTION)
        made.append(
            Line(adapter, system + document + question, int(rng.integers(2, 24)))
        )
    return [made[i] for i in rng.permutation(len(made))]


def shareable(job: list[Line]) -> int:
    """Prompt tokens that a perfect cache saves, by adapter: equal beginnings."""
    seen: set[tuple[int, int]] = set()
    saved = 0
    for line in job:
        for depth in range(1, len(line.prompt) + 1):
            key = (line.adapter, hash(tuple(line.prompt[:depth])))
            saved += key in seen
            seen.add(key)
    return saved


def write_checkpoints(folder: Path, num_adapters: int) -> tuple[Path, list[str]]:
    """The demo model and adapters, and the value of ``--lora-paths``."""
    model = folder / "demo"
    write_demo_model(model)
    paths = []
    for i in range(num_adapters):
        write_demo_adapter(folder / f"a{i}", model, seed=i + 1)
        paths.append(f"a{i}={folder / f'a{i}'}")
    return model, paths


def merged_answers(model: Path, folder: Path, job: Sequence[Line]) -> list[str]:
    """What ``transformers`` answers with each adapter added to the model's weights."""
    import torch
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = [""] * len(job)
    for adapter in sorted({line.adapter for line in job}):
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if adapter >= 0:
            factors = load_file(folder / f"a{adapter}" / "adapter_model.safetensors")
            for name in [each for each in factors if ".lora_A." in each]:
                up = factors[name.replace(".lora_A.", ".lora_B.")]
                module = name.removeprefix("base_model.model.").split(".lora_A.")[0]
                added = torch.from_numpy(np.matmul(up, factors[name]))
                loaded.get_submodule(module).weight.data += added
        for i, line in enumerate(job):
            if line.adapter == adapter:
                ids = torch.tensor([line.prompt])
                with torch.no_grad():
                    out = loaded.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=line.max_new_tokens,
                        do_sample=False,
                    )
                answers[i] = tokenizer.decode(
                    out[0, len(line.prompt) :], skip_special_tokens=True
                )
    return answers


def _tokens(rng: np.random.Generator, number: int) -> list[int]:
    return [int(token) for token in rng.integers(32, 127, number)]
