"""The slab against a list of tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from sglang_batch.dense.slab import RowKv, Slab, slack

# Heads and head_dim of the keys, and head_dim of the values, of each layer.
LAYERS = ((2, 3, 3), (1, 4, 2))


def kv(length: int, seed: int) -> RowKv:
    generator = torch.Generator().manual_seed(seed)
    return RowKv(
        [
            (
                torch.randn(heads, length, of_key, generator=generator),
                torch.randn(heads, length, of_value, generator=generator),
            )
            for heads, of_key, of_value in LAYERS
        ]
    )


def equal(one: RowKv, other: RowKv) -> bool:
    return all(
        torch.equal(keys, other_keys) and torch.equal(values, other_values)
        for (keys, values), (other_keys, other_values) in zip(
            one.layers, other.layers, strict=True
        )
    )


def joined(first: RowKv, second: RowKv) -> RowKv:
    return RowKv(
        [
            (torch.cat([keys, more_keys], 1), torch.cat([values, more_values], 1))
            for (keys, values), (more_keys, more_values) in zip(
                first.layers, second.layers, strict=True
            )
        ]
    )


class Model:
    """A slab, and the same rows one by one in plain tensors."""

    def __init__(self) -> None:
        self.slab = Slab()
        self.rows: list[RowKv] = []
        self.num_drawn = 0

    def drawn(self, length: int) -> RowKv:
        self.num_drawn += 1
        return kv(length, self.num_drawn)

    def insert(self, *lengths: int) -> None:
        new = [self.drawn(length) for length in lengths]
        self.slab.insert(new)
        self.rows += new

    def remove(self, row: int, *, broken: bool = False) -> None:
        if broken:
            begin = self.slab.column - self.slab.lengths[row]
            for keys, values in self.slab.layers:
                keys[row, :, begin : self.slab.column] = torch.nan
                values[row, :, begin : self.slab.column] = torch.nan
        self.slab.remove(row, wipe=broken)
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def step(self) -> None:
        """One more token for each row."""
        if not self.rows:
            return
        self.slab.make_room()
        new = [self.drawn(1) for _ in self.rows]
        for row, token in enumerate(new):
            for (keys, values), (new_keys, new_values) in zip(
                self.slab.layers, token.layers, strict=True
            ):
                keys[row, :, self.slab.column] = new_keys[:, 0]
                values[row, :, self.slab.column] = new_values[:, 0]
        self.slab.advance()
        self.rows = [
            joined(row, token) for row, token in zip(self.rows, new, strict=True)
        ]

    def check(self) -> None:
        slab = self.slab
        assert slab.lengths == [row.length for row in self.rows]
        assert len(slab) == len(self.rows)
        assert slab.width == max(slab.lengths, default=0)
        if not self.rows:
            assert slab.allocated_cells == 0
            return
        mask = slab.mask()
        for number, row in enumerate(self.rows):
            assert equal(slab.row(number), row)
            dead = slab.width - row.length
            assert mask[number].tolist() == [0] * dead + [1] * (row.length + 1)
        for keys, values in slab.layers:
            used = slice(slab.front, slab.column)
            for tensor in (keys, values):
                assert slab.column <= tensor.shape[2]
                assert tensor[: len(slab), :, used].isfinite().all()


ACTIONS = st.one_of(
    st.tuples(st.just("insert"), st.lists(st.integers(1, 90), min_size=1, max_size=3)),
    st.tuples(st.just("steps"), st.integers(1, 45)),
    st.tuples(st.just("remove"), st.integers(0, 5)),
    st.tuples(st.just("remove_broken"), st.integers(0, 5)),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(ACTIONS, max_size=14))
def test_any_sequence_of_changes_keeps_the_kv_of_every_row(
    actions: list[tuple[str, int | list[int]]],
) -> None:
    model = Model()
    for name, value in actions:
        if isinstance(value, list):
            model.insert(*value)
        elif name == "steps":
            for _ in range(value):
                model.step()
        elif model.rows:
            model.remove(value % len(model.rows), broken=name == "remove_broken")
        model.check()


def test_rows_move_to_the_front_when_the_column_reaches_the_end() -> None:
    model = Model()
    model.insert(100, *[60] * 7)
    columns = 100 + slack(100)
    model.remove(0)
    moved = model.slab.moved_bytes
    while model.slab.column < columns:
        model.step()
    assert model.slab.moved_bytes == moved
    model.step()
    model.check()
    assert model.slab.column < columns
    assert model.slab.width == 60 + slack(100) + 1
    assert model.slab.moved_bytes > moved
    assert model.slab.allocated_cells == 8 * columns


def test_a_row_that_does_not_end_makes_the_slab_grow() -> None:
    model = Model()
    model.insert(5)
    before = model.slab.allocated_cells
    for _ in range(300):
        model.step()
    model.check()
    assert model.slab.allocated_cells > before
    # Each move pays for the steps until the next one.
    of_one_move = model.slab.row(0)
    held = sum(keys.nbytes + values.nbytes for keys, values in of_one_move.layers)
    assert model.slab.moved_bytes <= 9 * held


@pytest.mark.parametrize("length", [3, 150], ids=["shorter", "longer"])
def test_a_row_joins_without_a_change_to_the_others(length: int) -> None:
    model = Model()
    model.insert(40, 12)
    for _ in range(5):
        model.step()
    model.insert(length)
    model.check()
    model.step()
    model.check()


@pytest.mark.parametrize("max_cells", [1 << 40, 1000], ids=["rows", "cells"])
def test_rows_that_join_one_by_one_are_copied_a_few_times_only(max_cells: int) -> None:
    model = Model()
    model.slab.max_rows, model.slab.max_cells = 32, max_cells
    columns = 20 + slack(20)
    for count in range(1, 33):
        model.insert(20)
        ahead = min(32, max_cells // columns)
        cells = model.slab.allocated_cells
        assert cells <= max(count, min(ahead, count * 3 // 2)) * columns
    model.check()
    # To 3, 6, 10, 16, 25 and 32 rows. Beyond 19, 1000 cells leave none to spare.
    assert model.slab.num_resized == (6 if max_cells > 1000 else 5 + 13)


def test_spare_rows_are_kept_when_the_slab_grows_in_width() -> None:
    model = Model()
    model.slab.max_rows, model.slab.max_cells = 32, 1 << 40
    for _ in range(4):
        model.insert(9)
    while model.slab.num_resized < 3:  # the third time for want of columns
        model.step()
    model.insert(5, 6)
    model.check()
    assert model.slab.num_resized == 3


@pytest.mark.parametrize("number", range(2 * len(LAYERS)))
def test_rows_join_without_spare_ones_where_memory_is_short(number: int) -> None:
    model = Model()
    model.slab.max_rows, model.slab.max_cells = 32, 1 << 40
    model.insert(30, 20, 10)
    with OutOfMemoryAt(number) as memory:
        model.insert(25)
    assert memory.left < 0
    model.check()
    assert model.slab.allocated_cells == 4 * (30 + slack(30))
    model.step()
    model.check()


def test_a_wiped_row_leaves_no_nan_where_later_rows_have_dead_cells() -> None:
    model = Model()
    model.insert(80, 6)
    model.remove(0, broken=True)
    model.check()
    for keys, values in model.slab.layers:
        assert keys.isfinite().all()
        assert values.isfinite().all()
    # The front moves left again, over the cells of the row that was wiped.
    model.insert(80)
    model.check()


def test_memory_is_released_with_the_rows_that_needed_it() -> None:
    model = Model()
    model.insert(400, 8, 9, 10)
    wide = model.slab.allocated_cells
    model.remove(0)
    model.check()
    assert model.slab.allocated_cells <= 3 * (10 + slack(10))
    assert model.slab.allocated_cells < wide / 10
    for _ in range(3):
        model.remove(0)
    assert model.slab.allocated_cells == 0
    model.insert(7)
    model.check()


def test_a_random_long_life_keeps_every_row() -> None:
    drawn = random.Random(5)
    model = Model()
    for _ in range(600):
        if len(model.rows) < 6 and drawn.random() < 0.1:
            model.insert(drawn.randint(1, 120))
        if model.rows and drawn.random() < 0.08:
            row = drawn.randrange(len(model.rows))
            model.remove(row, broken=drawn.random() < 0.3)
        model.step()
    model.check()


def test_a_copy_of_a_row_does_not_change_with_the_slab() -> None:
    model = Model()
    model.insert(5, 9)
    copy, expected = model.slab.row(1), model.rows[1]
    model.step()
    model.remove(1, broken=True)
    assert equal(copy, expected)
    assert equal(copy.to("cpu"), expected)


class OutOfMemoryAt(TorchFunctionMode):  # type: ignore[misc]
    """Of the allocations of whole tensors, one fails: the one with this number, from 0."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.new_zeros:
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError("no memory for another tensor")
        return func(*args, **(kwargs or {}))


def longer(model: Model) -> None:
    model.insert(300)


def another(model: Model) -> None:
    model.insert(2)


def last_column(model: Model) -> None:
    while True:
        model.step()


def fewer(model: Model) -> None:
    model.remove(0)


@pytest.mark.parametrize("number", range(2 * len(LAYERS)))
@pytest.mark.parametrize("change", [longer, another, last_column, fewer])
def test_rows_are_kept_when_memory_runs_out_between_two_layers(
    change: Callable[[Model], None], number: int
) -> None:
    model = Model()
    model.insert(200, 30, 8)
    for _ in range(3):
        model.step()
    with OutOfMemoryAt(number) as memory:
        if change is fewer:
            change(model)
        else:
            with pytest.raises(torch.OutOfMemoryError):
                change(model)
    assert memory.left == -1
    model.check()
    for _ in range(50):
        model.step()
    model.insert(90, 400)
    model.step()
    model.check()
    model.remove(0)
    model.remove(0)
    model.check()
