"""Prompts of which no two begin alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..errors import ConfigError


def random_prompts(
    lengths: Sequence[int], vocab_size: int, *, seed: int
) -> list[list[int]]:
    """Prompts of these lengths whose first tokens all differ.

    The ids are from the middle of the vocabulary, where no model has special tokens,
    unless there are more prompts than ids.

    Raises:
        ConfigError: there are more prompts than ids in the vocabulary.
    """
    if len(lengths) > vocab_size:
        raise ConfigError(
            f"--rows {len(lengths)} is more than the {vocab_size} tokens of the "
            "vocabulary, so that prompts cannot all differ; give fewer."
        )
    chance = random.Random(seed)
    ids = range(vocab_size // 8, vocab_size // 2)
    if len(ids) < len(lengths):
        ids = range(vocab_size)
    firsts = chance.sample(ids, len(lengths))
    return [
        [first, *chance.choices(ids, k=length - 1)]
        for first, length in zip(firsts, lengths, strict=True)
    ]
