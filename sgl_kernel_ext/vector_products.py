"""Products of rows and vectors of lanes in compiled code, whose sums stay in registers.

Where the processor multiplies pairs of bfloat16 (AVX-512 BF16), it adds the products of two
numbers to a float32; numba knows neither the type nor the instruction. Other values are float32.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils
from numba.extending import intrinsic

_features = get_host_cpu_features() if numba.config.CPU_NAME is None else {}
HAS_PAIRS = bool(_features.get("avx512bf16"))
# Rows that are multiplied at a time, by two vectors of so many lanes: their sums fit the registers
# and are enough to hide the latency of the instruction.
ROWS, _LANES = (8, 16) if _features.get("avx512f") else (4, 8)
# Rows and columns of a square that is transposed at once.
SQUARE = 16

_INT, _LONG = ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_INTS = ir.VectorType(_INT, _LANES)
_SQUARE_ROW = ir.VectorType(_INT, SQUARE)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


_PAIRS = ir.VectorType(_BFloat(), 2 * _LANES)


class _Code:
    """LLVM code for vectors in memory, at addresses in integers.

    pairs: values are pairs of bfloat16, else float32.
    """

    def __init__(self, builder: Any, pairs: bool) -> None:
        self._builder = builder
        self._kind = _PAIRS if pairs else _FLOATS
        name = "x86.avx512bf16.dpbf16ps.512" if pairs else f"fmuladd.v{_LANES}f32"
        given = [_FLOATS, _PAIRS, _PAIRS] if pairs else [_FLOATS] * 3
        self._add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, given), f"llvm.{name}"
        )
        self._pairs = pairs

    def load(self, at: Any, kind: ir.Type) -> Any:
        pointer = self._builder.inttoptr(at, kind.as_pointer())
        return self._builder.load(pointer, align=4)

    def store(self, value: Any, at: Any) -> None:
        pointer = self._builder.inttoptr(at, value.type.as_pointer())
        self._builder.store(value, pointer, align=4)

    def vector(self, at: Any) -> Any:
        """The values of all lanes at an address."""
        return self._builder.bitcast(self.load(at, _INTS), self._kind)

    def value(self, at: Any) -> Any:
        """The value at an address, in all lanes."""
        none = ir.Constant(_INTS, ir.Undefined)
        one = self._builder.insert_element(none, self.load(at, _INT), _INT(0))
        all_ = self._builder.shuffle_vector(one, none, ir.Constant(_INTS, [0] * _LANES))
        return self._builder.bitcast(all_, self._kind)

    def add(self, total: Any, value: Any, vector: Any) -> None:
        """Add products to a vector of sums that is a variable."""
        held = self._builder.load(total)
        given = [held, vector, value] if self._pairs else [vector, value, held]
        self._builder.store(self._builder.call(self._add, given), total)


def _products(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Code of :func:`multiply_rows`, and of :func:`add_rows`, which has factors."""
    rows, gap, row_step, columns, step, sums, number, lanes, *factors = arguments[1:]
    code = _Code(builder, signature.args[0].dtype != numba.types.float32)

    def multiply(first: Any, count: int) -> None:
        """The products of so many vectors."""
        offsets = [
            builder.mul(builder.add(first, _LONG(j)), _LONG(4 * _LANES))
            for j in range(count)
        ]
        starts, places, totals = [], [], []
        for i in range(ROWS):
            row = builder.add(sums, builder.mul(step, _LONG(i)))
            starts.append(builder.add(rows, builder.mul(gap, _LONG(i))))
            places.append([builder.add(row, offset) for offset in offsets])
            totals.append([cgutils.alloca_once(builder, _FLOATS) for _ in offsets])
            for offset, at, total in zip(offsets, places[i], totals[i], strict=True):
                begin = ir.Constant(_FLOATS, None)
                for factor in factors:
                    by = code.load(builder.add(factor, offset), _FLOATS)
                    begin = builder.fmul(code.load(at, _FLOATS), by)
                builder.store(begin, total)
        with cgutils.for_range(builder, number, intp=_LONG) as loop:
            column = builder.add(columns, builder.mul(loop.index, step))
            vectors = [code.vector(builder.add(column, offset)) for offset in offsets]
            behind = builder.mul(loop.index, row_step)
            for start, held in zip(starts, totals, strict=True):
                value = code.value(builder.add(start, behind))
                for total, vector in zip(held, vectors, strict=True):
                    code.add(total, value, vector)
        for row, held in zip(places, totals, strict=True):
            for at, total in zip(row, held, strict=True):
                code.store(builder.load(total), at)

    vectors = builder.udiv(lanes, _LONG(_LANES))
    halves = builder.udiv(vectors, _LONG(2))
    with cgutils.for_range(builder, halves, intp=_LONG) as loop:
        multiply(builder.mul(loop.index, _LONG(2)), 2)
    with builder.if_then(builder.trunc(vectors, ir.IntType(1))):
        multiply(builder.sub(vectors, _LONG(1)), 1)
    return context.get_dummy_value()


_ADDRESS = numba.types.intp


@intrinsic
def multiply_rows(  # type: ignore[no-untyped-def]
    _typing, like, rows, gap, row_step, columns, step, sums, number, lanes
):
    """Products of ``ROWS`` rows of values and of columns.

    Args:
        like: an array, of uint16 if the values are pairs of bfloat16, else float32.
        rows: address of the first value of the first row. The other rows begin ``gap`` bytes
            behind one another, and the values of a row are ``row_step`` bytes apart.
        columns: address of ``[number, lanes]`` values.
        step: bytes between two rows of ``columns``, and of ``sums``.
        sums: address of ``[ROWS, lanes]`` float32, the result.
        number: values of each row.
        lanes: a multiple of 16.
    """
    return numba.types.void(like, *[_ADDRESS] * 8), _products


@intrinsic
def add_rows(  # type: ignore[no-untyped-def]
    _typing, like, rows, gap, row_step, columns, step, sums, number, lanes, factors
):
    """As :func:`multiply_rows`, added to the sums times the factors of their lanes.

    factors: address of ``[lanes]`` float32.
    """
    return numba.types.void(like, *[_ADDRESS] * 9), _products


@intrinsic
def transpose(_typing, rows, gap, columns, step):  # type: ignore[no-untyped-def]
    """Transpose 16 rows of 16 values of 32 bits.

    rows: address of the first. The others begin ``gap`` bytes behind one another.
    columns: address of the result, whose rows begin ``step`` bytes behind one another.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        rows, gap, columns, step = arguments
        code, each = _Code(builder, False), range(SQUARE)
        places = [builder.add(rows, builder.mul(gap, _LONG(i))) for i in each]
        held = [code.load(at, _SQUARE_ROW) for at in places]
        for distance in (8, 4, 2, 1):
            # Exchange the values off the diagonal of squares of twice the distance.
            low = [j - distance + SQUARE if j & distance else j for j in each]
            high = [j + SQUARE if j & distance else j + distance for j in each]
            masks = [ir.Constant(_SQUARE_ROW, mask) for mask in (low, high)]
            for i in (i for i in each if not i & distance):
                two = held[i], held[i + distance]
                held[i], held[i + distance] = (
                    builder.shuffle_vector(*two, mask) for mask in masks
                )
        for i, column in enumerate(held):
            code.store(column, builder.add(columns, builder.mul(step, _LONG(i))))
        return context.get_dummy_value()

    return numba.types.void(*[_ADDRESS] * 4), generate
