"""Text that many prompts have behind text that differs is found, and nothing else is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.prediction.late_text import num_late_tokens

RNG = np.random.default_rng(5)
SYSTEM, TASK, OTHER_TASK = (RNG.integers(0, 50_000, n) for n in (100, 200, 150))
PLACEHOLDERS = np.full(500, 151_000)


def text(length: int) -> np.ndarray:
    return RNG.integers(0, 50_000, length)


def late(prompts: Sequence[np.ndarray]) -> int:
    n = len(prompts)
    requests = PlanRequests(
        np.concatenate(prompts).astype(np.int32),
        np.cumsum([0, *map(len, prompts)]),
        np.full(n, 10, np.int32),
        np.full(n, UNKNOWN, np.int32),
    )
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    return num_late_tokens(requests, tree)


def documents(task_first: bool, number: int = 1000) -> list[np.ndarray]:
    parts = ([SYSTEM, TASK, text(300)] for _ in range(number))
    return [
        np.concatenate(each if task_first else [each[0], each[2], each[1]])
        for each in parts
    ]


def grouped() -> list[np.ndarray]:
    """50 documents, each before the task in 20 prompts."""
    begins = [np.concatenate([SYSTEM, text(300), TASK]) for _ in range(50)]
    return [np.concatenate([begin, text(30)]) for begin in begins for _ in range(20)]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (documents(task_first=False), 999 * 200),
        (grouped(), 49 * 200),
        ([np.concatenate([text(50), t]) for t in [TASK, OTHER_TASK] * 300], 299 * 350),
        # Where the prompts' images differ, what can be shared ends at a token of its own.
        (
            [
                np.concatenate([SYSTEM, [-2 - i], PLACEHOLDERS, TASK])
                for i in range(300)
            ],
            299 * 200,
        ),
    ],
    ids=["documents", "grouped", "two tasks", "images"],
)
def test_late_text_is_counted(prompts: list[np.ndarray], expected: int) -> None:
    assert late(prompts) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    "prompts",
    [
        documents(task_first=True),
        [text(400) for _ in range(1000)],
        [text(400)],
        [text(3) for _ in range(5)],
        [np.concatenate([text(400), PLACEHOLDERS]) for _ in range(20)],
        [np.concatenate([text(400), TASK[:20]]) for _ in range(1000)],
    ],
    ids=["in front", "differs", "one", "short", "images", "a template's own"],
)
def test_other_text_is_not(prompts: list[np.ndarray]) -> None:
    assert late(prompts) == 0
