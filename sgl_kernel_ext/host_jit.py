"""Compilation of the functions that run on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compile with numba on first use and cache the machine code on disk.

    A compiled function may only call compiled functions of its own file: numba checks
    only that file to see whether the cached code is stale.
    """
    compiled: F = numba.njit(cache=True)(function)
    return compiled
