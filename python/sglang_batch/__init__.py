"""Offline batch inference on SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lang.frame_job import map_table
    from .lang.stream_rows import StreamAnswer
    from .lang.streamer import AnswerColumns, Streamer, stream

__version__ = "0.1.0"
# Modules that were moved are found under their earlier names, too.
_EARLIER = "sglang_batch.run.earlier"
__path__.append(__path__[0] + _EARLIER.removeprefix(__name__).replace(".", "/"))
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
    "AnswerColumns": "lang.streamer",
    "StreamAnswer": "lang.stream_rows",
    "Streamer": "lang.streamer",
    "map_table": "lang.frame_job",
    "stream": "lang.streamer",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
