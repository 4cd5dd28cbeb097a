"""Offline batch inference on SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .frames.frame_job import map_table

__all__ = ["map_table"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what is public when it is used first: this package is imported everywhere."""
    if name == "map_table":
        from .frames.frame_job import map_table

        return map_table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
