"""Decorators that compile the planner's inner loops with numba."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import caching

PLANNER = Path(__file__).parent
# Modules without compiled functions that modules with some import.
PLAIN_MODULES = ("requests.py", "admission_rules/followers.py")

F = TypeVar("F", bound=Callable[..., object])

# Bytes of a function's bytecode, about 15 lines.
_SMALL_BYTECODE = 300


@cache
def sources_digest() -> str:
    """A hash of all modules that machine code of the planner comes from."""
    sources = {path: path.read_bytes() for path in sorted(PLANNER.rglob("*.py"))}
    plain = {PLANNER / name for name in PLAIN_MODULES}
    digest = hashlib.sha256()
    for path, source in sources.items():
        if path in plain or b"compiled import" in source:
            digest.update(source)
    return digest.hexdigest()[:16]


def _by_sources(locator: type[Any]) -> type[Any]:
    """A place for machine code that is left when any of the planner's sources changes.

    numba by itself looks only at a function's own file, so it would run old code of functions
    in other files, and fail where a type that was an argument is gone.
    """

    class Located(locator):  # type: ignore[misc]
        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            if PLANNER not in Path(py_file).parents:
                return None
            return super().from_function(py_func, py_file)

        def get_cache_path(self) -> str:
            return os.path.join(super().get_cache_path(), f"planner-{sources_digest()}")

        def get_source_stamp(self) -> str:
            return sources_digest()

        def ensure_cache_path(self) -> None:
            path = Path(self.get_cache_path())
            if not path.exists():
                for old in path.parent.glob("planner-*"):
                    shutil.rmtree(old, ignore_errors=True)
            super().ensure_cache_path()

    return Located


_located: list[type[Any]] = caching.CacheImpl._locator_classes
_located[:0] = map(_by_sources, _located[:3])  # given, beside the source, the user's


def _compiled(function: F, wide: bool = False, **options: Any) -> F:
    """A function that numba compiles on first use, whose machine code is kept on disk.

    Python calls one version of it. Compiled code takes its copy from another, without the
    wrapper by which Python calls, since numba takes long to compile wrappers.

    Args:
        wide: compiled code calls it with the types of :func:`_wide`.
    """
    from_python = numba.njit(cache=True, **options)(function)
    inner = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(
        function
    )

    def resolve(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        if wide:
            args = tuple(_wide(arg) for arg in args)
        return inner.get_call_template(args, kws)

    from_python.get_call_template = resolve
    from_python.get_overload = inner.get_overload
    same: F = from_python
    return same


def jit(function: F) -> F:
    """Compile with numba on first use and keep the machine code on disk."""
    return _compiled(function)


def jit_without_gil(function: F) -> F:
    """Compile a function that several threads may run at once."""
    return _compiled(function, nogil=True)


def jit_in_place(function: F) -> F:
    """Compile a function that changes arrays it is given and allocates none.

    This leaves out numba's reference counts. Passing a tuple of arrays to a function
    counts every one of them up and down, atomically, which took longer than the
    simulator's own work.

    Each call passes every array of the state, so that small functions take longer to
    compile as functions of their own than as part of their callers.
    """
    if len(function.__code__.co_code) < _SMALL_BYTECODE:
        small: F = numba.njit(cache=True, _nrt=False, inline="always")(function)
        return small
    return _compiled(function, wide=True, _nrt=False)


def _wide(arg: Any) -> Any:
    """The type of an argument. Without it, numba compiles a function for each constant and
    each size of integers that it is called with."""
    arg = numba.types.unliteral(arg)
    return numba.types.int64 if isinstance(arg, numba.types.Integer) else arg
