"""The quad-tree of lengths, against a plain list of the requests that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_batch.planner.kv_lengths.length_tree import (
    COUNT,
    LEAVES,
    MAX_LENGTH,
    NEVER,
    NONE,
    NUM_LEVELS,
    OLDEST,
    TOKENS,
    LengthTree,
    insert,
    longest_up_to,
    longest_waiting,
    make_tree,
    shortest_from,
    take_out,
    take_out_first,
)


@dataclass(frozen=True)
class Entry:
    """A request of the list, which is in the order in which they came."""

    request: int
    length: int
    tokens: int
    since: int


def nodes_of(waiting: Sequence[Entry]) -> NDArray[np.int64]:
    """All nodes, level by level from the leaves up."""
    level = np.zeros((MAX_LENGTH, 3), np.int64)
    level[:, OLDEST] = NEVER
    for each in waiting:
        leaf = level[each.length - 1]
        leaf[COUNT] += 1
        leaf[TOKENS] += each.tokens
        leaf[OLDEST] = min(leaf[OLDEST], each.since)
    levels = [level]
    while len(level) > 1:
        quarters = level.reshape(-1, 4, 3)
        level = quarters.sum(axis=1)
        level[:, OLDEST] = quarters[:, :, OLDEST].min(axis=1)
        levels.append(level)
    return np.concatenate(levels[::-1])


def leaf_of(tree: LengthTree, length: int) -> list[int]:
    """Requests of a length, along the list and back."""
    found: list[int] = []
    i = int(tree.first[length - 1])
    while i != NONE:
        assert tree.before[i] == (found[-1] if found else NONE)
        found.append(i)
        i = int(tree.after[i])
    assert tree.last[length - 1] == (found[-1] if found else NONE)
    return found


def check(tree: LengthTree, waiting: Sequence[Entry], rng: Random) -> None:
    assert np.array_equal(tree.nodes, nodes_of(waiting))
    lengths = sorted({each.length for each in waiting})
    for length in lengths:
        here = [each.request for each in waiting if each.length == length]
        assert leaf_of(tree, length) == here
    by_request = {each.request: each for each in waiting}
    for i in range(len(tree.length)):
        assert tree.length[i] == (by_request[i].length if i in by_request else 0)
    asked = [-1, 0, 1, 2, MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1, 10**7]
    asked += [rng.randint(1, MAX_LENGTH) for _ in range(20)]
    asked += [each + k for each in rng.sample(lengths, min(9, len(lengths))) for k in (-1, 0, 1)]  # fmt: skip
    for length in asked:
        below = [each for each in lengths if each <= length]
        above = [each for each in lengths if each >= length]
        assert longest_up_to(tree, length) == max(below, default=0)
        assert shortest_from(tree, length) == min(above, default=0)
    first = min(waiting, key=lambda each: (each.since, each.length), default=None)
    assert longest_waiting(tree) == (NONE if first is None else first.request)


def any_length(rng: Random, kind: int) -> int:
    if kind == 0:
        return rng.randint(1, MAX_LENGTH)
    if kind == 1:
        return rng.randint(1, 20)
    if kind == 2:  # at borders of nodes
        return 4 ** rng.randint(0, 8) * rng.randint(1, 4) + rng.randint(-1, 1)
    return rng.choice([0, 1, MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1, 1_000_000])


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("seed", range(3))
def test_random_inserts_and_removals(kind: int, seed: int) -> None:
    rng = Random(10 * kind + seed)
    num_requests = 200
    tree = make_tree(num_requests)
    waiting: list[Entry] = []
    clock = 0
    for step in range(800):
        clock += rng.choice([0, 0, 1, 7])
        # First more and more of them, then fewer until nobody waits.
        grows = rng.random() < (0.8 if step < 400 else 0.3)
        outside = {*range(num_requests)} - {each.request for each in waiting}
        if grows and outside:
            i = rng.choice(sorted(outside))
            length, tokens = any_length(rng, kind), rng.randint(0, 100_000)
            insert(tree, i, length, tokens, clock)
            kept = min(max(length, 1), MAX_LENGTH)
            waiting.append(Entry(i, kept, tokens, clock))
        elif waiting:
            # Of a leaf, the first as often as any other, or the first few of them.
            each = rng.choice([waiting[0], rng.choice(waiting)])
            if rng.random() < 0.8:
                take_out(tree, each.request)
                waiting.remove(each)
            else:
                here = [other for other in waiting if other.length == each.length]
                number = rng.randint(0, len(here))
                take_out_first(tree, each.length, number)
                for other in here[:number]:
                    assert tree.length[other.request] == each.length
                    tree.length[other.request] = 0
                    waiting.remove(other)
        if step % 20 == 0:
            check(tree, waiting, rng)
    for each in [*waiting]:
        take_out(tree, each.request)
        waiting.remove(each)
    check(tree, [], rng)


def test_an_empty_tree() -> None:
    for num_requests in (0, 5):
        tree = make_tree(num_requests)
        check(tree, [], Random(0))
        assert len(tree.nodes) == sum(4**level for level in range(NUM_LEVELS))
        assert len(tree.nodes) == LEAVES + MAX_LENGTH


def test_longer_requests_are_in_the_last_leaf() -> None:
    tree = make_tree(4)
    for i, length in enumerate([MAX_LENGTH, MAX_LENGTH + 1, 2**31 - 1, MAX_LENGTH - 1]):
        insert(tree, i, length, 7, i)
    assert leaf_of(tree, MAX_LENGTH) == [0, 1, 2]
    assert tree.length.tolist() == [MAX_LENGTH] * 3 + [MAX_LENGTH - 1]
    assert longest_up_to(tree, 10**9) == MAX_LENGTH
    assert shortest_from(tree, MAX_LENGTH + 1) == 0


def test_of_those_that_came_together_the_shortest_first_come_is_first() -> None:
    tree = make_tree(4)
    for i, length in enumerate([900, 30, 30, 2]):
        insert(tree, i, length, 1, 5 if i < 3 else 6)
    assert longest_waiting(tree) == 1
    take_out(tree, 1)
    assert longest_waiting(tree) == 2
    take_out(tree, 2)
    assert longest_waiting(tree) == 0
