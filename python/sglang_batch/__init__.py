"""Offline batch inference on SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .frames.frame_job import map_table
    from .streams.answer_columns import AnswerColumns
    from .streams.stream_rows import StreamAnswer
    from .streams.streamer import Streamer, stream

__version__ = "0.1.0"
__all__ = [
    "AnswerColumns",
    "StreamAnswer",
    "Streamer",
    "__version__",
    "map_table",
    "stream",
]

# Imported when they are first used: this package is imported everywhere.
_PLACES = {
    "AnswerColumns": "streams.answer_columns",
    "StreamAnswer": "streams.stream_rows",
    "Streamer": "streams.streamer",
    "map_table": "frames.frame_job",
    "stream": "streams.streamer",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
