"""Names of the environment that an engine's processes read when they start."""

from __future__ import annotations

import os

# Those that are not the user's.
_ours: set[str] = set()


def set_default(name: str, value: str) -> None:
    """Set a name, unless the user did, until the engine ends."""
    if name not in os.environ:
        os.environ[name] = value
        _ours.add(name)


def forget_defaults() -> None:
    """An engine of this process has ended. The next one may be SGLang's own."""
    for name in _ours:
        os.environ.pop(name, None)
    _ours.clear()
