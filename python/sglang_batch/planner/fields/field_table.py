"""The values of a table's fields, and the weight of its prompts.

Each value has a length, and a prompt weighs as much as its values that no row before it shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit
from ..requests import Int32s, Int64s

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class FieldTable:
    """Rows of fields, each value by its number among the values of its field.

    values: int32 ``[rows, fields]``, from 0 in the order of the field's texts.
    lens: for each field, int32 ``[values]``: length of the value's text with its label,
        in tokens or bytes, at least 1.
    texts: the texts of all values one after the other, uint8, each a byte shorter than its
        length. None: texts that differ share nothing.

    Raises:
        ValueError: shapes do not fit together, or a length is below 1.
    """

    values: Int32s
    lens: Sequence[Int32s]
    texts: Bytes | None = None

    def __post_init__(self) -> None:
        rows, fields = self.values.shape
        if len(self.lens) != fields:
            raise ValueError(
                f"{len(self.lens)} lists of lengths for {fields} fields: give one each."
            )
        for field, lens in enumerate(self.lens):
            if rows and not self.values[:, field].min() >= 0:
                raise ValueError(f"field {field} has a value below 0.")
            if rows and self.values[:, field].max() >= len(lens):
                raise ValueError(
                    f"field {field} has value {self.values[:, field].max()}, but lengths "
                    f"of {len(lens)} values."
                )
            if len(lens) and lens.min() < 1:
                raise ValueError(
                    f"a value of field {field} has length {lens.min()}: the least is 1."
                )

    @property
    def num_rows(self) -> int:
        return int(self.values.shape[0])

    @property
    def num_fields(self) -> int:
        return int(self.values.shape[1])

    @cached_property
    def edges(self) -> Edges:
        counts = np.array([0, *map(len, self.lens)], np.int64)
        starts = np.cumsum(counts).astype(np.int32)
        none = np.zeros(0, np.int32)
        lens = np.concatenate([none, *self.lens]).astype(np.int32)
        edge = np.ascontiguousarray(self.values + starts[:-1], np.int32)
        ends = np.zeros(len(lens) + 1, np.int64)
        if self.texts is None:
            return Edges(edge, lens, np.zeros(0, np.uint8), ends)
        np.cumsum(lens - 1, out=ends[1:])
        return Edges(edge, lens, self.texts, ends)

    def distinct_rows(self) -> tuple[Int64s, Int64s]:
        """One row of each kind, and the kind of each row; both int64."""
        _, first, kind = np.unique(
            self.edges.edge, axis=0, return_index=True, return_inverse=True
        )
        in_order = np.argsort(first, kind="stable")
        rank = np.empty(len(first), np.int64)
        rank[in_order] = np.arange(len(first))
        return first[in_order].astype(np.int64), rank[kind.reshape(-1)]


class Edges(NamedTuple):
    """The values of all fields in one numbering: edges of the prefix tree.

    edge: int32 ``[rows, fields]``.
    lens: int32 ``[edges]``, as in :class:`FieldTable`.
    texts: uint8, those of all edges one after the other.
    ends: int64 ``[edges + 1]``, where the text of each begins, and the end.
    """

    edge: Int32s
    lens: Int32s
    texts: Bytes
    ends: Int64s


@jit
def common_len(edges: Edges, a: int, b: int) -> int:
    """Length that the texts of two edges have in common."""
    texts, first, second = edges.texts, edges.ends[a], edges.ends[b]
    most = min(edges.ends[a + 1] - first, edges.ends[b + 1] - second)
    same = 0
    while same < most and texts[first + same] == texts[second + same]:
        same += 1
    return same


def text_table(values: Int32s, texts: Sequence[Sequence[bytes]]) -> FieldTable:
    """The table of fields whose values are texts. Lengths are bytes, one for a line's end.

    Args:
        values: int32 ``[rows, fields]``, each a position in the texts of its field.
        texts: for each field, its texts with their label, none twice.
    """
    ranked = np.empty_like(values)
    lens = []
    listed: list[bytes] = []
    for field, found in enumerate(texts):
        order = sorted(range(len(found)), key=found.__getitem__)
        rank = np.empty(len(found), np.int32)
        rank[order] = np.arange(len(found), dtype=np.int32)
        ranked[:, field] = rank[values[:, field]]
        lens.append(np.array([len(found[i]) + 1 for i in order], np.int32))
        listed += (found[i] for i in order)
    return FieldTable(ranked, lens, np.frombuffer(b"".join(listed), np.uint8))


Int16s = NDArray[np.int16]


def prefix_weight(table: FieldTable, orders: Int16s) -> int:
    """The weight of the prefix tree, in the unit of the table's lengths, with the fields of
    each row in ``orders``, int16 ``[rows, fields]``: the length to compute if each prefix
    is computed once."""
    edges = table.edges
    listed = np.take_along_axis(edges.edge, orders.astype(np.int64), axis=1)
    if not listed.size:
        return 0
    listed = np.ascontiguousarray(listed[np.lexsort(listed.T[::-1])])
    columns = np.repeat(np.arange(table.num_fields), [len(x) for x in table.lens])
    return int(_sorted_weight(edges._replace(edge=listed), columns.astype(np.int32)))


def own_orders(table: FieldTable) -> Int16s:
    """The fields of all rows in the table's own order, int16 ``[rows, fields]``."""
    one = np.arange(table.num_fields, dtype=np.int16)
    return np.tile(one, (table.num_rows, 1))


@jit
def _sorted_weight(edges: Edges, columns: Int32s) -> int:
    """The weight of rows of edges that are sorted. ``columns``: int32 ``[edges]``, their fields."""
    listed, lens = edges.edge, edges.lens
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
            if columns[before] == columns[after]:
                total -= common_len(edges, before, after)
    return total
