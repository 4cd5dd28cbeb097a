"""The KV of a dense batch: one tensor per layer, in which all rows end at one column.

Baton (4.1, 4.2) shapes the KV tensors anew for every query that joins. Here they are
allocated ahead: a row that joins is written so that it ends at the present column, a row
that leaves is overwritten by the last one, and the front that no row reaches is released.
Columns of a row are its tokens in order, so a sliding window, relative positions and ALiBi
need not know of the alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

# Free columns behind the rows after each move: an eighth of the width, and at least so many.
_MIN_SLACK = 32


@dataclass(frozen=True, slots=True)
class RowKv:
    """The KV of one row.

    layers: keys and values of each layer, ``[heads, length, head_dim]``.
    """

    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @property
    def length(self) -> int:
        """Tokens in it."""
        return int(self.layers[0][0].shape[1])

    def to(self, device: torch.device | str) -> RowKv:
        """A copy on another device, or this one if it is there."""
        return RowKv(
            [(keys.to(device), values.to(device)) for keys, values in self.layers]
        )


class Slab:
    """Rows of KV that end at :attr:`column`.

    Attributes:
        lengths: tokens of each row.
        front, column: the columns in use, ``[front, column)``.
        layers: keys and values of each layer, ``[rows, heads, columns, head_dim]``. Empty
            before the first row.
        max_rows, max_cells: rows are allocated ahead up to these, so that those that join
            one by one do not each copy all others. At first, none are.
        moved_bytes: of all copies within the tensors, so far.
        num_resized: how often the tensors became larger or smaller, so far.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.front = self.column = 0
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.max_rows = self.max_cells = 0
        self.moved_bytes = self.num_resized = 0

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Columns in use: the length of the longest row."""
        return self.column - self.front

    @property
    def allocated_cells(self) -> int:
        """Rows times columns of the tensors."""
        if not self.layers:
            return 0
        shape = self.layers[0][0].shape
        return int(shape[0] * shape[2])

    def insert(self, rows: Sequence[RowKv]) -> None:
        """Add rows behind the present ones (4.2, vector embedding)."""
        if not rows:
            return
        longest = max(row.length for row in rows)
        if not self.lengths:
            self.front = self.column = 0
        self._fit(len(self) + len(rows), max(longest, self.width), rows[0])
        for row in rows:
            at, begin = len(self), self.column - row.length
            for (keys, values), (new_keys, new_values) in zip(
                self.layers, row.layers, strict=True
            ):
                keys[at, :, begin : self.column] = new_keys
                values[at, :, begin : self.column] = new_values
            self.lengths.append(row.length)
        self.front = min(self.front, self.column - longest)

    def remove(self, row: int, *, wipe: bool = False) -> None:
        """Remove a row. The last row takes its place.

        Args:
            wipe: its KV is not finite. What is masked is still multiplied by zero, and
                so must be finite.
        """
        last = len(self) - 1
        for keys, values in self.layers:
            if wipe:
                keys[row], values[row] = 0, 0
            if row != last:
                begin = self.column - self.lengths[last]
                for tensor in (keys, values):
                    tensor[row, :, begin : self.column] = tensor[
                        last, :, begin : self.column
                    ]
                    self.moved_bytes += tensor[last, :, begin : self.column].nbytes
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self.release()

    def row(self, row: int, device: torch.device | str = "cpu") -> RowKv:
        """A copy of a row's KV, on a device."""
        columns = slice(self.column - self.lengths[row], self.column)
        return RowKv(
            [
                (
                    keys[row, :, columns].to(device, copy=True),
                    values[row, :, columns].to(device, copy=True),
                )
                for keys, values in self.layers
            ]
        )

    def release(self) -> None:
        """Release the front that no row reaches (4.1), and memory if much of it is free."""
        self.front = self.column - max(self.lengths, default=0)
        if not self.lengths:
            self.layers = []
            self.front = self.column = 0
            return
        rows, columns = len(self), self.width + slack(self.width)
        if 2 * rows * columns < self.allocated_cells:
            # There is no room for both sizes at once: a later call tries again.
            with suppress(torch.OutOfMemoryError):
                self._reallocate(rows, columns)

    def make_room(self) -> None:
        """Have a free column behind the rows, for the next token of each."""
        if self.layers and self.column == self._columns:
            self._fit(len(self), self.width + 1, None)

    def advance(self) -> None:
        """Each row has one more token, which was written at :attr:`column`."""
        self.column += 1
        self.lengths = [length + 1 for length in self.lengths]

    def mask(self) -> torch.Tensor:
        """1 at the tokens of each row and the next one, ``[rows, width + 1]`` of int64."""
        device = self.layers[0][0].device
        lengths = torch.tensor(self.lengths, device=device)
        columns = torch.arange(self.width + 1, device=device)
        return (columns >= self.width - lengths[:, None]).long()

    @property
    def _columns(self) -> int:
        """Of the smallest layer: they differ after memory ran out."""
        return min(int(keys.shape[2]) for keys, _ in self.layers)

    @property
    def _rows(self) -> int:
        return min(int(keys.shape[0]) for keys, _ in self.layers)

    def _fit(self, rows: int, width: int, like: RowKv | None) -> None:
        """Have so many rows, and a width up to the column with one free behind it."""
        if not self.layers:
            assert like is not None
            self.column = width
            self.front = width
            self._allocate(rows, width + slack(width), like)
            return
        columns = width + slack(width)
        if rows > self._rows:
            self._resize(rows, max(self._columns, columns), width)
        elif self.column < width or self.column == self._columns:
            if columns > self._columns:
                self._resize(rows, columns, width)
            else:
                self._shift(width)

    def _resize(self, rows: int, columns: int, column: int) -> None:
        """Have tensors of this size, with up to half as many rows again as far as the
        limits and the memory allow: the rows of a batch join one by one."""
        most = min(rows * 3 // 2, self.max_rows, self.max_cells // columns)
        if rows <= self._rows:
            most = min(most, self._rows)  # more of them were not needed so far
        if most > rows:
            with suppress(torch.OutOfMemoryError):
                self._reallocate(most, columns, column)
                return
        self._reallocate(rows, columns, column)

    def _shift(self, column: int) -> None:
        """Move all rows within the tensors, so that they end at another column."""
        begin = column - self.width
        for pair in self.layers:
            for tensor in pair:
                used = tensor[: len(self), :, self.front : self.column].clone()
                tensor[: len(self), :, begin:column] = used
                self.moved_bytes += used.nbytes
        self.front, self.column = begin, column

    def _allocate(self, rows: int, columns: int, like: RowKv) -> None:
        self.layers = [
            (
                _zeros(rows, columns, keys),
                _zeros(rows, columns, values),
            )
            for keys, values in like.layers
        ]

    def _reallocate(self, rows: int, columns: int, column: int | None = None) -> None:
        """Move all rows to tensors of another size, one layer at a time.

        If memory runs out, all layers still end at one column.

        Args:
            column: where they end there, by default at their width.
        """
        column = self.width if column is None else column
        begin = column - self.width
        rows = max(rows, len(self))
        self.num_resized += 1
        for number, (keys, values) in enumerate(self.layers):
            try:
                moved = (
                    self._moved(keys, rows, columns, begin),
                    self._moved(values, rows, columns, begin),
                )
            except torch.OutOfMemoryError:
                if self.column > columns:
                    # The layers before are too small to go back: the others follow.
                    self._slide(self.layers[number:], self.front, begin)
                    break
                self._slide(self.layers[:number], begin, self.front)
                raise
            self.layers[number] = moved
        self.front, self.column = begin, column

    def _moved(
        self, tensor: torch.Tensor, rows: int, columns: int, begin: int
    ) -> torch.Tensor:
        """The columns in use in a tensor of another size, where they start at ``begin``."""
        used = tensor[: len(self), :, self.front : self.column]
        new = tensor.new_zeros(rows, tensor.shape[1], columns, tensor.shape[3])
        new[: len(self), :, begin : begin + self.width] = used
        self.moved_bytes += used.nbytes
        return new

    def _slide(
        self,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        begin: int,
        to: int,
    ) -> None:
        """Move the columns in use within tensors, a row at a time: memory is short."""
        width = self.width
        for tensor in (tensor for pair in layers for tensor in pair):
            for row in tensor[: len(self)]:
                row[:, to : to + width] = row[:, begin : begin + width].clone()
                self.moved_bytes += row[:, :width].nbytes


def slack(width: int) -> int:
    """Free columns that are allocated behind rows of this width."""
    return max(_MIN_SLACK, width // 8)


def _zeros(rows: int, columns: int, like: Any) -> torch.Tensor:
    heads, _, head_dim = like.shape
    return torch.zeros(
        rows, heads, columns, head_dim, dtype=like.dtype, device=like.device
    )
