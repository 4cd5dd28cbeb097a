"""Offline batch inference on SGLang."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lang.frame_job import map_table
    from .lang.ray_processor import PlannedProcessor
    from .lang.streamer import AnswerColumns, StreamAnswer, Streamer, stream

__version__ = "0.1.0"
__all__ = [
    "AnswerColumns",
    "PlannedProcessor",
    "StreamAnswer",
    "Streamer",
    "__version__",
    "map_table",
    "stream",
]

# Imported when they are first used: this package is imported everywhere.
_PLACES = dict.fromkeys(__all__, "lang.streamer") | {"map_table": "lang.frame_job"}
_PLACES["PlannedProcessor"] = "lang.ray_processor"


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)


# Earlier names of modules and of what users import from them, for one release.
_MOVED = {"demo_model": ("run.demo_model", ("write_demo_model", "write_real_model"))}


class _Moved(ModuleType):
    """A module under its earlier name, which imports the present one when it is used."""

    def __getattr__(self, name: str) -> Any:
        place, names = _MOVED[self.__name__.rpartition(".")[2]]
        if name not in names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        warnings.warn(
            f"{self.__name__} is now {__name__}.{place}; the old name works for one "
            "release.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(import_module(f".{place}", __name__), name)


for _name in _MOVED:
    sys.modules[f"{__name__}.{_name}"] = _Moved(f"{__name__}.{_name}")
