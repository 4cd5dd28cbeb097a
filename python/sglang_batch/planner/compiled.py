"""Decorators that compile the planner's inner loops with numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


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
    """
    compiled: F = numba.njit(cache=True, _nrt=False)(function)
    return compiled
