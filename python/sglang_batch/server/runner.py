"""Runs the batches of a server: which of them now, which first, and until when.

Each batch is a :class:`~sglang_batch.server.batch_run.BatchRun`. Several run at a time
and share the engine by priority. A batch that a killed server left in any status is
resumed by the next one.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from ..batch_api import protocol as api
from ..batch_api.jsonl import FileErrors
from ..config import OfflineBatchConfig
from ..errors import StoreError
from ..job.answer_cache import ModelAnswers
from ..job.engine import Engine
from ..job.inflight_limit import EngineShare
from ..request import parse_request_id
from ..store.batch_store import BatchStore, Row, now
from ..store.files import FileLock
from .access.usage import tokens_used_up
from .background import Repeated, in_thread
from .batch_run import BatchRun, RunnerHooks
from .bills import Bills
from .progress import ProgressLog, Rate
from .result_saver import is_write_error
from .retention import COLLECT_EVERY_S, collect
from .webhooks import Webhooks

logger = logging.getLogger(__name__)

# How often the runner looks for new batches and cancellations.
POLL_S = 0.5
# How long a starting server waits for another one to release the store.
LOCK_PATIENCE_S = 1.0
# How often a batch may fail through an error of the server, and the pause after each.
MAX_ATTEMPTS = 3
RETRY_AFTER_S = 10.0
# How long a server that ends waits for lines that run. Supervisors often kill after 30 s.
DRAIN_S = 20.0

ENGINE_PAUSED = (
    "The engine is paused by /pause_generation. It continues with /continue_generation."
)

WAITS_AGAIN = (
    "The limit of its API key was used up. There are tokens again, and it continues when "
    "one of the batches that run meanwhile has ended."
)

RateOf = Callable[[str], Rate | None]


@dataclass(eq=False)
class BatchRunner:
    """Runs the batches of a store.

    Of all processes that try, one at a time does. ``server_name`` identifies this
    server in all its processes. Once ``closing`` says that it shuts down, no more
    requests are sent, those that run have :data:`DRAIN_S` seconds to end, and
    unfinished batches wait for the next server. ``share`` is
    the part of the engine for batches and waves.
    """

    store: BatchStore
    config: OfflineBatchConfig
    server_name: str
    engine: Engine
    closing: Callable[[], bool]
    rate_of: RateOf = lambda batch_id: None
    answers: ModelAnswers | None = None

    def __post_init__(self) -> None:
        most = None
        if self.config.batch_share < 1:
            most = int(self.config.batch_share * self.engine.max_running_requests)
        self.share = EngineShare(most)
        self._lock = FileLock(self.store.directory / "lock")
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._isolation = Isolation(self._runs)
        self._bills = Bills(self.store, self.engine)
        # How often each batch failed through an error of the server, without progress,
        # and the results that it had then.
        self._failures: dict[str, tuple[int, int]] = {}
        self._collecting = Repeated(
            self._collect, COLLECT_EVERY_S, "Removing old files"
        )
        self.webhooks = Webhooks(self.store, self.config, self._is_its_turn)
        self._urgent: set[str] = set()
        self._num_retries = 0
        self._drained_by = 0.0
        self._polling: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._progress = ProgressLog()

    async def start(self) -> None:
        """Begin to run batches. Raises StoreError if another server runs those here."""
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while (holder := self._lock.acquire(self.server_name)) not in (
            None,
            self.server_name,
        ):
            # It may be a process of this server that has not written its name yet.
            if time.monotonic() < deadline:
                await asyncio.sleep(LOCK_PATIENCE_S / 10)
                continue
            raise StoreError(
                f"{self.store.directory} is in use by another server ({holder}). "
                "Give each server its own --offline-batch-dir."
            )
        self._loop = asyncio.get_running_loop()
        self._polling = asyncio.create_task(self._poll())
        self._collecting.start()
        self.webhooks.start()

    def wake(self) -> None:
        """Have the runner look now, not at its next poll. Any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def stop(self) -> None:
        """Stop running, once lines that run have had their time if the server is closing.
        The next server runs aborted requests again.
        """
        if self.closing() and self._tasks:
            self._woken.set()
            await asyncio.wait(self._tasks.values(), timeout=DRAIN_S)
        await self._collecting.stop()
        tasks = [task for task in (self._polling, *self._tasks.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.webhooks.stop()
        self._lock.release()

    @property
    def num_retries(self) -> int:
        """How often lines were sent again, since the start."""
        active = sum(run.engine.num_retries for run in self._runs.values())
        return self._num_retries + active

    @property
    def num_in_engine(self) -> int:
        """Lines that are in the engine, of all batches."""
        return sum(len(run.engine.in_flight) for run in self._runs.values())

    def engine_died(self, request_ids: Iterable[str] = ()) -> None:
        """Record which of these requests may have taken the engine down."""
        if self.closing():
            return  # it was told to stop
        jobs = (parse_request_id(rid)[0] for rid in request_ids)
        num_others = sum(job not in self._runs for job in jobs)
        num_lines = self.num_in_engine
        for run in self._runs.values():
            run.blame(num_lines, num_others)

    def _is_its_turn(self) -> bool:
        """Whether this process runs the batches, of those of its server."""
        return self._lock.acquire(self.server_name) is None

    async def _poll(self) -> None:
        while True:
            self._woken.clear()
            try:
                if self._is_its_turn():
                    await self._look_around()
            except Exception:
                # A busy database, say. The batches that run must not suffer from it.
                logger.exception("Looking for batches failed; trying again")
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()

    async def _collect(self) -> None:
        if self._is_its_turn():
            await in_thread(collect, self.store, self.config, now())

    async def _look_around(self) -> None:
        rows = self.store.batches_in(api.ACTIVE_STATUSES)
        closing = self.closing()
        if not closing:
            self._drained_by = time.monotonic() + DRAIN_S
        for row in rows:
            batch_id = row["id"]
            if batch_id not in self._runs and not closing:
                self._begin(batch_id)
            if batch_id in self._runs:
                run = self._runs[batch_id]
                if closing:
                    run.limit.pause("closing", recalls=True)
                waits = run.engine.in_flight and time.monotonic() < self._drained_by
                run.stop_if_due(row, closing and not waits)
        if not closing:
            # Why the batches of an owner send no more lines today, or None.
            owners = {row["owner"] for row in rows}
            used_up = {owner: tokens_used_up(self.store, owner) for owner in owners}
            await self._start_by_priority(rows, used_up)
            self._set_limits()
            self._set_pauses(rows, used_up)
        for row in rows:
            if row["status"] == api.IN_PROGRESS:
                self._progress.tick(row, self.rate_of(row["id"]))
        await self._bills.settle()

    def _begin(self, batch_id: str) -> None:
        run = BatchRun(
            batch_id,
            self.store,
            self.config,
            self.engine,
            self._bills.open(batch_id),
            RunnerHooks(
                partial(self._isolation.alone, batch_id),
                self.wake,
                partial(self._bills.settle, at_once=True),
                POLL_S,
            ),
            self.answers,
        )
        self._isolation.admit(run)
        self._runs[batch_id] = run
        self._tasks[batch_id] = asyncio.create_task(self._process(run))

    async def _process(self, run: BatchRun) -> None:
        batch_id = run.batch_id
        try:
            try:
                await run.process()
                if self._is_over(batch_id):
                    run.clean_up()
            except Exception as error:
                if not self._is_over(batch_id):
                    await self._retry_or_fail(run, error)
            if self._is_over(batch_id):
                self._failures.pop(batch_id, None)
                self._urgent.discard(batch_id)
        finally:
            self._progress.forget(batch_id)
            self._num_retries += run.engine.num_retries
            self._bills.ended(batch_id)
            del self._runs[batch_id], self._tasks[batch_id]
            self.wake()  # another batch may start in its place

    def _is_over(self, batch_id: str) -> bool:
        """Whether a batch has ended. Its client may have deleted it since."""
        row = self.store.get_batch(batch_id)
        return row is None or row["status"] not in api.ACTIVE_STATUSES

    async def _retry_or_fail(self, run: BatchRun, error: Exception) -> None:
        """After an error of the server, run the batch again, but only a few times."""
        batch_id = run.batch_id
        run.may_run.clear()
        row = run.row()
        num_done = row["completed"] + row["failed"]
        num_failures, before = self._failures.get(batch_id, (0, -1))
        num_failures = 0 if num_done > before else num_failures
        self._failures[batch_id] = num_failures, num_done
        if is_write_error(error):
            run.pauses.set("disk", f"Its files cannot be written: {error}")
            await asyncio.sleep(RETRY_AFTER_S)
            run.pauses.set("disk", None)
            return
        self._failures[batch_id] = num_failures + 1, num_done
        if num_failures + 1 < MAX_ATTEMPTS:
            logger.error(
                "Batch %s stopped with an error; trying again in %g seconds",
                batch_id,
                RETRY_AFTER_S,
                exc_info=error,
            )
            await asyncio.sleep(RETRY_AFTER_S)
            return
        logger.error("Batch %s failed", batch_id, exc_info=error)
        errors = FileErrors.of("internal_error", str(error))
        try:
            await run.give_up(errors)
            run.clean_up()
        except Exception:
            logger.exception(
                "The finished lines of batch %s could not be read; they are still in %s",
                batch_id,
                self.store.work_dir(batch_id),
            )
            run.fail(errors)

    async def _start_by_priority(
        self, rows: list[Row], used_up: dict[str, str | None]
    ) -> None:
        """Start the batches that may run, and tell the engine which go first."""
        found = (self._runnable(row, used_up[row["owner"]] is not None) for row in rows)
        batches = [batch for batch in found if batch is not None]
        priority = priorities(batches, now())
        for batch_id, value in priority.items():
            if value == URGENT and batch_id not in self._urgent:
                self._urgent.add(batch_id)
                logger.warning(
                    "Batch %s may miss its window; it goes before others now", batch_id
                )
        # SGLang's own scheduler does not distinguish jobs: several would only mix.
        stock = self.config.scheduler == "stock"
        most = 1 if stock else self.config.max_batches
        runs = dict(self._runs)  # some may end meanwhile
        for batch_id in to_start(batches, priority, most):
            runs[batch_id].may_run.set()
            runs[batch_id].pauses.set("limit", None)
            # Before it sends anything.
            self._set_limits()
            self._set_pauses(rows, used_up)
        for batch_id, value in priority.items():
            await runs[batch_id].set_priority(value)

    def _runnable(self, row: Row, used_up: bool) -> RunnableBatch | None:
        """A batch that could run, or None until its input is validated."""
        run = self._runs.get(row["id"])
        if run is None or run.num_left is None or row["status"] != api.IN_PROGRESS:
            return None
        rate = self.rate_of(row["id"])
        return RunnableBatch(
            row["id"],
            row["seq"],
            row["priority"],
            row["expires_at"],
            run.num_left,
            0.0 if rate is None else rate.lines_per_s,
            running=run.is_started,
            urgent=row["id"] in self._urgent,
            used_up=used_up,
        )

    def _set_limits(self) -> None:
        """Keep batches to their share of the engine."""
        running = [run for run in self._runs.values() if run.is_started]
        self.share.set_batches([run.limit for run in running])

    def _set_pauses(self, rows: list[Row], used_up: dict[str, str | None]) -> None:
        """Pause the batches that may send nothing now, and resume the others."""
        config = self.config
        hours = None
        if not in_hours(config.hours, local_minute()):
            hours = f"Batches of this server run from {config.batch_hours} only."
        engine = ENGINE_PAUSED if self.engine.is_paused else None
        for row in rows:
            run, limit = self._runs.get(row["id"]), used_up[row["owner"]]
            if run is None or run.num_left is None or row["status"] != api.IN_PROGRESS:
                continue
            if run.may_run.is_set():
                run.pauses.set("engine", engine)
                run.pauses.set("hours", hours)
                if limit is None and "limit" in run.pauses:
                    # Others took its place. It continues when it is started again.
                    limit = WAITS_AGAIN
            if limit is not None and "limit" in run.pauses:
                limit += run.finishing()
            run.pauses.set("limit", limit)


# Above any priority that a client may ask for.
URGENT = 1_000_000
# A batch becomes urgent when it needs more than this share of its remaining time.
DANGER = 0.8


@dataclass(frozen=True, slots=True)
class RunnableBatch:
    """One batch that could run.

    ``seq`` is its place in the order of creation, ``expires_at`` a Unix time in
    seconds, ``lines_per_s`` its rate while it runs, 0 if unknown. It was in danger
    of expiring if it is ``urgent``, and its client has used up its limit for today
    if it is ``used_up``.
    """

    batch_id: str
    seq: int
    priority: int
    expires_at: int
    num_left: int
    lines_per_s: float = 0.0
    running: bool = False
    urgent: bool = False
    used_up: bool = False


def in_danger(batch: RunnableBatch, now: float, usual_rate: float) -> bool:
    """Whether a batch would miss its window at the present rate.

    ``usual_rate`` is the server's lines per second, assumed for a batch that does
    not run or has no line answered.
    """
    # A running batch that others leave no share of the engine has no rate either.
    rate = (batch.lines_per_s if batch.running else 0.0) or usual_rate
    if rate <= 0 or not batch.num_left:
        return False
    return batch.num_left / rate > DANGER * (batch.expires_at - now)


def priorities(batches: Sequence[RunnableBatch], now: float) -> dict[str, int]:
    """The present priority of each batch by its id. Those in danger come first."""
    usual_rate = sum(batch.lines_per_s for batch in batches if batch.running)
    return {
        batch.batch_id: URGENT
        if batch.urgent or (not batch.used_up and in_danger(batch, now, usual_rate))
        else batch.priority
        for batch in batches
    }


def to_start(
    batches: Sequence[RunnableBatch], priority: dict[str, int], max_running: int
) -> list[str]:
    """Ids of the batches to start now, highest priority first.

    At most ``max_running`` batches of the same or a higher priority run at a time, so a
    batch never waits for less important ones. Nor does it wait for batches whose client
    has used up its limit, since these do not run.
    """
    running = [priority[batch.batch_id] for batch in batches if batch.running]
    waiting = sorted(
        (batch for batch in batches if not batch.running and not batch.used_up),
        key=lambda batch: (-priority[batch.batch_id], batch.seq),
    )
    started = []
    for batch in waiting:
        own = priority[batch.batch_id]
        if sum(other >= own for other in running) < max_running:
            running.append(own)
            started.append(batch.batch_id)
    return started


def local_minute() -> int:
    """The local time of day in minutes."""
    at = datetime.datetime.now()
    return 60 * at.hour + at.minute


def in_hours(hours: tuple[int, int] | None, minute: int) -> bool:
    """Whether a minute of the day is within ``hours``, which may span midnight."""
    if hours is None:
        return True
    begin, end = hours
    if begin < end:
        return begin <= minute < end
    return minute >= begin or minute < end


# Why a batch sends nothing: another one is alone in the engine, or it has to be alone
# itself and is not.
ALONE = "lines of another batch are tried alone"
NOT_ALONE = "its lines wait to be tried alone"
CHECK_EVERY_S = 0.05


class Isolation:
    """Gives the engine to the suspects of one batch that is not paused at a time."""

    def __init__(self, runs: Mapping[str, BatchRun]) -> None:
        self._runs = runs
        self._alone: BatchRun | None = None

    def admit(self, run: BatchRun) -> None:
        """Have a new batch wait if another one is alone in the engine."""
        if self._alone is not None:
            run.limit.pause(ALONE)

    @asynccontextmanager
    async def alone(self, batch_id: str) -> AsyncIterator[None]:
        """A block in which the engine has no line of any other batch."""
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
