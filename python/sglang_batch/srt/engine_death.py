"""Tells who asks when a process of the engine died, before this one is ended too.

SGLang's scheduler sends its parent SIGQUIT when it fails, and SGLang's watchdog does
when a process is gone without a word. The handler ends all processes: what is not on
disk by then is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_listeners: list[Callable[[], None]] = []


def listen(listener: Callable[[], None]) -> None:
    """Have ``listener`` called, on the event loop, when the engine has died."""
    _listeners.append(listener)


def tell(*_args: Any, **_kwargs: Any) -> None:
    """BEFORE hook on SGLang's handler of SIGQUIT."""
    for listener in _listeners:
        try:
            listener()
        except Exception:
            logger.exception("What the engine was doing could not be written down")
