"""An event loop whose clock jumps to the next timer: hours of waiting take no time.

With the same seeds, a run is the same to the last step: threads of the default executor run
inline.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class _Clock(selectors.SelectSelector):
    """Waits for nothing, and moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("everything waits for something else")
            self.now += max(timeout, 0.0)
        return ready


class _Inline(ThreadPoolExecutor):
    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, from 0."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        self.set_default_executor(_Inline())

    def time(self) -> float:
        return self._clock.now


def run_virtually(work: Coroutine[Any, Any, T], most_s: float) -> T:
    """Run to the end.

    Raises:
        TimeoutError: it takes longer than ``most_s`` seconds of the virtual clock.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(asyncio.wait_for(work, most_s))
    finally:
        leftover = asyncio.all_tasks(loop)
        for task in leftover:
            task.cancel()
        if leftover:
            loop.run_until_complete(asyncio.wait(leftover))
        loop.close()
