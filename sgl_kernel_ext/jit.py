"""The one way this package compiles a host function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compile with numba on first use and keep the machine code on disk.

    numba looks only at the file of the function itself to see whether the code on
    disk is stale, so a compiled function calls only functions of its own file.
    """
    compiled: F = numba.njit(cache=True)(function)
    return compiled
