"""Algorithm 1 on the quad-tree, against the same on plain lists: 10,000 random states.

The lists are searched with filters of ranges, without a tree: ``test/helpers/length_lists.py``.
The best window is compared with all windows there are, in smaller states.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from report import Figure

from sglang_batch.planner.length_batches.density_search import density_first_search
from sglang_batch.planner.length_batches.length_window import BatchLaw, best_window

sys.path.append(str(Path(__file__).parents[2] / "test" / "helpers"))

from length_lists import (
    TreeOf,
    algorithm_1,
    every_window,
    fits,
    random_states,
    rate,
    waiting_of,
)

STATES, WINDOWS = 10_000, 3000
SEED = 20
_MOST_REQUESTS = 300


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has fewer states."""
    states, windows = (500, 200) if quick else (STATES, WINDOWS)
    return [
        Figure(f"other batches in {states:,} states", _others(states), "", ("=", 0)),
        Figure(f"slower windows in {windows:,} states", _slower(windows), "", ("=", 0)),
    ]


def _others(number: int) -> int:
    """States in which the search chooses other requests than the lists do."""
    tree = TreeOf(_MOST_REQUESTS)
    found = 0
    for state in random_states(number, SEED):
        tree.fill(state.sizes)
        chosen = density_first_search(tree.tree, state.max_tokens, state.min_rows)
        waiting = waiting_of(state.sizes)
        expected = algorithm_1(waiting, state.max_tokens, state.min_rows)
        found += tree.requests(chosen) != expected
    return found


def _slower(number: int) -> int:
    """States with a window that makes more tokens a second than the best one found."""
    rng = Random(SEED)
    tree = TreeOf(_MOST_REQUESTS)
    found = 0
    for _ in range(number):
        top = rng.choice([3, 40, 500, 60_000])
        lengths = [rng.randint(1, top) for _ in range(rng.randint(1, 25))]
        padded = rng.random() < 0.5
        law = BatchLaw(
            weight_s=rng.choice([0.001, 1.0, 1000.0]),
            read_s=rng.choice([0.0001, 0.01, 1.0]),
            row_share=0.0 if padded else rng.choice([0.0, 33.0]),
            padded=padded,
            capacity=10.0 * rng.randint(1, 10 * top),
            max_rows=rng.choice([1, 5, 100]),
            parks=True,
        )
        tree.fill([(length, length) for length in lengths])
        _, best = best_window(tree.tree, law)
        rates = [rate(law, each) for each in every_window(lengths) if fits(law, each)]
        found += abs(best - max(rates)) > 1e-9 * best
    return found
