"""The order of fields for each row of a table."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_batch.planner.fields.field_orders import OrderTree, field_orders
from sglang_batch.planner.fields.field_table import (
    FieldTable,
    own_orders,
    prefix_weight,
    text_table,
)
from sglang_batch.planner.fields.value_splits import MOST_OPTIMAL_ROWS, best_costs


def random_table(
    rng: np.random.Generator, rows: int, fields: int, values: int | None = None
) -> FieldTable:
    """Skewed values, of which some depend on those of another field."""
    found: list[NDArray[np.int64]] = []
    for field in range(fields):
        num = int(rng.integers(1, (values or rows) + 1))
        if field and rng.random() < 0.35:
            other = found[rng.integers(field)]
            drawn = rng.integers(0, num, size=other.max() + 1)[other]
        else:
            share = 1 / np.arange(1, num + 1) ** rng.choice([0, 1, 2])
            drawn = rng.choice(num, size=rows, p=share / share.sum())
        found.append(np.unique(drawn, return_inverse=True)[1])
    lens = [rng.integers(1, 30, each.max() + 1).astype(np.int32) for each in found]
    return FieldTable(np.stack(found, 1).astype(np.int32), lens)


def text_weight(rows: list[tuple[str, ...]], orders: list[tuple[int, ...]]) -> int:
    """Characters of different beginnings, counted one by one. Fields end with a line."""
    beginnings = set()
    for row, order in zip(rows, orders, strict=True):
        text = "".join(row[field] + "\n" for field in order)
        beginnings |= {text[:end] for end in range(1, len(text) + 1)}
    return len(beginnings)


def test_weight_is_that_of_the_texts_beginnings() -> None:
    rng = np.random.default_rng(1)
    words = ["a", "ab", "abc", "b", "ba", "c" * 9, "c" * 8 + "d"]
    for _ in range(20):
        rows = [
            tuple(f"{field}: {rng.choice(words)}" for field in "xyz") for _ in range(9)
        ]
        table = table_of(rows)
        orders = [tuple(rng.permutation(3).tolist()) for _ in rows]
        weight = prefix_weight(table, np.array(orders, np.int16))
        assert weight == text_weight(rows, orders)
        found = field_orders(table)
        assert found.weight == text_weight(rows, list(map(tuple, found.orders)))
        assert found.own_weight == text_weight(rows, [(0, 1, 2)] * len(rows))


def table_of(rows: list[tuple[str, ...]]) -> FieldTable:
    columns = list(zip(*rows, strict=True))
    texts = [list(dict.fromkeys(column)) for column in columns]
    values = [
        [found.index(text) for text in column]
        for found, column in zip(texts, columns, strict=True)
    ]
    encoded = [[text.encode() for text in found] for found in texts]
    return text_table(np.array(values, np.int32).T.copy(), encoded)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "fields"), [(2, 3), (3, 3), (4, 3), (3, 4)])
def test_the_best_cost_is_the_least_of_all_orders(rows: int, fields: int) -> None:
    rng = np.random.default_rng(rows * fields)
    orders = list(permutations(range(fields)))
    for _ in range(2 if fields > 3 else 5):
        table = random_table(rng, rows, fields)
        least = min(weighed(table, chosen) for chosen in product(orders, repeat=rows))
        assert best_costs(table.edges.edge, table.edges.lens)[0][-1] == least
        assert field_orders(table).weight == least


def weighed(table: FieldTable, orders: tuple[tuple[int, ...], ...]) -> int:
    """The weight of a prefix tree, made of its nodes."""
    nodes = {}
    for row, order in zip(table.values.tolist(), orders, strict=True):
        path = tuple((field, row[field]) for field in order)
        for depth, (field, value) in enumerate(path):
            nodes[path[: depth + 1]] = int(table.lens[field][value])
    return sum(nodes.values())


@pytest.mark.parametrize(
    ("rows", "exact_rows", "most"),
    [
        (8, MOST_OPTIMAL_ROWS, 1.0),
        (12, MOST_OPTIMAL_ROWS, 1.01),
        (12, 1, 1.02),  # what splits larger groups
    ],
)
def test_weight_is_near_the_least(rows: int, exact_rows: int, most: float) -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(200):
        table = random_table(rng, rows, int(rng.integers(2, 7)))
        found = field_orders(table, exact_rows=exact_rows)
        least = int(best_costs(table.edges.edge, table.edges.lens)[0][-1])
        assert least <= found.weight <= found.own_weight
        ratios.append(found.weight / least)
    assert np.mean(ratios) <= most


@pytest.mark.parametrize("rows", [1, 2, 40, 300, 2000])
def test_orders_are_permutations_equal_for_equal_rows_and_the_same_again(
    rows: int,
) -> None:
    rng = np.random.default_rng(rows)
    table = random_table(rng, rows, 6, values=8)
    again = np.concatenate([table.values, table.values[::-1]])
    table = FieldTable(again, table.lens)
    found = field_orders(table)
    assert (np.sort(found.orders, axis=1) == np.arange(6)).all()
    assert (found.orders[:rows] == found.orders[rows:][::-1]).all()
    assert found.weight == prefix_weight(table, found.orders) <= found.own_weight
    assert (field_orders(table).orders == found.orders).all()


def test_a_dependency_that_some_rows_break_is_none() -> None:
    """Package decides license in all rows but some, which share no beginning by it."""
    rng = np.random.default_rng(0)
    package = rng.integers(0, 30, 3000)
    license = package % 7
    broken = np.arange(3000) % 10 == 0
    license[broken] = rng.integers(0, 7, broken.sum())
    values = np.stack([np.arange(3000), license, package], 1).astype(np.int32)
    lens = [np.full(each.max() + 1, 10, np.int32) for each in values.T]
    found = field_orders(FieldTable(values, lens))
    assert found.weight == prefix_weight(FieldTable(values, lens), found.orders)
    licenses = len(np.unique(package * 7 + license))
    # Either comes first, and pairs of both after it; numbers are never shared.
    assert found.weight <= 10 * (3000 + 7 + licenses)


def test_a_head_stays_first() -> None:
    rng = np.random.default_rng(0)
    table = random_table(rng, 300, 5, values=20)
    head = field_orders(table, head=True)
    assert (head.orders[:, 0] == 0).all()
    assert field_orders(table).weight <= head.weight <= head.own_weight


def test_own_order_stays_where_it_is_best() -> None:
    values = np.array([[0, i] for i in range(50)], np.int32)
    table = FieldTable(values, [np.array([5], np.int32), np.full(50, 3, np.int32)])
    found = field_orders(table)
    assert found.weight == found.own_weight == 5 + 3 * 50
    assert (found.orders == own_orders(table)).all()


def test_other_rows_follow_those_of_a_sample() -> None:
    rng = np.random.default_rng(3)
    table = random_table(rng, 2000, 6, values=30)
    part = FieldTable(table.values[::2], table.lens)
    found = field_orders(part, to_follow=True)
    tree = OrderTree(part.values, found.orders)
    orders = np.array([tree.order(row) for row in table.values.tolist()], np.int16)
    assert (np.sort(orders, axis=1) == np.arange(6)).all()
    assert tree.order([-1] * 6) in set(map(tuple, found.orders.tolist()))
    best, own = field_orders(table), prefix_weight(table, own_orders(table))
    assert prefix_weight(table, orders) < best.weight + 0.3 * (own - best.weight)


@pytest.mark.parametrize(
    ("values", "lens", "said"),
    [
        ([[0, 0]], [[1]], "1 lists of lengths for 2 fields"),
        ([[2]], [[1, 1]], "field 0 has value 2, but lengths of 2 values"),
        ([[-1]], [[1, 1]], "field 0 has a value below 0"),
        ([[0]], [[0]], "a value of field 0 has length 0"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    values: list[list[int]], lens: list[list[int]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        FieldTable(np.array(values, np.int32), [np.array(x, np.int32) for x in lens])
