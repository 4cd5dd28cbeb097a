"""Jobs whose steps are counted: prompts of token ids, and how long each answer is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_batch.planner.requests import PlanRequests

Rows = list[tuple[list[int], int]]


def groups() -> Rows:
    """32 long prefixes with 8 siblings each."""
    rng = np.random.default_rng(1)
    rows: Rows = []
    for _ in range(32):
        prefix = _tokens(rng, 512)
        rows += [(prefix + _tokens(rng, 32), 8) for _ in range(8)]
    return _shuffled(rows, rng)


def two_levels() -> Rows:
    """8 prefixes, below each of them 4 longer ones, below each of those 6 requests."""
    rng = np.random.default_rng(2)
    rows: Rows = []
    for _ in range(8):
        top = _tokens(rng, 256)
        for _ in range(4):
            middle = top + _tokens(rng, 128)
            for _ in range(6):
                own = _tokens(rng, int(rng.integers(8, 40)))
                rows.append((middle + own, int(rng.integers(1, 40))))
    return _shuffled(rows, rng)


def blend() -> Rows:
    """Long shared prompts with short answers among short prompts with long ones."""
    rng = np.random.default_rng(3)
    rows: Rows = []
    for _ in range(10):
        prefix = _tokens(rng, 300)
        rows += [(prefix + _tokens(rng, 40), 4) for _ in range(6)]
    rows += [(_tokens(rng, 16), int(rng.integers(60, 160))) for _ in range(120)]
    return _shuffled(rows, rng)


def lengths() -> Rows:
    """Prompts of many lengths that share nothing, so that batches of them are switched."""
    rng = np.random.default_rng(4)
    rows: Rows = []
    for _ in range(150):
        length = int(np.clip(rng.lognormal(np.log(60), 1.2), 8, 1500))
        rows.append((_tokens(rng, length), int(rng.integers(10, 100))))
    return _shuffled(rows, rng)


JOBS = {"groups": groups, "two levels": two_levels, "blend": blend}
MORE_JOBS = {**JOBS, "lengths": lengths}


def plan_requests(rows: Rows) -> PlanRequests:
    """The same as the planner sees it; all lengths are known."""
    lengths = np.array([length for _, length in rows], np.int32)
    return PlanRequests(
        np.concatenate([np.array(prompt, np.int32) for prompt, _ in rows]),
        np.cumsum([0, *(len(prompt) for prompt, _ in rows)], dtype=np.int64),
        lengths,
        lengths.copy(),
    )


def _tokens(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(5, 250, length)]


def _shuffled(rows: Sequence[tuple[list[int], int]], rng: np.random.Generator) -> Rows:
    return [rows[i] for i in rng.permutation(len(rows))]
