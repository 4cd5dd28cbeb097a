"""A tiny GPT-Neo, which SGLang has no class for, and what ``generate`` answers with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_batch.run.demo_model import SPECIAL_IDS, VOCAB_SIZE


@pytest.fixture(scope="session")
def neo_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint, float32, with a context of 256 tokens."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    path = tmp_path_factory.mktemp("neo") / "model"
    torch.manual_seed(3)
    GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=256,
            window_size=8,
            initializer_range=0.6,
            bos_token_id=SPECIAL_IDS["<|bos|>"],
            eos_token_id=SPECIAL_IDS["<|end|>"],
            pad_token_id=SPECIAL_IDS["<|pad|>"],
        )
    ).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (demo_model / name).exists():
            shutil.copy(demo_model / name, path / name)
    return path


@pytest.fixture(scope="session")
def reference(neo_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(neo_model, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def generated(reference: Any) -> Callable[[list[int], int], list[int]]:
    """The tokens of ``generate`` for one prompt, greedy, at most so many."""

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            found = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        return [int(token) for token in found[0, len(prompt) :]]

    return generate
