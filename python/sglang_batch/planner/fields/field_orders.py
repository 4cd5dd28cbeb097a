"""An order of fields for each row of a table, such that the prompts share most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..compiled import jit
from ..requests import Bools, Int32s
from . import best_splits, merged_splits
from .best_splits import best_groups
from .field_table import FieldTable, common_len
from .merged_splits import merged_groups
from .prefix_weight import Int16s, own_orders, prefix_weight
from .value_splits import Scratch, group_by_edge, scratch, value_groups


@dataclass(frozen=True, slots=True)
class FieldOrders:
    """The order of the fields of each row.

    orders: int16 ``[rows, fields]``, fields by their number in the table. Rows with equal
        values have equal orders.
    weight: of the prefix tree with these orders, in the unit of the table's lengths.
    own_weight: with the table's own order. It is at least ``weight``.
    """

    orders: Int16s
    weight: int
    own_weight: int


def field_orders(
    table: FieldTable,
    *,
    head: bool = False,
    exact_rows: int = best_splits.MOST_ROWS,
    merged_rows: int = merged_splits.MOST_ROWS,
) -> FieldOrders:
    """Find the order of the fields of each row for which the prefix tree is lightest.

    Values that a group of rows has in common come first, which is best, and the group is
    split by the values of other fields. Fields that depend on others in a group follow
    them by that: nothing is assumed about other rows. Where the table's own order is
    lighter after all, as it may be if texts that differ begin alike, it is kept.

    Args:
        head: the first field stays first in all rows: it is the text before the fields.
        exact_rows: groups of up to so many rows are split in the best way.
        merged_rows: groups of up to so many rows are also split bottom up.
    """
    own = own_orders(table)
    own_weight = prefix_weight(table, own)
    if table.num_rows < 2 or table.num_fields < 2:
        return FieldOrders(own, own_weight, own_weight)
    kinds, kind = table.distinct_rows()
    edges = table.edges
    edge = np.ascontiguousarray(edges.edge[kinds])
    found = np.zeros(edge.shape, np.int16)
    _order_rows(
        head, edge, edges.lens, edges.common, edges.blocks, edges.floors,
        scratch(len(kinds), len(edges.lens)), exact_rows, merged_rows, found,
    )  # fmt: skip
    orders = found[kind]
    weight = prefix_weight(table, orders)
    if weight >= own_weight:
        return FieldOrders(own, own_weight, own_weight)
    return FieldOrders(orders, weight, own_weight)


@jit
def _order_rows(
    head: bool,
    edge: Int32s,
    lens: Int32s,
    common: Int32s,
    blocks: Int32s,
    floors: Int32s,
    work: Scratch,
    exact_rows: int,
    merged_rows: int,
    orders: Int16s,
) -> None:
    """Fill ``orders``, int16 ``[rows, fields]``, from the root of the tree down."""
    n, m = edge.shape
    rows = np.arange(n).astype(np.int32)
    used = np.zeros(m, np.bool_)
    waiting = [(0, n, 0)]  # rows[start:end] list the same first fields
    if head:
        waiting.pop()
        ends = np.empty(n + 1, np.int32)
        start = 0
        for g in range(group_by_edge(edge[:, 0].copy(), rows, ends, 0, n, work)):
            waiting.append((start, int(ends[g]), 1))
            start = int(ends[g])
    while waiting:
        start, end, depth = waiting.pop()
        used[:] = False
        for k in range(depth):
            used[orders[rows[start], k]] = True
        depth = _list_common(edge, rows[start:end], depth, used, orders)
        active = _repeating(edge, rows[start:end], used, work)
        groups = 0
        group = np.zeros(0, np.int32)
        if len(active):
            group = _groups(
                edge, lens, rows[start:end], active, exact_rows, merged_rows, work
            )
            groups = group.max() + 1
        if groups == 0:
            field = _alike(edge, common, blocks, floors, rows[start:end], used)
            _list_rest(rows[start:end], depth, used, field, orders)
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
    edge: Int32s,
    lens: Int32s,
    rows: Int32s,
    active: Int32s,
    exact_rows: int,
    merged_rows: int,
    work: Scratch,
) -> Int32s:
    """How to split rows: the group of each from 0, int32 ``[n]``; -1 for none."""
    n, m = len(rows), len(active)
    if n <= merged_rows:
        few = np.empty((n, m), np.int32)
        for i in range(n):
            for k in range(m):
                few[i, k] = edge[rows[i], active[k]]
        if n <= exact_rows:
            return best_groups(few, lens)
        by_merging, merged = merged_groups(few, lens)
    else:
        by_merging, merged = 0, np.zeros(0, np.int32)
    columns = np.empty((m, n), np.int32)
    for k in range(m):
        for i in range(n):
            columns[k, i] = edge[rows[i], active[k]]
    by_value, grouped = value_groups(columns, lens, work)
    return merged if by_merging > by_value else grouped


@jit
def _alike(
    edge: Int32s,
    common: Int32s,
    blocks: Int32s,
    floors: Int32s,
    rows: Int32s,
    used: Bools,
) -> int:
    """The field whose texts begin most alike in rows that agree in none. -1: none left."""
    most, found = -1, -1
    for c in range(edge.shape[1]):
        if used[c]:
            continue
        listed = np.sort(edge[rows, c])
        total = 0
        for i in range(1, len(listed)):
            total += common_len(common, blocks, floors[c], listed[i - 1], listed[i])
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
