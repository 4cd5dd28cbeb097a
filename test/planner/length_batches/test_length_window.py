"""The best window of lengths, against every window there is."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from length_lists import LONGEST, TreeOf, Window, every_window, fits, rate

from sglang_batch.planner.length_batches.density_search import LengthRange
from sglang_batch.planner.length_batches.length_window import (
    WINDOW_SHARE,
    BatchLaw,
    best_window,
    step_s,
    usual_rows,
)

# Rows are padded, or the longest row holds the others up by 33 times its share, or not.
KINDS = [(True, 0.0), (False, 0.0), (False, 33.0)]


@pytest.fixture(scope="module")
def tree() -> TreeOf:
    return TreeOf(200)


def fill(tree: TreeOf, lengths: list[int]) -> None:
    # The tokens of the requests are not those of their rows: they share prefixes.
    tree.fill([(length, length // 2) for length in lengths])


def random_law(rng: Random, lengths: list[int], padded: bool, share: float) -> BatchLaw:
    capacity = rng.choice(
        [
            10 * rng.randint(1, 200),  # the share of it is a whole number
            rng.randint(1, 2000),
            sum(lengths),
            10 * max(lengths),
            3 * max(lengths),
        ]
    )
    return BatchLaw(
        weight_s=rng.choice([0.001, 1.0, 10.0, 1000.0]),
        read_s=rng.choice([0.0001, 0.01, 1.0]),
        row_share=share,
        padded=padded,
        capacity=float(capacity),
        max_rows=rng.choice([1, 2, 5, 10, 100]),
        parks=True,
    )


@pytest.mark.parametrize(("padded", "share"), KINDS)
def test_it_is_the_best_of_all(tree: TreeOf, padded: bool, share: float) -> None:
    rng = Random(3)
    limited: Counter[str] = Counter()
    for _ in range(1500):
        top = rng.choice([1, 3, 8, 40, 500, LONGEST])
        number = rng.randint(1, rng.choice([2, 6, 14, 30]))
        lengths = [rng.randint(1, top) for _ in range(number)]
        law = random_law(rng, lengths, padded, share)
        limit = WINDOW_SHARE * law.capacity
        if limit != round(limit) and abs(limit - round(limit)) < 1e-6:
            continue  # rounding would decide
        fill(tree, lengths)
        found, best_rate = best_window(tree.tree, law)
        windows = [each for each in every_window(lengths) if fits(law, each)]
        best = max(rate(law, each) for each in windows)
        assert best_rate == pytest.approx(best, rel=1e-12)

        # The range is one of these windows, and has this rate.
        window = Window(
            found.shortest, found.longest, found.at_shortest, found.rows, found.tokens
        )
        assert window in windows
        assert rate(law, window) == pytest.approx(best, rel=1e-12)
        assert len(tree.requests(found)) == found.rows
        at_end = lengths.count(found.longest)
        if found.shortest == found.longest:
            at_end = found.at_shortest
        assert found.at_longest == at_end
        limited["all" if found.rows == number else "some"] += 1
    assert min(limited.values()) > 100, limited


def law(padded: bool, capacity: float, max_rows: int = 100) -> BatchLaw:
    return BatchLaw(100.0, 1.0, 0.0, padded, capacity, max_rows, True)


def test_nobody_waits(tree: TreeOf) -> None:
    fill(tree, [])
    assert best_window(tree.tree, law(True, 100.0)) == (
        LengthRange(0, 0, 0, 0, 0, 0),
        -1.0,
    )


@pytest.mark.parametrize("padded", [True, False])
def test_one_request_is_a_window_even_if_it_does_not_fit(
    tree: TreeOf, padded: bool
) -> None:
    for lengths in ([34], [34, 34, 34], [34, 50, LONGEST]):
        fill(tree, lengths)
        found, _ = best_window(tree.tree, law(padded, 34.0))
        assert found == LengthRange(34, 34, 1, 1, 1, 34)


def test_what_fits_exactly_is_in_it(tree: TreeOf) -> None:
    fill(tree, [1] * 10)
    for padded in (True, False):
        found, _ = best_window(tree.tree, law(padded, 10.0))
        assert found == LengthRange(1, 1, 7, 7, 7, 7)


def test_it_ends_where_nobody_more_fits(tree: TreeOf) -> None:
    """Not one length further, of which it would have no request."""
    # Of 70 tokens, those of length 6 take 66: none of length 5 fits.
    fill(tree, [5] * 3 + [6] * 11)
    found, _ = best_window(tree.tree, law(False, 100.0))
    assert found == LengthRange(6, 6, 11, 11, 11, 66)
    # 210 cells are 10.5 rows of length 20: the ten of this length alone.
    fill(tree, [19] + [20] * 10)
    cells = BatchLaw(100.0, 0.001, 0.0, True, 300.0, 100, True)
    found, _ = best_window(tree.tree, cells)
    assert found == LengthRange(20, 20, 10, 10, 10, 200)


def test_of_equal_rates_the_shortest(tree: TreeOf) -> None:
    # Without weights to read, as many tokens a second come from any row of length 8.
    free = BatchLaw(0.0, 1.0, 0.0, True, 1000.0, 1, True)
    fill(tree, [8, 8, 9])
    assert best_window(tree.tree, free)[0] == LengthRange(8, 8, 1, 1, 1, 8)
    # The longest row alone counts.
    shared = BatchLaw(100.0, 0.0, 33.0, False, 1000.0, 2, True)
    fill(tree, [5, 6, 7, 8])
    assert best_window(tree.tree, shared)[0] == LengthRange(5, 6, 1, 1, 2, 11)


def test_padding_parts_lengths_that_others_join(tree: TreeOf) -> None:
    lengths = [10] * 8 + [100] * 2
    fill(tree, lengths)
    padded, _ = best_window(tree.tree, law(True, 10_000.0))
    assert (padded.shortest, padded.longest, padded.rows) == (10, 10, 8)
    packed, _ = best_window(tree.tree, law(False, 10_000.0))
    assert (packed.shortest, packed.longest, packed.rows) == (10, 10, 8)
    # With heavy weights everybody joins.
    heavy = BatchLaw(10_000.0, 1.0, 0.0, True, 10_000.0, 100, True)
    assert best_window(tree.tree, heavy)[0].rows == 10


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
