"""Decorators that compile the planner's inner loops with numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])

# Bytes of a function's bytecode, about 15 lines.
_SMALL_BYTECODE = 300


def jit(function: F) -> F:
    """Compile with numba on first use and keep the machine code on disk.

    numba checks only the function's own file to see whether the code on disk is stale.
    After a change to a compiled function that another file calls, remove the
    ``__pycache__`` folders below ``planner``.
    """
    compiled: F = numba.njit(cache=True)(function)
    return compiled


def jit_without_gil(function: F) -> F:
    """Compile a function that several threads may run at once."""
    compiled: F = numba.njit(cache=True, nogil=True)(function)
    return compiled


def jit_in_place(function: F) -> F:
    """Compile a function that changes arrays it is given and allocates none.

    This leaves out numba's reference counts. Passing a tuple of arrays to a function
    counts every one of them up and down, atomically, which took longer than the
    simulator's own work.

    Each call passes every array of the state, so that small functions take longer to
    compile as functions of their own than as part of their callers.
    """
    if len(function.__code__.co_code) < _SMALL_BYTECODE:
        return jit_inlined(function)
    compiled = numba.njit(cache=True, _nrt=False)(function)
    resolve = compiled.get_call_template

    def resolve_wide(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        return resolve(tuple(_wide(arg) for arg in args), kws)

    compiled.get_call_template = resolve_wide
    same: F = compiled
    return same


def jit_inlined(function: F) -> F:
    """:func:`jit_in_place` as part of its callers, for a function that one other calls."""
    compiled: F = numba.njit(cache=True, _nrt=False, inline="always")(function)
    return compiled


def _wide(arg: Any) -> Any:
    """The type of an argument. Without it, numba compiles a function for each constant and
    each size of integers that it is called with."""
    arg = numba.types.unliteral(arg)
    return numba.types.int64 if isinstance(arg, numba.types.Integer) else arg
