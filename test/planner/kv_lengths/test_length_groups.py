"""The first group of lengths, against every way to part them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from length_lists import LONGEST, TreeOf, cheapest, cost, every_grouping, random_law

from sglang_batch.planner.kv_lengths.length_groups import (
    BUCKETS,
    BatchLaw,
    first_group,
    make_groups,
    step_s,
    usual_rows,
)
from sglang_batch.planner.kv_lengths.length_tree import NONE, LengthTree

# 10,000 tokens of KV, and weights that cost as much as 1,000 of them.
LAW = BatchLaw(1.0, 1e-3, 0.0, True, 10_000.0, 1000, True)
MOST = 60


@pytest.fixture(scope="module")
def tree() -> TreeOf:
    return TreeOf(MOST)


def found(
    tree: TreeOf,
    law: BatchLaw,
    waiting: Sequence[int],
    running: Sequence[int] = (),
    clock: int = 100,
) -> int:
    """The first group's longest of these lengths, of which some run and have grown."""
    tree.fill([(length, length) for length in waiting])
    key = np.zeros(MOST, np.int32)
    first = link(tree.tree, key, running, len(waiting), clock)
    return first_group(make_groups(), tree.tree, law, first, key, clock)


def link(
    tree: LengthTree, key: np.ndarray, running: Sequence[int], begin: int, clock: int
) -> int:
    first = NONE
    for i, length in enumerate(running, begin):
        grown = min(length - 1, i % clock)
        key[i], tree.since[i] = length - grown, clock - grown
        tree.after[i] = first
        first = i
    return first


def test_it_begins_a_cheapest_grouping(tree: TreeOf) -> None:
    rng = Random(3)
    places: Counter[str] = Counter()
    for _ in range(1500):
        low = rng.choice([1, 8, 40, 500, 30_000, LONGEST - BUCKETS])
        some = [low + rng.randrange(BUCKETS) for _ in range(rng.randint(1, 8))]
        lengths = [rng.choice(some) for _ in range(rng.randint(1, 40))]
        law = random_law(rng, lengths)
        running = rng.randint(0, len(lengths) - 1)
        top = found(tree, law, lengths[running:], lengths[:running])
        least = cheapest(law, lengths)
        assert least[top] == pytest.approx(min(least.values()), rel=1e-9)
        if len(least) > 1:
            places["all" if top == max(lengths) else "some"] += 1
    assert min(places.values()) > 100  # neither is the answer always


def test_lengths_far_apart_are_parted_and_those_close_together_are_not(
    tree: TreeOf,
) -> None:
    assert found(tree, LAW, [10] * 20 + [2000] * 3) == 10
    assert found(tree, LAW, [10] * 20 + [11] * 3) == 11
    assert found(tree, LAW, [1900], [2000] * 2) == 2000
    assert found(tree, LAW, [2000] * 3, [10] * 20) == 10


def test_of_many_lengths_it_is_nearly_the_cheapest(tree: TreeOf) -> None:
    rng = Random(4)
    for _ in range(50):
        some = [round(rng.lognormvariate(6, 1.5)) + 1 for _ in range(9)]
        lengths = [rng.choice(some) for _ in range(40)]
        law = random_law(rng, lengths)
        top = found(tree, law, lengths)
        groupings = [*every_grouping(lengths)]
        best = min(cost(law, each) for each in groupings)
        ours = min(cost(law, each) for each in groupings if max(each[0]) == top)
        assert ours <= 1.05 * best


def test_any_lengths(tree: TreeOf) -> None:
    assert found(tree, LAW, []) == 0
    assert found(tree, LAW, [1]) == 1
    assert found(tree, LAW, [], [70_000]) == 70_000
    heavy = LAW._replace(weight_s=1e9, capacity=1e9)
    assert found(tree, heavy, [1, LONGEST]) == LONGEST
    assert found(tree, heavy, [LONGEST + 9], [70_000]) == 70_000
    free = LAW._replace(weight_s=0.0, read_s=0.0)
    assert found(tree, free, [5, 6]) in (5, 6)


def test_seconds_of_a_step_and_usual_rows() -> None:
    packed = BatchLaw(2.0, 0.5, 3.0, False, 100.0, 9, True)
    assert step_s(packed, 4.0, 40.0, 10.0) == 2.0 + 0.5 * 40
    assert step_s(packed, 4.0, 40.0, 20.0) == 2.0 + 0.5 * 3 * 20
    padded = packed._replace(padded=True)
    assert step_s(padded, 4.0, 40.0, 20.0) == 2.0 + 0.5 * 4 * 20
    assert usual_rows(packed, 10.0) == pytest.approx(7.0)
    assert usual_rows(packed, 1.0) == 9.0
    assert usual_rows(packed, 1000.0) == 1.0
    assert usual_rows(packed, 0.0) == 9.0
