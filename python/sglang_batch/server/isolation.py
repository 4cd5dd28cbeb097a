"""Lines that may take the engine down: they run with no other batch's lines in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from .batch_run import BatchRun

# Why a batch sends nothing: another one is alone in the engine, or it has to be alone
# itself and is not.
ALONE = "lines of another batch are tried alone"
NOT_ALONE = "its lines wait to be tried alone"
CHECK_EVERY_S = 0.05


class Isolation:
    """Gives the engine to the suspects of one batch at a time.

    A batch that is paused gives the engine back until it may continue.

    Args:
        runs: all batches at work by their ids, changed by the runner.
    """

    def __init__(self, runs: Mapping[str, BatchRun]) -> None:
        self._runs = runs
        self._alone: BatchRun | None = None

    def admit(self, run: BatchRun) -> None:
        """Have a new batch wait if another one is alone in the engine."""
        if self._alone is not None:
            run.limit.pause(ALONE)

    @asynccontextmanager
    async def alone(self, batch_id: str) -> AsyncIterator[None]:
        """A block during which the engine has no line of any other batch.

        If the engine dies, it is clear which lines did it. A batch that has to stop
        does not wait.
        """
        run = self._runs[batch_id]
        lending = None
        try:
            await self._take(run)
            lending = asyncio.create_task(self._lend_while_paused(run))
            yield
        finally:
            if lending is not None:
                lending.cancel()
                await asyncio.wait({lending})
            self._give_back(run)

    async def _take(self, run: BatchRun) -> None:
        """Wait until the engine has only this batch, or the batch has to stop."""
        run.limit.pause(NOT_ALONE)
        stop = run.stop.event
        while (self._alone or run.pauses) and not stop.is_set():
            await asyncio.sleep(CHECK_EVERY_S)
        if stop.is_set():
            return
        self._alone = run
        others = [other for other in self._runs.values() if other is not run]
        for other in others:
            other.limit.pause(ALONE)
        while any(o.engine.in_flight for o in others) and not stop.is_set():
            await asyncio.sleep(CHECK_EVERY_S)
        run.limit.resume(NOT_ALONE)

    def _give_back(self, run: BatchRun) -> None:
        run.limit.resume(NOT_ALONE)
        if self._alone is run:
            self._alone = None
            for other in self._runs.values():
                other.limit.resume(ALONE)

    async def _lend_while_paused(self, run: BatchRun) -> None:
        """Give the engine to the other batches whenever this one is paused."""
        while not run.stop.event.is_set():
            await asyncio.sleep(CHECK_EVERY_S)
            if run.pauses and not run.engine.in_flight:
                self._give_back(run)
                await self._take(run)
