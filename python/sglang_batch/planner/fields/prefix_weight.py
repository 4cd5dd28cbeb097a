"""What the prompts of a table weigh when each row lists its fields in some order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit
from ..requests import Int32s
from .field_table import FieldTable, common_len

Int16s = NDArray[np.int16]


def prefix_weight(table: FieldTable, orders: Int16s) -> int:
    """The weight of the prefix tree: what is computed if each prefix is computed once.

    Args:
        orders: int16 ``[rows, fields]``, the fields of each row in its order.

    Returns:
        In the unit of the table's lengths.
    """
    edges = table.edges
    listed = np.take_along_axis(edges.edge, orders.astype(np.int64), axis=1)
    if not listed.size:
        return 0
    listed = np.ascontiguousarray(listed[np.lexsort(listed.T[::-1])])
    columns = np.repeat(np.arange(table.num_fields), [len(x) for x in table.lens])
    return int(
        _sorted_weight(
            listed, columns.astype(np.int32),
            edges.lens, edges.common, edges.blocks, edges.floors,
        )
    )  # fmt: skip


def own_orders(table: FieldTable) -> Int16s:
    """The fields of all rows in the table's own order, int16 ``[rows, fields]``."""
    one = np.arange(table.num_fields, dtype=np.int16)
    return np.tile(one, (table.num_rows, 1))


@jit
def _sorted_weight(
    listed: Int32s,
    columns: Int32s,
    lens: Int32s,
    common: Int32s,
    blocks: Int32s,
    floors: Int32s,
) -> int:
    """The weight of rows of edges that are sorted."""
    n, m = listed.shape
    total = 0
    for i in range(n):
        shared = 0
        if i:
            while shared < m and listed[i, shared] == listed[i - 1, shared]:
                shared += 1
        for k in range(shared, m):
            total += lens[listed[i, k]]
        if i and shared < m:
            before, after = listed[i - 1, shared], listed[i, shared]
            field = columns[before]
            if field == columns[after]:
                total -= common_len(common, blocks, floors[field], before, after)
    return total
