"""SIGINT and SIGTERM, which stop a job: the first in order, a second one at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopSignals:
    """Create it before SGLang's engine, which replaces the handler of SIGTERM.

    Attributes:
        received: whether a signal came in a :meth:`setting` block.
    """

    def __init__(self) -> None:
        self.received = False
        signums = (signal.SIGINT, signal.SIGTERM)
        self._handlers = {each: signal.getsignal(each) for each in signums}

    @contextmanager
    def setting(
        self, stop: asyncio.Event, on_stop: Callable[[], None]
    ) -> Iterator[None]:
        """Set ``stop`` at the first signal.

        The second one, and any after the block, has the handler from before the engine.

        Args:
            on_stop: called on the event loop at the first signal.
        """
        loop = asyncio.get_running_loop()

        def handle(signum: int, frame: object) -> None:
            self._restore()
            # At once, since the loop may learn of dead processes first.
            self.received = True
            loop.call_soon_threadsafe(on_stop)
            loop.call_soon_threadsafe(stop.set)

        for signum in self._handlers:
            # SGLang has one for SIGTERM, which would wait for all requests.
            loop.remove_signal_handler(signum)
            signal.signal(signum, handle)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
