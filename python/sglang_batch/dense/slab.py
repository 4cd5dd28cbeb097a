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
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

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
            wipe: its KV is not finite, and masked KV is still multiplied by zero.
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
        columns = width + slack(width)
        if not self.layers:
            assert like is not None
            self.front = self.column = width
            self.layers = [
                (
                    keys.new_zeros(rows, keys.shape[0], columns, keys.shape[2]),
                    values.new_zeros(rows, values.shape[0], columns, values.shape[2]),
                )
                for keys, values in like.layers
            ]
            return
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
        self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], begin: int, to: int
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


class SlabCache(Cache):  # type: ignore[misc]
    """Takes one token of each row per forward pass, and gives attention views of the slab."""

    def __init__(self, slab: Slab) -> None:
        layers = [SlabLayer(slab, number) for number in range(len(slab.layers))]
        super().__init__(layers=layers)


class SlabLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer. Also for layers with a sliding window, whose mask is all they need."""

    is_sliding = False

    def __init__(self, slab: Slab, number: int) -> None:
        super().__init__()
        self._slab = slab
        self._number = number
        self.is_initialized = True

    def lazy_initialization(self, key_states: object, value_states: object) -> None:
        """The slab has the tensors already."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token of each row, ``[rows, heads, 1, head_dim]``. Returns keys and
        values of all columns in use, ``[rows, heads, width + 1, head_dim]``.
        """
        slab = self._slab
        keys, values = slab.layers[self._number]
        rows, at = len(slab), slab.column
        keys[:rows, :, at : at + 1] = key_states
        values[:rows, :, at : at + 1] = value_states
        used = slice(slab.front, at + 1)
        return keys[:rows, :, used], values[:rows, :, used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slab.width + query_length, 0

    def get_seq_length(self) -> int:
        return self._slab.width

    def get_max_length(self) -> int:
        """No limit: the slab makes room before the step."""
        return -1


class EncodedCache(Cache):  # type: ignore[misc]
    """The KV of encoded prompts in a slab, which decoding only reads."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        super().__init__(
            layers=[EncodedLayer(slab, n) for n in range(len(slab.layers))]
        )

    def refresh(self) -> None:
        """Show the columns that are in use now."""
        slab = self._slab
        rows, used = slice(len(slab)), slice(slab.front, slab.column)
        for layer, (keys, values) in zip(self.layers, slab.layers, strict=True):
            layer.keys, layer.values = keys[rows, :, used], values[rows, :, used]


class EncodedLayer(SlabLayer):
    """One layer, whose keys and values are ``[rows, heads, width, head_dim]``."""

    def update(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError("The prompts of running rows are encoded already.")


ATTENTION = "dense_rows"
# Rows attend one by one if they see less than this share of rows times columns: then the
# cells that nobody sees cost more than further calls.
_SPARSE = 0.4


def register_attention() -> None:
    """Make the attention known to transformers as :data:`NAME`."""
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' ``sdpa``, of one new token per row over a masked slab.

    transformers repeats the heads of keys and values where there is a mask. Here the query
    heads that share a KV head become its rows. On a CPU, rows that see little of a wide slab
    attend one by one, each to the columns that it sees.

    Args:
        query: ``[rows, heads, new tokens, head_dim]``.
        key, value: ``[rows, KV heads, columns, head_dim]``.
        attention_mask: broadcast to ``[rows, heads, new tokens, columns]``.

    Returns:
        ``[rows, new tokens, heads, head_dim]``, and None for the weights.
    """
    rows, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    plain = kwargs.get("position_bias") is None and not kwargs.get("dropout")
    if tokens > 1 or not plain:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return found
    folded = query.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    seen = _columns_seen(attention_mask)
    if seen is not None:
        parts = [
            scaled_dot_product_attention(
                folded[row : row + 1],
                key[row : row + 1, :, -count:],
                value[row : row + 1, :, -count:],
                scale=scaling,
            )
            for row, count in enumerate(seen)
        ]
        out = torch.cat(parts)
    else:
        if attention_mask is not None and attention_mask.shape[1] == heads:
            attention_mask = attention_mask.reshape(*folded.shape[:3], -1)
        out = scaled_dot_product_attention(
            folded, key, value, attn_mask=attention_mask, scale=scaling
        )
    return out.reshape(rows, 1, heads, out.shape[-1]), None


def _columns_seen(mask: torch.Tensor | None) -> list[int] | None:
    """How many of the last columns each row sees, or None if all rows shall attend at once.

    A sliding window hides columns in front too, so this holds for it as well.
    """
    if (
        mask is None
        or mask.device.type != "cpu"
        or mask.dtype != torch.bool
        or mask.shape[1] != 1
    ):
        return None
    return _sparse(mask)


@lru_cache(maxsize=1)  # all layers of a step have the same mask
def _sparse(mask: torch.Tensor) -> list[int] | None:
    mask = mask[:, 0, 0]
    rows, columns = mask.shape
    counts = mask.sum(-1)
    at_end = mask.int().argmax(-1) == columns - counts
    if int(counts.sum()) >= _SPARSE * rows * columns or not bool(at_end.all()):
        return None
    seen: list[int] = counts.tolist()
    return seen if min(seen) > 0 else None
