"""Work beside a server's calls: in threads, again and again, and with results as they come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Like ``asyncio.to_thread``, but even if cancelled it waits for the thread.

    Otherwise the thread could work on files that are closed, or on a store that
    belongs to another server by then.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


@dataclass(eq=False)
class Repeated:
    """Calls ``work`` every ``every_s`` seconds. If it fails, its ``name`` is logged."""

    work: Callable[[], Awaitable[object]]
    every_s: float
    name: str
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """Cancel the call in progress, and wait for its end."""
        if self._task is not None:
            self._task.cancel()
            # Awaiting the task itself could swallow the cancellation of this one.
            await asyncio.wait({self._task})

    async def _repeat(self) -> None:
        while True:
            try:
                await self.work()
            except Exception:
                # A busy database, say. The next call will do.
                logger.exception("%s failed", self.name)
            await asyncio.sleep(self.every_s)


async def as_they_come(
    found: asyncio.Queue[T | None], work: Coroutine[Any, Any, object]
) -> AsyncGenerator[T]:
    """The items that ``work`` puts into a queue, until it ends. Leaving early cancels it."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda _: found.put_nowait(None))
    try:
        while (item := await found.get()) is not None:
            yield item
        await task
    finally:
        task.cancel()
