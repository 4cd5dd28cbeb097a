"""Ways to run a job take turns, and their answers are compared."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from dense_parts.jobs import Task
from dense_parts.ways import Done

# Logits of float32 that differ by less may come in either order.
TIE = 1e-5

Ways = Mapping[str, Callable[[], Done]]


def in_turns(label: str, ways: Ways, repeats: int) -> dict[str, list[Done]]:
    """All runs of each way, with a line on stderr after each."""
    runs: dict[str, list[Done]] = {name: [] for name in ways}
    for number in range(repeats):
        for name, run in ways.items():
            gc.collect()
            done = run()
            runs[name].append(done)
            progress(f"{label}: {name} {number + 1}/{repeats}, {done.wall_s:.1f} s")
    return runs


def compared(
    label: str, model: Any, tasks: Sequence[Task], ways: Ways, repeats: int
) -> dict[str, Done]:
    """Each way's run of median times, after checking that all answers agree.

    Raises:
        RuntimeError: they do not.
    """
    runs = in_turns(label, ways, repeats)
    first = next(iter(runs))
    for name, done in runs.items():
        if any(differing(model, tasks, runs[first][0], each) for each in done):
            raise RuntimeError(f"{label}: {name} answers otherwise than {first}")
    return {name: of_median(done) for name, done in runs.items()}


def of_median(done: Sequence[Done]) -> Done:
    """A run with the median times of all."""
    return replace(
        done[0],
        cpu_s=median(each.cpu_s for each in done),
        wall_s=median(each.wall_s for each in done),
    )


def differing(model: Any, tasks: Sequence[Task], one: Done, other: Done) -> int:
    """How many answers differ by more than the order of equal logits."""
    answers = zip(tasks, one.answers, other.answers, strict=True)
    return sum(a != b and not _is_tie(model, task, a, b) for task, a, b in answers)


def progress(line: str) -> None:
    """Report progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def _is_tie(model: Any, task: Task, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two answers part at tokens whose logits differ by rounding only."""
    if len(one) != len(other):
        return False
    at = next(
        i for i, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1
    )
    logits = model(torch.tensor([[*task.prompt, *one[:at]]])).logits[0, -1]
    return abs(float(logits[one[at]] - logits[other[at]])) < TIE
