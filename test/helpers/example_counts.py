"""The examples and combinations that are tried, all of them in the nightly run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations as choices
from itertools import product
from typing import Any

# `make test-nightly` sets it to 1. Examples are derandomized: fewer are the first of more.
SHARE = float(os.environ.get("SGLANG_BATCH_TEST_EXAMPLES", "0.25"))


def examples(nightly: int) -> int:
    """The examples of this run, of those of the nightly one: a share, but at least 20."""
    return max(min(nightly, 20), round(nightly * SHARE))


def combinations(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations in the nightly run. Otherwise few, in which each two values meet.

    Chosen greedily and alike each time: the one with most pairs that none before has.
    """
    every = list(product(*axes))
    if SHARE >= 1:
        return every
    left = {pair for one in every for pair in _pairs(one)}
    chosen = []
    while left:
        best = max(every, key=lambda one: len(left & _pairs(one)))
        left -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(values: tuple[Any, ...]) -> set[Any]:
    return set(choices(enumerate(values), 2))
