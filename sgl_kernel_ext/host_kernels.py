"""What kernels for a CPU share: numba's settings, values of both dtypes, and threads."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic, overload

logger = logging.getLogger(__name__)

# The values of tensors, by dtype, as numba reads them: it has no bfloat16.
DTYPES = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}

_LINE = 64  # bytes that a cache loads at once

# Not all of fastmath: values may be infinite, or no numbers.
_MATH: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy",
}  # fmt: skip
jit: Callable[..., Any] = numba.njit(cache=True, nogil=True, **_MATH)
inlined: Callable[..., Any] = numba.njit(cache=True, inline="always", **_MATH)
# Exceptions are lost within the ``prange`` of these.
parallel: Callable[..., Any] = numba.njit(cache=True, nogil=True, parallel=True)


@inlined
def negative_exp(x):  # type: ignore[no-untyped-def]
    """e to the power of a float32 of 0 or less, within 2e-7, in vector instructions."""
    x = max(x, np.float32(-87.0)) * np.float32(math.log2(math.e))
    whole = np.floor(x + np.float32(0.5))
    f = (x - whole) * np.float32(math.log(2))
    power = np.float32(1 / 120) + f * np.float32(1 / 720)
    power = np.float32(1 / 6) + f * (np.float32(1 / 24) + f * power)
    power = np.float32(1) + f * (np.float32(1) + f * (np.float32(0.5) + f * power))
    return power * np.int32((np.int32(whole) + np.int32(127)) << 23).view(np.float32)


def as_float(x: Any) -> Any:
    """A value as float32, also from the bits of a bfloat16."""
    raise NotImplementedError("only compiled code calls it")


@overload(as_float, inline="always")
def _compiled_as_float(x):  # type: ignore[no-untyped-def]
    if x == numba.types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def rounded(x: Any, to: Any) -> Any:
    """A float32 as a value of an array ``to``, which has the bits of a bfloat16 or float32s."""
    raise NotImplementedError("only compiled code calls it")


@overload(rounded, inline="always")
def _compiled_rounded(x, to):  # type: ignore[no-untyped-def]
    if to.dtype != numba.types.uint16:
        return lambda x, to: x

    def round_to_even(x, to):  # type: ignore[no-untyped-def]
        bits = np.float32(x).view(np.uint32)
        even = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        up = np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
        no_number = np.uint32(0) - np.uint32(x != x)  # all bits or none
        kept = up & ~no_number
        return np.uint16(kept | (no_number & np.uint32(0x7FC0)))

    return round_to_even


@intrinsic
def prefetch(_typing, address):  # type: ignore[no-untyped-def]
    """Start to load the cache line at an address that is read soon, into the second level."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        load = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        at = builder.inttoptr(arguments[0], byte)
        builder.call(load, [at, number(0), number(2), number(1)])
        return context.get_dummy_value()

    return numba.types.void(numba.types.intp), generate


@inlined
def prefetch_heads(  # type: ignore[no-untyped-def]
    cache, slots, begin, end, head, part, parts
):
    """Load a KV head at one of so many parts of the positions into the processor's caches."""
    number, first = end - begin, cache.ctypes.data + head * cache.strides[1]
    for i in range(
        begin + number * part // parts, begin + number * (part + 1) // parts
    ):
        at = first + np.int64(slots[np.uint64(i)]) * cache.strides[0]
        for line in range(at, at + cache.shape[2] * cache.itemsize, _LINE):
            prefetch(line)


def array(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor of a dtype in ``DTYPES`` as numba reads it, without a copy."""
    bits = DTYPES[x.dtype]
    if x.requires_grad:
        x = x.detach()
    found: np.ndarray[Any, Any] = (x if bits == x.dtype else x.view(bits)).numpy()
    return found


@cache
def _most_threads() -> int:
    """Threads that kernels may have: one where numba finds no OpenMP library."""
    if numba.config.THREADING_LAYER == "default":
        # Another layer ends the process if two threads of Python call kernels at a time.
        numba.config.THREADING_LAYER = "threadsafe"
    try:
        numba.set_num_threads(1)
    except ValueError:
        logger.warning(
            "numba finds no OpenMP library: attention and layers run on one thread. "
            "Install libgomp1 (Debian, Ubuntu) or libgomp (Fedora, RHEL)."
        )
        return 1
    return int(numba.config.NUMBA_NUM_THREADS)


def in_parts(
    kernel: Callable[..., None],
    parts: Callable[..., None],
    given: tuple[Any, ...],
    rows: int,
    most: int,
    done: np.ndarray[Any, Any] | None = None,
) -> None:
    """Call a kernel for all rows, or for ranges of them in as many threads as torch has.

    Args:
        kernel: gets the first and the end of its rows after ``given``.
        parts: calls the kernel for the rows between each two of an array of places, which it
            gets after ``given``, in threads.
        most: threads that the work is worth.
        done: ``[rows]``, the work up to the end of each row. None if all rows are alike.
    """
    number = min(torch.get_num_threads(), rows, most)
    if number > 1:
        number = min(number, _most_threads())
    if number <= 1:
        kernel(*given, 0, rows)
        return
    cuts = np.arange(number + 1) * rows // number
    if done is not None:
        cuts[1:-1] = np.searchsorted(done, done[-1] * np.arange(1, number) / number)
    numba.set_num_threads(number)
    parts(*given, cuts)
