"""Products of rows and vectors of lanes in compiled code, whose sums stay in registers.

Where the processor multiplies pairs of bfloat16 (AVX-512 BF16), it adds the products of two
numbers to a float32; numba knows neither the type nor the instruction. Other values are float32.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils
from numba.extending import intrinsic, overload

from .host_kernels import as_float, inlined

_features = get_host_cpu_features() if numba.config.CPU_NAME is None else {}
HAS_PAIRS = bool(_features.get("avx512bf16"))
# Rows that are multiplied at a time, by two vectors of so many lanes: their sums fit the registers
# and are enough to hide the latency of the instruction.
ROWS, LANES = (8, 16) if _features.get("avx512f") else (4, 8)
# Rows and columns of a square that is transposed at once.
SQUARE = 16

_INT, _LONG = ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_INT, LANES)
_SQUARE_ROW = ir.VectorType(_INT, SQUARE)
_ZEROS = ir.Constant(_FLOATS, None)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _halves(distance: int, lanes: int) -> list[list[int]]:
    """Of two vectors, by the places in both one after the other: what changes places, and what
    stays, when values exchange over a distance that is a power of two."""
    each = range(lanes)
    low = [j - distance + lanes if j & distance else j for j in each]
    high = [j + lanes if j & distance else j + distance for j in each]
    return [low, high]


class _Code:
    """LLVM code for vectors in memory, at addresses in integers.

    pairs: values are pairs of bfloat16, else float32.
    """

    def __init__(self, builder: Any, pairs: bool) -> None:
        self._builder = builder
        self._kind = _PAIRS if pairs else _FLOATS
        name = "x86.avx512bf16.dpbf16ps.512" if pairs else f"fmuladd.v{LANES}f32"
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
        all_ = self._builder.shuffle_vector(one, none, ir.Constant(_INTS, [0] * LANES))
        return self._builder.bitcast(all_, self._kind)

    def add(self, total: Any, value: Any, vector: Any) -> None:
        """Add products to a vector of sums that is a variable."""
        held = self._builder.load(total)
        given = [held, vector, value] if self._pairs else [vector, value, held]
        self._builder.store(self._builder.call(self._add, given), total)

    def variable(self, value: Any) -> Any:
        """A variable with a vector of float32."""
        place = cgutils.alloca_once(self._builder, _FLOATS)
        self._builder.store(value, place)
        return place

    def sums(self, vectors: list[Any]) -> Any:
        """The sum of each of as many vectors of float32 as one has lanes."""
        while len(vectors) > 1:
            distance = len(vectors) // 2
            masks = [ir.Constant(_INTS, mask) for mask in _halves(distance, LANES)]
            vectors = [
                self._builder.fadd(
                    *(self._builder.shuffle_vector(*two, mask) for mask in masks)
                )
                for two in zip(vectors[:distance], vectors[distance:], strict=True)
            ]
        return vectors[0]


def _products(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Code of :func:`multiply_rows`, and of :func:`add_rows`, which has factors."""
    rows, gap, row_step, columns, step, sums, number, lanes, *factors = arguments[1:]
    code = _Code(builder, signature.args[0].dtype != numba.types.float32)

    def multiply(first: Any, count: int) -> None:
        """The products of so many vectors."""
        offsets = [
            builder.mul(builder.add(first, _LONG(j)), _LONG(4 * LANES))
            for j in range(count)
        ]
        starts: list[Any] = []
        places: list[Any] = []
        totals: list[Any] = []
        for i in range(ROWS):
            row = builder.add(sums, builder.mul(step, _LONG(i)))
            starts.append(builder.add(rows, builder.mul(gap, _LONG(i))))
            places.append([builder.add(row, offset) for offset in offsets])
            totals.append([])
            for offset, at in zip(offsets, places[i], strict=True):
                begin = _ZEROS
                for factor in factors:
                    by = code.load(builder.add(factor, offset), _FLOATS)
                    begin = builder.fmul(code.load(at, _FLOATS), by)
                totals[i].append(code.variable(begin))
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

    vectors = builder.udiv(lanes, _LONG(LANES))
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
def multiply_places(_typing, like, places, column, sums, number):  # type: ignore[no-untyped-def]
    """Products of ``LANES`` rows, each somewhere in memory, and of a column.

    Args:
        like: as of :func:`multiply_rows`.
        places: address of the rows' addresses, int64 ``[LANES]``.
        column: address of its values.
        sums: address of ``[LANES]`` float32, the result.
        number: vectors of values of a row, and of the column.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, places, column, sums, number = arguments
        code = _Code(builder, signature.args[0].dtype != numba.types.float32)
        rows = [
            code.load(builder.add(places, _LONG(8 * i)), _LONG) for i in range(LANES)
        ]
        totals = [code.variable(_ZEROS) for _ in rows]
        with cgutils.for_range(builder, number, intp=_LONG) as loop:
            behind = builder.mul(loop.index, _LONG(4 * LANES))
            vector = code.vector(builder.add(column, behind))
            for row, total in zip(rows, totals, strict=True):
                code.add(total, code.vector(builder.add(row, behind)), vector)
        code.store(code.sums([builder.load(total) for total in totals]), sums)
        return context.get_dummy_value()

    return numba.types.void(like, *[_ADDRESS] * 4), generate


@intrinsic
def add_places(  # type: ignore[no-untyped-def]
    _typing, like, weights, places, number, sums, vectors, factor
):
    """Rows, each somewhere in memory, times their weights, added to sums times a factor.

    Args:
        like: as of :func:`multiply_rows`.
        weights: address of ``[number]`` values, one of each row.
        places: address of the rows' addresses, int64 ``[number]``.
        number: even.
        sums: address of ``vectors`` vectors of float32, and so many has a row.
        factor: float32.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, weights, places, number, sums, vectors, factor = arguments
        code = _Code(builder, signature.args[0].dtype != numba.types.float32)
        none = ir.Constant(_FLOATS, ir.Undefined)
        one = builder.insert_element(none, factor, _INT(0))
        factors = builder.shuffle_vector(one, none, ir.Constant(_INTS, [0] * LANES))

        def add(first: Any, count: int) -> None:
            offsets = [
                builder.mul(builder.add(first, _LONG(j)), _LONG(4 * LANES))
                for j in range(count)
            ]
            held = [builder.add(sums, offset) for offset in offsets]
            begun = [builder.fmul(code.load(at, _FLOATS), factors) for at in held]
            # Two sums of each vector, since a sum waits for the one before.
            totals = [
                [code.variable(x) for x in begun],
                [code.variable(_ZEROS) for _ in begun],
            ]
            with cgutils.for_range(
                builder, builder.udiv(number, _LONG(2)), intp=_LONG
            ) as loop:
                for i in range(2):
                    at = builder.add(builder.mul(loop.index, _LONG(2)), _LONG(i))
                    weight = code.value(builder.add(weights, builder.mul(at, _LONG(4))))
                    row = code.load(
                        builder.add(places, builder.mul(at, _LONG(8))), _LONG
                    )
                    for offset, total in zip(offsets, totals[i], strict=True):
                        code.add(total, weight, code.vector(builder.add(row, offset)))
            for at, *both in zip(held, *totals, strict=True):
                code.store(builder.fadd(*map(builder.load, both)), at)

        fours = builder.udiv(vectors, _LONG(4))
        with cgutils.for_range(builder, fours, intp=_LONG) as loop:
            add(builder.mul(loop.index, _LONG(4)), 4)
        done = builder.mul(fours, _LONG(4))
        with cgutils.for_range(builder, builder.sub(vectors, done), intp=_LONG) as loop:
            add(builder.add(done, loop.index), 1)
        return context.get_dummy_value()

    return numba.types.void(like, *[_ADDRESS] * 5, numba.types.float32), generate


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
            masks = [ir.Constant(_SQUARE_ROW, x) for x in _halves(distance, SQUARE)]
            for i in (i for i in each if not i & distance):
                two = held[i], held[i + distance]
                held[i], held[i + distance] = (
                    builder.shuffle_vector(*two, mask) for mask in masks
                )
        for i, column in enumerate(held):
            code.store(column, builder.add(columns, builder.mul(step, _LONG(i))))
        return context.get_dummy_value()

    return numba.types.void(*[_ADDRESS] * 4), generate


# Memory of such values.


def memory(q: Any, k: Any, v: Any, number: int) -> Any:
    """Memory for so many float32, or for as many pairs of bfloat16 if these are multiplied."""
    raise NotImplementedError("only compiled code calls it")


@overload(memory, inline="always")
def _compiled_memory(q, k, v, number):  # type: ignore[no-untyped-def]
    if HAS_PAIRS and q.dtype == k.dtype == v.dtype == numba.types.uint16:
        return lambda q, k, v, number: np.zeros(number, np.uint32)
    return lambda q, k, v, number: np.zeros(number, np.float32)


def numbers(memory: Any) -> Any:
    """The single numbers in such memory."""
    raise NotImplementedError("only compiled code calls it")


@overload(numbers, inline="always")
def _compiled_numbers(memory):  # type: ignore[no-untyped-def]
    if memory.dtype == numba.types.float32:
        return lambda memory: memory
    return lambda memory: memory.view(np.uint16)


def copy_values(values: Any, to: Any) -> None:
    """Copy values as float32, or the bits of bfloat16."""
    raise NotImplementedError("only compiled code calls it")


@overload(copy_values, inline="always")
def _compiled_copy(values, to):  # type: ignore[no-untyped-def]
    def copy_floats(values, to):  # type: ignore[no-untyped-def]
        for i in range(len(values)):
            to[i] = as_float(values[i])

    def copy_bits(values, to):  # type: ignore[no-untyped-def]
        for i in range(len(values)):
            to[i] = values[i]

    return copy_floats if to.dtype == numba.types.float32 else copy_bits


def put_values(first: Any, second: Any, to: Any, width: int) -> None:
    """Put two heads of V in two rows, or in one of pairs of bfloat16."""
    raise NotImplementedError("only compiled code calls it")


@overload(put_values, inline="always")
def _compiled_put_values(first, second, to, width):  # type: ignore[no-untyped-def]
    def put_rows(first, second, to, width):  # type: ignore[no-untyped-def]
        copy_values(first, to)
        copy_values(second, to[width:])

    def put_pairs(first, second, to, width):  # type: ignore[no-untyped-def]
        for i in range(len(first)):
            to[i] = pair(first[i], second[i])

    return put_rows if to.dtype == numba.types.float32 else put_pairs


@inlined
def pair(low, high):  # type: ignore[no-untyped-def]
    """Two bfloat16 as a processor multiplies them."""
    return np.uint32(low) | np.uint32(high) << np.uint32(16)
