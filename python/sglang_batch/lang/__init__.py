"""Batches from a user's program.

SGLang's frontend programs (``@sgl.function``) run as offline batches with

    from sglang_batch.lang import BatchBackend

See :mod:`sglang_batch.lang.batch_backend`. There are also streams of rows
(:mod:`sglang_batch.lang.streamer`) and tables (:mod:`sglang_batch.lang.frame_job`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch_backend import BatchBackend
    from .program_runner import EarlierError
    from .waves import RequestError

__all__ = ["BatchBackend", "EarlierError", "RequestError"]

# Imported when they are first used: streams and tables do without SGLang.
_PLACES = {
    "BatchBackend": "batch_backend",
    "EarlierError": "program_runner",
    "RequestError": "waves",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
