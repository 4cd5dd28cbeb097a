"""Products of pairs of bfloat16 in compiled code, by a processor that has them (AVX-512 BF16).

It multiplies 32 pairs of bfloat16 at once and adds each two neighbours to a float32. numba knows
neither the type nor the instruction.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils
from numba.extending import intrinsic

# Not where numba is told to compile for another processor.
HAS_PAIRS = numba.config.CPU_NAME is None and bool(
    get_host_cpu_features().get("avx512bf16")
)

_INT, _LONG = ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), 16)
_INTS = ir.VectorType(_INT, 16)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


_PAIRS = ir.VectorType(_BFloat(), 32)
_ADD = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])


class _Code:
    """LLVM code for vectors in memory, at addresses in integers."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._add = cgutils.get_or_insert_function(
            builder.module, _ADD, "llvm.x86.avx512bf16.dpbf16ps.512"
        )

    def load(self, at: Any, kind: ir.Type) -> Any:
        pointer = self._builder.inttoptr(at, kind.as_pointer())
        return self._builder.load(pointer, align=4)

    def store(self, value: Any, at: Any) -> None:
        pointer = self._builder.inttoptr(at, value.type.as_pointer())
        self._builder.store(value, pointer, align=4)

    def pairs(self, at: Any) -> Any:
        """The 16 pairs at an address."""
        return self._builder.bitcast(self.load(at, _INTS), _PAIRS)

    def pair(self, at: Any) -> Any:
        """The pair at an address, 16 times."""
        none = ir.Constant(_INTS, ir.Undefined)
        one = self._builder.insert_element(none, self.load(at, _INT), _INT(0))
        all_ = self._builder.shuffle_vector(one, none, ir.Constant(_INTS, [0] * 16))
        return self._builder.bitcast(all_, _PAIRS)

    def add(self, total: Any, pairs: Any, others: Any) -> None:
        """Add products to a vector of sums that is a variable."""
        found = self._builder.call(
            self._add, [self._builder.load(total), pairs, others]
        )
        self._builder.store(found, total)


@intrinsic
def add_pairs(  # type: ignore[no-untyped-def]
    _typing, row0, row1, row2, row3, row_step, columns, sums, step, number, vectors
):
    """Add products of four rows of pairs and of columns to four rows of sums.

    Args:
        row0, row1, row2, row3: addresses of the first pairs, and ``row_step`` bytes behind
            each is the row's next one.
        columns: address of ``[number, lanes]`` pairs.
        sums: address of ``[4, lanes]`` float32.
        step: bytes between two rows of ``columns``, and of ``sums``.
        number: pairs of each row.
        vectors: of 16 lanes.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        *rows, row_step, columns, sums, step, number, vectors = arguments
        code = _Code(builder)

        def add(first: Any, count: int) -> None:
            """The sums of so many vectors, which stay in registers."""
            offsets = [
                builder.mul(builder.add(first, _LONG(j)), _LONG(64))
                for j in range(count)
            ]
            places = [
                [
                    builder.add(builder.add(sums, builder.mul(step, _LONG(i))), offset)
                    for offset in offsets
                ]
                for i in range(4)
            ]
            totals = [
                [cgutils.alloca_once(builder, _FLOATS) for _ in row] for row in places
            ]
            for row, held in zip(places, totals, strict=True):
                for at, total in zip(row, held, strict=True):
                    builder.store(code.load(at, _FLOATS), total)
            with cgutils.for_range(builder, number, intp=_LONG) as loop:
                begin = builder.add(columns, builder.mul(loop.index, step))
                pairs = [code.pairs(builder.add(begin, offset)) for offset in offsets]
                behind = builder.mul(loop.index, row_step)
                for row, held in zip(rows, totals, strict=True):
                    pair = code.pair(builder.add(row, behind))
                    for total, column in zip(held, pairs, strict=True):
                        code.add(total, column, pair)
            for row, held in zip(places, totals, strict=True):
                for at, total in zip(row, held, strict=True):
                    code.store(builder.load(total), at)

        with cgutils.for_range(
            builder, builder.udiv(vectors, _LONG(2)), intp=_LONG
        ) as loop:
            add(builder.mul(loop.index, _LONG(2)), 2)
        with builder.if_then(builder.trunc(vectors, ir.IntType(1))):
            add(builder.sub(vectors, _LONG(1)), 1)
        return context.get_dummy_value()

    address = numba.types.intp
    return numba.types.void(*[address] * 10), generate
