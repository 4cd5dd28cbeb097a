"""Lines that run with LoRA adapters: how many of each, and what they share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sglang_batch.demo_adapter import write_demo_adapter
from sglang_batch.demo_model import write_demo_model

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


def _tokens(rng: np.random.Generator, number: int) -> list[int]:
    return [int(token) for token in rng.integers(32, 127, number)]
