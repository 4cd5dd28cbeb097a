"""The jobs of the benchmark of the dense engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_batch.prediction.workloads.sources import SHAREGPT, lognormal_lengths

VOCAB = 1000


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and how many tokens its answer has."""

    prompt: list[int]
    output_len: int


def mixed(count: int, long: int, short: tuple[int, int], seed: int) -> list[Task]:
    """Long in and short out, short in and long out, both short: 1:1:2 (Baton, 5.1).

    short: the fewest and the most tokens. Long ones differ by a fifth.
    """
    rng = np.random.default_rng([seed, 1])
    tasks = [
        _task(rng, *_mixed_size(rng, number, long, short)) for number in range(count)
    ]
    order = rng.permutation(count)
    return [tasks[place] for place in order]


def mixed_sizes(
    rng: np.random.Generator, count: int, long: int, short: tuple[int, int]
) -> list[tuple[int, int]]:
    """Only the lengths of such tasks, of prompts and answers."""
    sizes = [_mixed_size(rng, number, long, short) for number in range(count)]
    return [sizes[place] for place in rng.permutation(count)]


def _mixed_size(
    rng: np.random.Generator, number: int, long: int, short: tuple[int, int]
) -> tuple[int, int]:
    lengths = rng.integers(*short, 2, endpoint=True)
    if number % 4 < 2:
        lengths[number % 4] = rng.integers(int(0.8 * long), int(1.2 * long))
    return int(lengths[0]), int(lengths[1])


def sharegpt(count: int, scale: float, seed: int) -> list[Task]:
    """Lengths of ShareGPT, scaled."""
    rng = np.random.default_rng([seed, 2])
    sizes = []
    for mean, square in (
        (SHAREGPT.input_mean, SHAREGPT.input_mean**2 * (1 + SHAREGPT.own_cv**2)),
        (SHAREGPT.output_mean, SHAREGPT.output_square),
    ):
        found = lognormal_lengths(count, scale * mean, scale**2 * square, 2, 500)
        sizes.append(rng.permutation(found).tolist())
    return tasks_of(rng, list(zip(*sizes, strict=True)))


def siblings(groups: int, each: int, shared: int, seed: int) -> list[Task]:
    """Groups that share so many tokens, four fifths of each prompt."""
    rng = np.random.default_rng([seed, 3])
    tasks = []
    for _ in range(groups):
        prefix = rng.integers(3, VOCAB, shared).tolist()
        tasks += [
            Task(prefix + rng.integers(3, VOCAB, shared // 4).tolist(), 8)
            for _ in range(each)
        ]
    order = rng.permutation(len(tasks))
    return [tasks[place] for place in order]


def tasks_of(rng: np.random.Generator, sizes: Sequence[tuple[int, int]]) -> list[Task]:
    """Random prompts. ``sizes``: tokens of each prompt and of its answer."""
    return [_task(rng, prompt_len, output_len) for prompt_len, output_len in sizes]


def _task(rng: np.random.Generator, prompt_len: int, output_len: int) -> Task:
    return Task(rng.integers(3, VOCAB, prompt_len).tolist(), max(1, output_len))


def by_prefix(tasks: Sequence[Task]) -> list[int]:
    """The order that keeps shared prefixes together."""
    return sorted(range(len(tasks)), key=lambda i: tasks[i].prompt)


def longest_first(tasks: Sequence[Task]) -> list[int]:
    """Lengths known, as after a run's sample: the planner's order for dense batches."""
    return sorted(
        range(len(tasks)), key=lambda i: -len(tasks[i].prompt) - tasks[i].output_len
    )
