"""A job whose shards are known by heart: random, but the same on every machine."""

from __future__ import annotations

import random


def mixed_job(seed: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Prompts, most of which share a document or an instruction, and output lengths."""
    chance = random.Random(seed)
    documents = [[100 + d] * chance.randrange(1, 60) for d in range(12)]
    prompts = []
    for _ in range(150):
        shared = [7] * 9 if chance.random() < 0.7 else []
        if chance.random() < 0.8:
            shared = shared + chance.choice(documents)
        own = tuple(chance.randrange(50) for _ in range(chance.randrange(12)))
        prompts.append(tuple(shared) + own)
    return prompts, [chance.randrange(1, 200) for _ in prompts]
