"""Runs the batches of a server: which of them now, which first, and until when.

Each batch is a :class:`~sglang_batch.batch_run.BatchRun`. Several run at a time; the
engine shares itself among them by priority. Whatever status a killed server left
behind, the next one goes on from there.
"""

from __future__ import annotations

import asyncio
import datetime
import errno
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from .batch_api import protocol as api
from .batch_api.jsonl import LineError
from .batch_run import BatchRun
from .config import OfflineBatchConfig
from .engine import Engine
from .errors import StoreError, StoreWriteError
from .history import Rate
from .request import parse_request_id
from .retention import collect
from .send_limit import EngineShare
from .service_log import ProgressLog
from .store.batch_store import BatchStore, Row, now
from .store.lock import FileLock
from .turns import RISEN, Turn, priorities, to_start

logger = logging.getLogger(__name__)

# How often the runner looks for new batches and cancellations.
POLL_S = 0.5
# How often files that are past their time are removed.
COLLECT_EVERY_S = 60.0
# How long a server that starts waits for another one to let go of the store.
LOCK_PATIENCE_S = 1.0
# A batch that stops with an error of the server, not of its own, is tried again.
MAX_ATTEMPTS = 3
RETRY_AFTER_S = 10.0
# Why a batch sends nothing: lines that may take the engine down are tried.
ALONE = "lines of another batch are tried alone"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

RateOf = Callable[[str], Rate | None]


class BatchRunner:
    """Runs the batches of a store; of all processes that try, one at a time does.

    Args:
        server_name: tells this server from another one on the same directory; the
            same in all its processes.
        closing: says when the server is going down; no more requests are sent from
            then on, and what is unfinished stays for the next server.
        rate_of: how fast a batch goes on, by its id.

    Attributes:
        share: of the engine; waves have their part of it too.
    """

    def __init__(
        self,
        store: BatchStore,
        config: OfflineBatchConfig,
        server_name: str,
        engine: Engine,
        closing: Callable[[], bool],
        rate_of: RateOf = lambda batch_id: None,
    ) -> None:
        self.store = store
        self._config = config
        self._server_name = server_name
        self._engine = engine
        self._closing = closing
        self._rate_of = rate_of
        most = None
        if config.batch_share < 1:
            most = int(config.batch_share * engine.max_running_requests)
        self.share = EngineShare(most)
        self._lock = FileLock(store.directory / "lock")
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._attempts: Counter[str] = Counter()
        self._done_at_failure: dict[str, int] = {}
        self._collecting: asyncio.Task[Any] | None = None
        self._risen: set[str] = set()
        self._num_retries = 0
        self._alone: BatchRun | None = None
        self._polling: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._collected_at = 0.0
        self._progress = ProgressLog()

    async def start(self) -> None:
        """Begin to run batches, those of an earlier server first.

        Raises:
            StoreError: another server runs the batches of this directory.
        """
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while (holder := self._lock.acquire(self._server_name)) not in (
            None,
            self._server_name,
        ):
            # A process of this very server may hold it and not have said so yet.
            if time.monotonic() < deadline:
                await asyncio.sleep(LOCK_PATIENCE_S / 10)
                continue
            raise StoreError(
                f"{self.store.directory} is in use by another server ({holder}); "
                "give each server its own --offline-batch-dir."
            )
        self._loop = asyncio.get_running_loop()
        self._polling = asyncio.create_task(self._poll())

    def wake(self) -> None:
        """Have the runner look now, not at its next poll; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def stop(self) -> None:
        """Stop running; aborted requests are run again by the next server."""
        if self._collecting is not None:
            await asyncio.wait({self._collecting})
        tasks = [task for task in (self._polling, *self._tasks.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lock.release()

    @property
    def num_retries(self) -> int:
        """How often lines were sent again, since the start."""
        at_work = sum(run.tries.num_retries for run in self._runs.values())
        return self._num_retries + at_work

    @property
    def num_in_engine(self) -> int:
        """Lines that are in the engine, of all batches."""
        return sum(len(run.tries.in_flight) for run in self._runs.values())

    def engine_died(self, request_ids: Iterable[str] = ()) -> None:
        """The engine is gone and this process with it: note who may have done it.

        request_ids: all that the engine had, online requests' too.
        """
        if self._closing():
            return  # it was told to go
        jobs = (parse_request_id(rid)[0] for rid in request_ids)
        num_others = sum(job not in self._runs for job in jobs)
        num_lines = self.num_in_engine
        for run in self._runs.values():
            run.blame(num_lines, num_others)

    async def _poll(self) -> None:
        while True:
            self._woken.clear()
            try:
                if self._lock.acquire(self._server_name) is None:
                    await self._look_around()
            except Exception:
                # A busy database, say. Other batches must not stand still for it.
                logger.exception("Looking for batches failed; trying again")
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()

    async def _look_around(self) -> None:
        rows = self.store.batches_in(api.ACTIVE_STATUSES)
        closing = self._closing()
        for row in rows:
            batch_id = row["id"]
            if batch_id not in self._runs and not closing:
                self._begin(batch_id)
            if batch_id in self._runs:
                self._stop_if_due(self._runs[batch_id], row, closing)
        if not closing:
            await self._give_turns(rows)
            self._set_limits()
        for row in rows:
            if row["status"] == api.IN_PROGRESS:
                self._progress.tick(row, self._rate_of(row["id"]))
        if time.monotonic() - self._collected_at > COLLECT_EVERY_S:
            self._collected_at = time.monotonic()
            if self._collecting is None or self._collecting.done():
                work = asyncio.to_thread(collect, self.store, self._config, now())
                self._collecting = asyncio.create_task(work)
                self._collecting.add_done_callback(_report)

    def _begin(self, batch_id: str) -> None:
        run = BatchRun(
            batch_id,
            self.store,
            self._config,
            self._engine,
            self._alone_in_engine,
            POLL_S,
            self.wake,
        )
        if self._alone is not None:
            run.limit.hold(ALONE)
        self._runs[batch_id] = run
        self._tasks[batch_id] = asyncio.create_task(self._process(run))

    @staticmethod
    def _stop_if_due(run: BatchRun, row: Row, closing: bool) -> None:
        if row["status"] == api.CANCELLING:
            run.stop.set(api.CANCELLED)
        elif now() >= row["expires_at"] and row["status"] != api.FINALIZING:
            run.stop.set(api.EXPIRED)
        elif closing:
            run.stop.set(None)

    async def _process(self, run: BatchRun) -> None:
        batch_id = run.batch_id
        try:
            await run.process()
            if run.row()["status"] not in api.ACTIVE_STATUSES:
                run.clean_up()
                self._attempts.pop(batch_id, None)
                self._done_at_failure.pop(batch_id, None)
                self._risen.discard(batch_id)
        except Exception as error:
            await self._retry_or_fail(run, error)
        finally:
            self._progress.forget(batch_id)
            self._num_retries += run.tries.num_retries
            del self._runs[batch_id], self._tasks[batch_id]
            self.wake()  # it may be the turn of another

    async def _retry_or_fail(self, run: BatchRun, error: Exception) -> None:
        """After an error of the server: again, a few times, from where it stopped."""
        batch_id = run.batch_id
        run.may_run.clear()
        row = run.row()
        done = row["completed"] + row["failed"]
        if done > self._done_at_failure.get(batch_id, -1):
            self._attempts[batch_id] = 0  # it goes on, if in pieces
        self._done_at_failure[batch_id] = done
        if is_write_error(error):
            run.pauses.set("disk", f"Its files cannot be written: {error}")
            await asyncio.sleep(RETRY_AFTER_S)
            run.pauses.set("disk", None)
            return
        self._attempts[batch_id] += 1
        if self._attempts[batch_id] < MAX_ATTEMPTS:
            logger.error(
                "Batch %s stopped; trying again soon", batch_id, exc_info=error
            )
            await asyncio.sleep(RETRY_AFTER_S)
            return
        logger.error("Batch %s failed", batch_id, exc_info=error)
        errors = [LineError("internal_error", str(error))]
        try:
            await run.give_up(errors)
            run.clean_up()
        except Exception:
            where = self.store.work_dir(batch_id)
            logger.exception(
                "What batch %s had finished is left in %s", batch_id, where
            )
            run.fail(errors)

    # Turns ----------------------------------------------------------------------------

    async def _give_turns(self, rows: list[Row]) -> None:
        """Start the batches whose turn it is, and tell the engine who goes first."""
        turns = [turn for row in rows if (turn := self._turn(row)) is not None]
        priority = priorities(turns, now())
        for batch_id, value in priority.items():
            if value == RISEN and batch_id not in self._risen:
                self._risen.add(batch_id)
                logger.warning(
                    "Batch %s may miss its window; it goes before others now", batch_id
                )
        # SGLang's own scheduler knows no jobs: beside each other they would only mix.
        stock = self._config.scheduler == "stock"
        most = 1 if stock else self._config.max_batches
        runs = dict(self._runs)  # some may end meanwhile
        for batch_id in to_start(turns, priority, most):
            runs[batch_id].may_run.set()
            self._set_limits()  # before it sends anything
        for batch_id, value in priority.items():
            await runs[batch_id].set_priority(value)

    def _turn(self, row: Row) -> Turn | None:
        """A batch as one that could run; None for one that is not there yet."""
        run = self._runs.get(row["id"])
        if run is None or run.num_left is None or row["status"] != api.IN_PROGRESS:
            return None
        rate = self._rate_of(row["id"])
        return Turn(
            row["id"],
            row["seq"],
            row["priority"],
            row["expires_at"],
            run.num_left,
            0.0 if rate is None else rate.lines_per_s,
            running=run.may_run.is_set(),
            risen=row["id"] in self._risen,
        )

    def _set_limits(self) -> None:
        """Batches run in their hours, and in their share of the engine."""
        config = self._config
        running = [run for run in self._runs.values() if run.may_run.is_set()]
        self.share.set_batches([run.limit for run in running])
        hours = None
        if not in_hours(config.hours, local_minute()):
            hours = f"Batches of this server run from {config.batch_hours} only."
        for run in running:
            run.pauses.set("hours", hours)

    # Suspects -------------------------------------------------------------------------

    @asynccontextmanager
    async def _alone_in_engine(self, run: BatchRun) -> AsyncIterator[None]:
        """For lines that may take the engine down: no line of another batch is there.

        So if it goes down, it is known for what. A batch that is to stop does not wait.
        """
        stop = run.stop.event
        while (self._alone or "hours" in run.pauses) and not stop.is_set():
            await asyncio.sleep(POLL_S / 10)
        if stop.is_set():
            yield
            return
        self._alone = run
        others = [other for other in self._runs.values() if other is not run]
        for other in others:
            other.limit.hold(ALONE)
        try:
            while any(other.tries.in_flight for other in others) and not stop.is_set():
                await asyncio.sleep(POLL_S / 10)
            yield
        finally:
            self._alone = None
            for other in self._runs.values():
                other.limit.release(ALONE)


def is_write_error(error: Exception) -> bool:
    """Whether there was no room on the disk, or no permission: not the batch's fault."""
    return (
        isinstance(error, StoreWriteError)
        or (isinstance(error, OSError) and error.errno in NO_ROOM)
        or getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
    )


def _report(work: asyncio.Task[Any]) -> None:
    if not work.cancelled() and work.exception() is not None:
        logger.error("Old files could not be removed", exc_info=work.exception())


def local_minute() -> int:
    """The local time of day in minutes."""
    at = datetime.datetime.now()
    return 60 * at.hour + at.minute


def in_hours(hours: tuple[int, int] | None, minute: int) -> bool:
    """Whether a minute of the day is in ``hours``, which may go past midnight."""
    if hours is None:
        return True
    begin, end = hours
    if begin < end:
        return begin <= minute < end
    return minute >= begin or minute < end
