"""An order of fields for each row of a table, such that the prompts share most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..compiled import jit
from ..requests import Bools, Int32s
from .field_table import (
    Edges,
    FieldTable,
    Int16s,
    common_len,
    own_orders,
    prefix_weight,
)
from .value_splits import (
    BY_FIELD,
    MOST_OPTIMAL_ROWS,
    WAYS,
    Scratch,
    best_groups,
    scratch,
    value_groups,
)


@dataclass(frozen=True, slots=True)
class FieldOrders:
    """The order of the fields of each row.

    orders: int16 ``[rows, fields]``, fields by their number in the table. Rows with equal
        values have equal orders.
    weight, own_weight: of the prefix tree with these orders, and with the table's own order, in
        the unit of the table's lengths.
    """

    orders: Int16s
    weight: int
    own_weight: int


def field_orders(
    table: FieldTable,
    *,
    head: bool = False,
    to_follow: bool = False,
    exact_rows: int = MOST_OPTIMAL_ROWS,
) -> FieldOrders:
    """Find the order of the fields of each row for which the prefix tree is lightest.

    Values that a group of rows has in common come first, which is best, and the group is
    split by the values of other fields. Fields that depend on others in a group follow
    them by that. Where the table's own order is lighter after all, as it may be if texts that
    differ begin alike, it is kept.

    Args:
        head: the first field stays first in all rows: it is the text before the fields.
        to_follow: the rows are a sample, whose orders others follow (:class:`OrderTree`). All
            rows of a group are then split by one field where that is good.
        exact_rows: groups of up to so many rows are split in the best way.
    """
    own = own_orders(table)
    own_weight = prefix_weight(table, own)
    if table.num_rows < 2 or table.num_fields < 2:
        return FieldOrders(own, own_weight, own_weight)
    kinds, kind = table.distinct_rows()
    edge = np.ascontiguousarray(table.edges.edge[kinds])
    edges = table.edges._replace(edge=edge)
    work = scratch(len(kinds), edges.lens)
    parts, depth = [np.arange(len(kinds), dtype=np.int32)], 0
    if head:
        by_head = np.argsort(edge[:, 0], kind="stable").astype(np.int32)
        cuts = np.flatnonzero(np.diff(edge[by_head, 0])) + 1
        parts, depth = np.split(by_head, cuts), 1
    orders = own[kinds]
    for rows in parts:
        most, found = -1, orders[rows]
        for way in (BY_FIELD,) if to_follow else WAYS:
            saved = order_rows(edges, work, rows.copy(), depth, way, exact_rows, orders)
            if saved > most:
                most, found = saved, orders[rows]
        orders[rows] = found
    orders = orders[kind]
    weight = prefix_weight(table, orders)
    if weight >= own_weight:
        return FieldOrders(own, own_weight, own_weight)
    return FieldOrders(orders, weight, own_weight)


@jit
def order_rows(
    edges: Edges, work: Scratch, rows: Int32s, depth: int, way: int, exact_rows: int,
    orders: Int16s,
) -> int:  # fmt: skip
    """Order the fields of rows that list the same ``depth`` fields, from there on down. Returns the
    length that their tree saves over listing everything for each row.

    Args:
        rows: int32, sorted by this.
        way: one of ``WAYS``.
        exact_rows: as of :func:`field_orders`.
        orders: int16 ``[rows, fields]``, filled for these rows.
    """
    saved = 0
    edge = edges.edge
    used = np.zeros(edge.shape[1], np.bool_)
    waiting = [(0, len(rows), depth)]
    while waiting:
        start, end, before = waiting.pop()
        part = rows[start:end]
        used[:] = False
        for k in range(before):
            used[orders[part[0], k]] = True
        depth = _list_common(edge, part, before, used, orders)
        for k in range(before, depth):
            saved += (end - start - 1) * edges.lens[edge[part[0], orders[part[0], k]]]
        active = _repeating(edge, part, used, work)
        group = _groups(edges, part, active, way, exact_rows, work)
        groups = group.max() + 1
        if groups == 0:
            _list_rest(part, depth, used, _alike(edges, part, used), orders)
            continue
        # The rows of each group together, and at the end those in none.
        for i in range(len(group)):
            if group[i] < 0:
                group[i] = groups
        rows[start:end] = rows[start:end][np.argsort(group, kind="mergesort")]
        size = np.zeros(groups + 1, np.int64)
        for g in group:
            size[g] += 1
        for g in range(groups + 1):
            if size[g]:
                waiting.append((start, start + size[g], depth))
                start += size[g]
    return saved


@jit
def _list_common(
    edge: Int32s, rows: Int32s, depth: int, used: Bools, orders: Int16s
) -> int:
    """List the fields next in which these rows agree. Returns the fields listed."""
    for c in range(edge.shape[1]):
        if used[c]:
            continue
        equal = True
        for i in rows[1:]:
            if edge[i, c] != edge[rows[0], c]:
                equal = False
                break
        if equal:
            used[c] = True
            for i in rows:
                orders[i, depth] = c
            depth += 1
    return depth


@jit
def _repeating(edge: Int32s, rows: Int32s, used: Bools, work: Scratch) -> Int32s:
    """The fields that are not used in which some of these rows agree."""
    m = edge.shape[1]
    found = np.empty(m, np.int32)
    num = 0
    for c in range(m):
        if used[c]:
            continue
        work.tag[0] += 1
        tag = work.tag[0]
        for i in rows:
            e = edge[i, c]
            if work.seen[e] == tag:
                found[num] = c
                num += 1
                break
            work.seen[e] = tag
    return found[:num]


@jit
def _groups(
    edges: Edges, rows: Int32s, active: Int32s, way: int, exact_rows: int, work: Scratch
) -> Int32s:
    """How to split rows: the group of each from 0, int32 ``[n]``; -1 for none."""
    n, m = len(rows), len(active)
    if m == 0:
        return np.full(n, -1, np.int32)
    columns = np.empty((m, n), np.int32)
    for k in range(m):
        for i in range(n):
            columns[k, i] = edges.edge[rows[i], active[k]]
    if n <= exact_rows:
        return best_groups(columns.T.copy(), edges.lens)
    return value_groups(columns, way, work)[1]


@jit
def _alike(edges: Edges, rows: Int32s, used: Bools) -> int:
    """The field whose texts begin most alike in rows that agree in none. -1: none left."""
    most, found = -1, -1
    for c in range(edges.edge.shape[1]):
        if used[c]:
            continue
        listed = np.sort(edges.edge[rows, c])
        total = 0
        for i in range(1, len(listed)):
            total += common_len(edges, listed[i - 1], listed[i])
        if total > most:
            most, found = total, c
    return found


@jit
def _list_rest(
    rows: Int32s, depth: int, used: Bools, field: int, orders: Int16s
) -> None:
    """List this field next, and then the others in the table's order."""
    if field >= 0:
        used[field] = True
        for i in rows:
            orders[i, depth] = field
        depth += 1
    for c in range(len(used)):
        if not used[c]:
            for i in rows:
                orders[i, depth] = c
            depth += 1


# Orders for rows that were not in the table from which orders were found.


@dataclass(slots=True)
class _Node:
    """Rows that list the same values first.

    fields: those that some of these rows list next, most frequent first.
    below: the rows that list such a value next, by field and value, if there are several.
    usual: the order of the rows of its largest part.
    """

    usual: tuple[int, ...]
    fields: tuple[int, ...] = ()
    below: dict[tuple[int, int], _Node] = field(default_factory=dict)


class OrderTree:
    """The prefix tree of a sample of rows, without the parts that are a single row.

    A row goes down from the root: by the value of the field that most rows list next, if
    other rows have this value there, or else of the next such field. Where no field leads
    on, it lists the rest as most rows do there.

    Args:
        values: int32 ``[rows, fields]``.
        orders: int16 ``[rows, fields]``, see :class:`FieldOrders`.
    """

    def __init__(self, values: Int32s, orders: Int16s) -> None:
        listed = np.take_along_axis(values, orders.astype(np.int64), axis=1)
        both = np.stack([orders.astype(np.int32), listed], axis=2)
        both = both.reshape(len(values), -1)  # field, value, field, value, ...
        self._both = both[np.lexsort(both.T[::-1])]
        self._root = self._node(0, len(both), 0)
        del self._both

    def order(self, values: Sequence[int]) -> tuple[int, ...]:
        """The order of the fields of a row.

        Args:
            values: the number of each field's value in the sample. -1: it has none.
        """
        node = self._root
        while True:
            for each in node.fields:
                if (below := node.below.get((each, values[each]))) is not None:
                    node = below
                    break
            else:
                return node.usual

    def _node(self, start: int, end: int, depth: int) -> _Node:
        both = self._both
        if 2 * depth == both.shape[1]:
            return _Node(tuple(both[start, ::2].tolist()))
        part = both[start:end, 2 * depth : 2 * depth + 2]
        cuts = np.flatnonzero((part[1:] != part[:-1]).any(axis=1)) + 1
        begins = [0, *cuts.tolist()]
        sizes = np.diff([*begins, end - start])
        largest = start + begins[int(sizes.argmax())]
        node = _Node(tuple(both[largest, ::2].tolist()))
        rows: dict[int, int] = {}
        for begin, size in zip(begins, sizes.tolist(), strict=True):
            if size > 1:
                each, value = part[begin].tolist()
                rows[each] = rows.get(each, 0) + size
                at = start + begin
                node.below[each, value] = self._node(at, at + size, depth + 1)
        node.fields = tuple(sorted(rows, key=lambda each: (-rows[each], each)))
        return node
