"""Algorithm 1 of AlignedServe: on the tree, and on plain lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from length_lists import LONGEST, State, TreeOf, algorithm_1, random_states, waiting_of

from sglang_batch.planner.kv_lengths.batch_state import (
    BATCH_SHARE,
    MIN_ROWS,
    TREE,
    LengthRange,
    RunningRows,
    add,
    density_first_search,
    join,
    make_batches,
    propose,
)
from sglang_batch.planner.kv_lengths.length_groups import BatchLaw


@pytest.fixture(scope="module")
def tree() -> TreeOf:
    return TreeOf(2000)


def check(tree: TreeOf, state: State) -> tuple[LengthRange, list[int]]:
    """What both choose, which has to be the same."""
    tree.fill(state.sizes)
    found = density_first_search(tree.tree, state.max_tokens, state.min_rows)
    chosen = algorithm_1(waiting_of(state.sizes), state.max_tokens, state.min_rows)
    assert tree.requests(found) == chosen
    tokens = sum(state.sizes[i][1] for i in chosen)
    assert (found.rows, found.tokens) == (len(chosen), tokens)
    lengths = [min(max(state.sizes[i][0], 1), LONGEST) for i in chosen]
    ends = (min(lengths), max(lengths)) if lengths else (0, 0)
    assert (found.shortest, found.longest) == ends
    assert found.at_shortest == lengths.count(found.shortest)
    assert found.at_longest == lengths.count(found.longest)
    return found, chosen


def kind_of(state: State, chosen: list[int]) -> str:
    waiting = waiting_of(state.sizes)
    if not chosen:
        return "nobody waits"
    if len(chosen) == len(waiting):
        return "all"
    lengths = {waiting[i].length for i in chosen}
    tokens = sum(waiting[i].tokens for i in chosen)
    if tokens > state.max_tokens:
        return "one that does not fit"
    here = [each for each in waiting if each.length in lengths]
    if len(here) > len(chosen):
        return "a part of a length"
    return "enough" if len(chosen) >= state.min_rows else "too few"


@pytest.mark.slow
def test_10_000_random_states(tree: TreeOf) -> None:
    kinds: Counter[str] = Counter()
    for state in random_states(10_000, seed=0):
        _, chosen = check(tree, state)
        kinds[kind_of(state, chosen)] += 1
    assert kinds.total() == 10_000
    assert len(kinds) == 6
    assert min(kinds.values()) > 100, kinds


def test_many_requests(tree: TreeOf) -> None:
    rng = Random(1)
    for _ in range(30):
        sizes = [
            (length, length + rng.randint(0, 500))
            for length in (round(rng.lognormvariate(6, 1.5)) for _ in range(2000))
        ]
        total = sum(tokens for _, tokens in sizes)
        check(tree, State(sizes, int(total * rng.uniform(0, 0.3)), 128))


# The examples of section 3.3, in megabytes: at most 80 GB, and 128 requests.

GB = 1000
MEMORY, ENOUGH = 80 * GB, 128
# A level below the root, a node has 16,384 lengths.
NODE = LONGEST // 4


def requests(node: range, number: int, gigabytes: int) -> list[tuple[int, int]]:
    """Requests of these lengths in even distances, which take so much together."""
    tokens = gigabytes * GB // number
    step = len(node) // number
    return [(node[k * step], tokens) for k in range(number)]


def lengths_of(state: State, chosen: Iterable[int]) -> list[int]:
    return sorted(state.sizes[i][0] for i in chosen)


def test_case_1_a_node_that_fits_is_the_batch(tree: TreeOf) -> None:
    # Node c takes 60 GB. Its parent takes too much.
    b, c, d = (range(k * NODE + 1, (k + 1) * NODE + 1) for k in range(3))
    sizes = [*requests(b, 100, 40), *requests(c, 200, 60), *requests(d, 150, 75)]
    _, chosen = check(tree, State(sizes, MEMORY, ENOUGH))
    assert chosen == [*range(100, 300)]


def test_case_2_a_node_that_is_too_large_has_a_child_with_most_requests(
    tree: TreeOf,
) -> None:
    # Of d's children, i has most requests, but not most memory.
    d = NODE + 1
    h, i, j, k = (range(d + n * NODE // 4, d + (n + 1) * NODE // 4) for n in range(4))
    sizes = [
        *requests(h, 140, 70), *requests(i, 180, 54),
        *requests(j, 150, 75), *requests(k, 129, 60),
    ]  # fmt: skip
    _, chosen = check(tree, State(sizes, MEMORY, ENOUGH))
    assert chosen == [*range(140, 320)]
    # Of as many, the shorter ones.
    sizes += requests(range(h[0] + 7, h[-1]), 40, 8)
    _, chosen = check(tree, State(sizes, MEMORY, ENOUGH))
    assert len(chosen) == 180
    assert set(lengths_of(State(sizes, 0, 0), chosen)) <= {*h}


def test_case_3_a_node_with_too_few_requests_gets_some_of_those_beside_it(
    tree: TreeOf,
) -> None:
    # Node g has 80 requests that fit. 48 are missing: f and h beside it are in e, too.
    e = NODE + 1
    f, g, h, i = (range(e + n * NODE // 4, e + (n + 1) * NODE // 4) for n in range(4))
    outside = requests(range(1, NODE + 1), 120, 100)
    few, beside = requests(g, 80, 20), requests(h, 70, 60)
    sizes = [*requests(f, 30, 20), *few, *beside, *requests(i, 60, 30), *outside]
    state = State(sizes, MEMORY, ENOUGH)
    _, chosen = check(tree, state)
    # All on the left, and the nearest on the right.
    assert chosen == [*range(30 + 80 + 18)]

    # Enough on the left: the nearest of them alone.
    sizes = [*requests(f, 70, 60), *few, *beside, *outside]
    _, chosen = check(tree, State(sizes, MEMORY, ENOUGH))
    assert chosen == [*range(70 - 48, 70 + 80)]

    # They do not fit: those that do, on either side.
    sizes = [*requests(f, 70, 70), *few, (h[0], 100), (h[1], 1000), (h[2], 1), *outside]
    _, chosen = check(tree, State(sizes, 60 * GB, ENOUGH))
    assert chosen == [*range(70 - 40, 70 + 80)]
    _, chosen = check(tree, State(sizes, 60 * GB + 100, ENOUGH))
    assert chosen == [*range(70 - 40, 70 + 80 + 1)]

    # The only one beside it does not fit: the batch has too few.
    sizes = [*few, (h[0], 70 * GB), *requests(range(1, NODE + 1), 70, 100)]
    _, chosen = check(tree, State(sizes, MEMORY, ENOUGH))
    assert chosen == [*range(80)]


def test_if_all_fit_they_are_the_batch(tree: TreeOf) -> None:
    sizes = [(length, 10) for length in (1, 300, 300, 40_000, LONGEST, 10**6)]
    found, chosen = check(tree, State(sizes, 60, 128))
    assert chosen == [0, 1, 2, 3, 4, 5]
    assert found == LengthRange(1, LONGEST, 1, 2, 6, 60)


def test_of_equal_lengths_the_first_ones(tree: TreeOf) -> None:
    sizes = [(9, 5), (9, 6), (9, 1), (9, 1)]
    for tokens, expected in [(13, 4), (12, 3), (11, 2), (10, 1), (5, 1), (4, 1)]:
        _, chosen = check(tree, State(sizes, tokens, 1))
        assert chosen == [*range(expected)]
    # The second does not fit, and nobody overtakes it.
    _, chosen = check(tree, State([(9, 5), (9, 60), (9, 1)], 20, 1))
    assert chosen == [0]


def test_the_candidate_batch_joins_as_the_search_found_it() -> None:
    """The shortest first, until all of it has joined."""
    rng = Random(2)
    for _ in range(60):
        step = rng.choice([1, 1, 300])  # there are many of a length
        lengths = [step * rng.randint(1, 5000 // step) for _ in range(150)]
        sizes = [(length, length) for length in lengths]
        capacity = rng.choice([0.3, 0.7, 1.5]) * sum(n for n, _ in sizes)
        budget = int(BATCH_SHARE * capacity)
        expected = algorithm_1(waiting_of(sizes), budget, MIN_ROWS)
        law = BatchLaw(1.0, 1e-6, 0.0, False, capacity, 1000, True)
        batches = make_batches(len(sizes), TREE)
        for i, (length, tokens) in enumerate(sizes):
            add(batches, i, length, tokens, -1)
        joined: list[int] = []
        for _ in expected:
            total = float(sum(sizes[i][1] for i in joined))
            longest = max((sizes[i][0] for i in joined), default=0)
            i = propose(batches, law, RunningRows(len(joined), total, longest))
            assert batches.state[0]["num_next"] == len(expected) - len(joined)
            join(batches, i)
            joined.append(i)
        assert joined == expected
