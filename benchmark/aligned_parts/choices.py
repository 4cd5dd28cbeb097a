"""Algorithm 1 on the quad-tree, against the same on plain lists: 10,000 random states.

The lists are searched with filters of ranges, without a tree: ``test/helpers/length_lists.py``.
The first group of lengths is compared with all ways to part them, in smaller states.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from random import Random

import numpy as np
from report import Figure

from sglang_batch.planner.kv_lengths.batch_state import density_first_search
from sglang_batch.planner.kv_lengths.length_groups import (
    BUCKETS,
    first_group,
    make_groups,
)
from sglang_batch.planner.kv_lengths.length_tree import NONE

sys.path.append(str(Path(__file__).parents[2] / "test" / "helpers"))

from length_lists import (
    TreeOf,
    algorithm_1,
    cheapest,
    random_law,
    random_states,
    waiting_of,
)

STATES, GROUPINGS = 10_000, 3000
SEED = 20
_MOST_REQUESTS = 300


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has fewer states."""
    states, groupings = (500, 200) if quick else (STATES, GROUPINGS)
    return [
        Figure(f"other batches in {states:,} states", _others(states), "", ("=", 0)),
        Figure(
            f"costlier groups in {groupings:,} states",
            _costlier(groupings),
            "",
            ("=", 0),
        ),
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


def _costlier(number: int) -> int:
    """States in which no cheapest way to part the lengths begins with the group found."""
    rng = Random(SEED)
    tree = TreeOf(_MOST_REQUESTS)
    groups, nobody = make_groups(), np.zeros(_MOST_REQUESTS, np.int32)
    found = 0
    for _ in range(number):
        low = rng.choice([1, 40, 500, 60_000])
        some = [low + rng.randrange(BUCKETS) for _ in range(rng.randint(1, 7))]
        lengths = [rng.choice(some) for _ in range(rng.randint(1, 40))]
        law = random_law(rng, lengths)
        tree.fill([(length, length) for length in lengths])
        top = first_group(groups, tree.tree, law, NONE, nobody, 0)
        least = cheapest(law, lengths)
        found += least.get(top, math.inf) > min(least.values()) * (1 + 1e-9)
    return found
