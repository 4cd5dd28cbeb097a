"""The orders of a table's fields, found from its rows or from a sample of them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

# Values (rows times fields) that are kept, and characters of the different ones. Tables
# with more are sampled.
MAX_VALUES = 20_000_000
MAX_CHARS = 256_000_000


# The order of the fields of a row, by its number, the text before its fields, and their
# texts, all as JSON without quotes. It depends on the texts alone.
OrderOfRow = Callable[[int, str, Sequence[str]], Sequence[int]]


class FieldSaving(msgspec.Struct, frozen=True):
    """What the order of the fields saves, found from ``sampled`` of the rows.

    The bytes are those of text that prompts do not share with their beginnings,
    ``own_bytes`` with the fields in the template's order. Text around the fields is
    left out.
    """

    rows: int
    sampled: int
    own_bytes: int
    bytes: int

    def __str__(self) -> str:
        sample = ""
        if self.sampled < self.rows:
            sample = f", by a sample of {self.sampled:,} rows"
        return (
            f"{self.bytes:,} bytes of different beginnings, {self.own_bytes:,} in the "
            f"template's order{sample}"
        )


class FieldSample:
    """Every row of a table, or every second, fourth, ... of one that is larger."""

    def __init__(
        self,
        num_fields: int,
        *,
        head: bool,
        max_values: int = MAX_VALUES,
        max_chars: int = MAX_CHARS,
    ) -> None:
        self._head = head
        self._width = num_fields + head
        self._max_rows = max(max_values // self._width, 2)
        self._max_chars = max_chars
        self._step = 1
        self._seen = 0
        self._clear()

    def add(self, head: str, fields: Sequence[str]) -> None:
        if self._seen % self._step == 0:
            num_rows = len(self._values) // self._width
            if num_rows >= self._max_rows or self._chars > self._max_chars:
                values, numbered = self._values, [list(texts) for texts in self._texts]
                self._clear()
                for start in range(0, len(values), 2 * self._width):
                    row = zip(
                        numbered, values[start : start + self._width], strict=True
                    )
                    self._keep([texts[number] for texts, number in row])
                self._step *= 2
            if self._seen % self._step == 0:
                self._keep([head, *fields] if self._head else fields)
        self._seen += 1

    def orders(self) -> tuple[OrderOfRow, FieldSaving]:
        """The orders of rows, and the tokens that they save."""
        from ..planner.fields.field_orders import OrderTree, field_orders
        from ..planner.fields.field_table import text_table

        values = np.array(self._values, np.int32).reshape(-1, self._width)
        first = int(self._head)
        texts = [
            [text.encode() for text in found]
            if field < first
            # A text is written as JSON without quotes.
            else [
                json.loads(f'"{text}"').encode("utf-8", "surrogatepass")
                for text in found
            ]
            for field, found in enumerate(self._texts)
        ]
        sampled = self._step > 1
        found = field_orders(
            text_table(values, texts), head=self._head, to_follow=sampled
        )
        saving = FieldSaving(self._seen, len(values), found.own_weight, found.weight)
        if not sampled:
            by_row = found.orders[:, first:] - first
            return (lambda number, head, fields: by_row[number].tolist()), saving
        tree = OrderTree(values, found.orders)

        def order(number: int, head: str, fields: Sequence[str]) -> Sequence[int]:
            row = [head, *fields] if self._head else fields
            known = [
                texts.get(text, -1)
                for texts, text in zip(self._texts, row, strict=True)
            ]
            return [field - first for field in tree.order(known)[first:]]

        return order, saving

    def _clear(self) -> None:
        self._values = array("i")  # row by row
        self._texts: list[dict[str, int]] = [{} for _ in range(self._width)]
        self._chars = 0

    def _keep(self, row: Sequence[str]) -> None:
        for texts, text in zip(self._texts, row, strict=True):
            value = texts.setdefault(text, len(texts))
            self._values.append(value)
            if value == len(texts) - 1:  # new, or seen last
                self._chars += len(text)


def compile_field_orders() -> None:
    """Have numba compile what finds orders, which it keeps on disk."""
    sample = FieldSample(3, head=False)
    for i in range(300):  # more than are split in the simple ways
        sample.add("", [f"{i}", f"{i % 7}", f"{i % 5}"])
    sample.orders()
