"""Orders of fields for rows that were not in the table from which orders were found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..requests import Int32s
from .prefix_weight import Int16s


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
    on, it lists the rest as most rows do there. So its order depends on its values alone.

    Args:
        values: int32 ``[rows, fields]``.
        orders: int16 ``[rows, fields]``, see :class:`.field_orders.FieldOrders`.
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
