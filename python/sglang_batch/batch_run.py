"""One batch of a server, from whatever status it is in to its end.

::

    validating -> in_progress -> finalizing -> completed
         |             |
         |             +-> expired
         |             +-> cancelling -> cancelled
         +-> failed

Nothing here is kept in memory alone for longer than a group of results: another server
can go on from any point.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from .batch_api import protocol as api
from .batch_api.jsonl import BatchFile, LineError, LineRules, validate
from .batch_api.lines import result_line
from .config import OfflineBatchConfig
from .engine import Engine
from .errors import StoreError
from .finish import finish
from .job import Job
from .line_tries import LineTries, engine_died
from .request import BatchRequestInput, RequestOutput
from .saving import Pauses, ResultSaver, in_thread
from .send_limit import SendLimit
from .service_log import batch_changed
from .store.batch_store import BatchStore, Row, now
from .store.files import atomic_write
from .store.result_log import ResultLog
from .store.suspects import Suspects

# A block of which no lines of other batches are in the engine.
AloneInEngine = Callable[["BatchRun"], AbstractAsyncContextManager[None]]


@dataclass
class Stop:
    """Why a batch is to stop, once it is.

    end: the status that it is to have then; None where the server goes down and the
        next one goes on.
    """

    event: asyncio.Event
    end: str | None = None

    def set(self, end: str | None) -> None:
        if not self.event.is_set():
            self.end = end
            self.event.set()


class BatchRun:
    """A batch while a server works on it.

    Args:
        alone: see :data:`AloneInEngine`; for lines that may take the engine down.
        count_every_s: how often counts are written.
        on_valid: called when the batch could run.

    Attributes:
        may_run: set when it is the batch's turn.
        stop: set to have it stop.
        limit: how many of its lines may be in the engine.
        tries: the engine as its lines see it; knows which are in flight.
        num_left: lines without a result; None until the file is validated.
    """

    def __init__(
        self,
        batch_id: str,
        store: BatchStore,
        config: OfflineBatchConfig,
        engine: Engine,
        alone: AloneInEngine,
        count_every_s: float,
        on_valid: Callable[[], None],
    ) -> None:
        self.batch_id = batch_id
        self.store = store
        self._config = config
        self.tries = LineTries(engine, config)
        self._alone = alone
        self._count_every_s = count_every_s
        self._on_valid = on_valid
        self.may_run = asyncio.Event()
        self.stop = Stop(asyncio.Event())
        self.limit = SendLimit()
        self.num_left: int | None = None
        self._priority = 0
        self.pauses = Pauses(batch_id, store, self.limit)
        self._job: Job | None = None
        self._suspects: Suspects | None = None
        self.saver: ResultSaver | None = None

    async def process(self) -> None:
        """Take the batch to its end, or as far as it comes until it is to stop.

        Raises:
            Exception: the server failed it; calling this again goes on.
        """
        if not await self._validate():
            return
        self._on_valid()
        await self._wait_for_turn()
        row = self.row()
        if row["status"] not in api.ACTIVE_STATUSES:
            return
        if self.stop.event.is_set() and self.stop.end is None:
            return
        # Validated before, so nothing is checked again; only the lines are found.
        rules = LineRules(require_model=False)
        requests = await asyncio.to_thread(validate, self._input_path(), rules)
        if isinstance(requests, list):
            raise StoreError(
                f"the input of {self.batch_id} changed on disk: {requests[0]}"
            )
        with requests.closing():
            await self._run(requests)

    def row(self) -> Row:
        """The batch as the store has it."""
        row = self.store.get_batch(self.batch_id)
        if row is None:
            raise StoreError(f"batch {self.batch_id} vanished from the store")
        return row

    async def set_priority(self, priority: int) -> None:
        """Among the batches that run, higher goes first."""
        if priority != self._priority:
            if self._job is not None:
                await self._job.set_priority(priority)
            self._priority = priority

    def blame(self, num_lines: int, num_others: int) -> None:
        """The engine died: what was in flight is suspect, and the next server told.

        Args:
            num_lines, num_others: lines and online requests that the engine had.
        """
        if self._suspects is not None and self.tries.in_flight:
            self._suspects.blame(self.tries.in_flight, num_lines, num_others)

    # Validation -----------------------------------------------------------------------

    async def _validate(self) -> bool:
        """Check the input, unless that is done; False where the batch ends by it."""
        row = self.row()
        if row["status"] not in (api.VALIDATING, api.CANCELLING):
            self.num_left = row["total"] - row["completed"] - row["failed"]
            return True
        if row["status"] == api.CANCELLING and row["total"]:
            return True  # cancelled after it was found valid, by an earlier server
        result = await asyncio.to_thread(self._validate_input, row)
        if isinstance(result, list):
            self.fail(result)
            return False
        with result.closing():
            self.num_left = len(result)
            self.store.update_batch(
                self.batch_id, total=len(result), model=result.model() or None
            )
        if self.store.transition(
            self.batch_id, (api.VALIDATING,), api.IN_PROGRESS, in_progress_at=now()
        ):
            batch_changed(self.row())
        return True

    def _validate_input(self, row: Row) -> BatchFile | list[LineError]:
        """Check the input as a file of our own, which outlives the client's."""
        copy = self._input_path()
        copy.parent.mkdir(exist_ok=True)
        if not copy.exists():
            file_id = row["input_file_id"]
            missing = LineError(
                "invalid_request", f"Cannot find file {file_id}.", None, "file_id"
            )
            # The id is a client's: a path only if it names a file of the store.
            if self.store.get_file(file_id, row["owner"]) is None:
                return [missing]
            try:
                _link_or_copy(self.store.file_path(file_id), copy)
            except FileNotFoundError:
                return [missing]
        rules = LineRules(endpoint=row["endpoint"], models=self.tries.model_names)
        result = validate(copy, rules)
        most = self._config.max_batch_requests
        if isinstance(result, BatchFile) and most is not None and len(result) > most:
            with result.closing():
                message = (
                    f"The input file has {len(result):,} requests; this server takes "
                    f"{most:,} in a batch. Split it into several files."
                )
                return [LineError("too_many_tasks", message)]
        return result

    def fail(self, errors: list[LineError]) -> None:
        """End the batch as one that did not run."""
        listed = _listed(errors)
        # Who was told that a batch is being cancelled never sees it fail.
        for statuses, end in (
            ((api.CANCELLING,), api.CANCELLED),
            (api.ACTIVE_STATUSES, api.FAILED),
        ):
            stamp = {f"{end}_at": now()}
            if self.store.transition(
                self.batch_id, statuses, end, errors=listed, **stamp
            ):
                batch_changed(self.row())
                break

    async def give_up(self, errors: list[LineError]) -> None:
        """End the batch as one that the server failed; what was answered is kept.

        Raises:
            StoreError: what was answered cannot be read back.
        """
        row = self.row()
        if not row["total"]:
            self.fail(errors)
            return
        requests = await asyncio.to_thread(
            validate, self._input_path(), LineRules(require_model=False)
        )
        if isinstance(requests, list):
            raise StoreError(f"the input changed on disk: {requests[0]}")
        with requests.closing():
            saver = await self._open_log(len(requests))
            try:
                days, listed = self._config.file_days, _listed(errors)
                await finish(saver, requests, api.FAILED, days, listed)
            finally:
                saver.log.close()

    async def _wait_for_turn(self) -> None:
        """Until the batch may run, or has to stop: a cancelled one need not wait."""
        if self.row()["status"] == api.FINALIZING:
            return  # an earlier server was about to end it
        events = (self.may_run, self.stop.event)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # Running --------------------------------------------------------------------------

    async def _run(self, requests: BatchFile) -> None:
        row = self.row()
        self._suspects = Suspects(self.store.work_dir(self.batch_id) / "suspects.json")
        self.saver = await self._open_log(len(requests))
        log = self.saver.log
        try:
            if row["status"] == api.FINALIZING and row["expired_at"]:
                self.stop.set(api.EXPIRED)  # as the server that went down had begun to
            if row["paused_reason"]:
                self.pauses.tell()
            if len(log.unfinished()) and not self.stop.event.is_set():
                await self._answer(requests, log)
            if self.stop.event.is_set() and self.stop.end is None:
                return
            end = self.stop.end or api.COMPLETED
            if not len(log.unfinished()):
                # It was done before it could be stopped.
                end = api.CANCELLED if end == api.CANCELLED else api.COMPLETED
            await finish(self.saver, requests, end, self._config.file_days)
        finally:
            log.close()

    async def _open_log(self, num_requests: int) -> ResultSaver:
        """The results so far; reading them back takes seconds where they are many."""

        def opened() -> ResultSaver:
            path = self.store.work_dir(self.batch_id) / "results.jsonl"
            log = ResultLog(path, num_requests)
            return ResultSaver(self.batch_id, self.store, log, self.pauses)

        return await in_thread(opened)

    async def _answer(self, requests: BatchFile, log: ResultLog) -> None:
        """Run all lines that have no answer; suspects last and apart."""
        assert self.saver is not None
        assert self._suspects is not None
        ticker = asyncio.create_task(self._tick(log))
        try:
            for index in self._suspects.never():
                rid = f"{self.batch_id}-{index:08d}"
                died = engine_died(rid, self._suspects.num_deaths)
                self._store(requests[index], died)
            groups = self._suspects.groups()
            apart = {index for group in groups for index in group}
            todo = [int(i) for i in log.unfinished() if i not in apart]
            await self._run_job(requests, todo, whole=len(todo) == len(requests))
            left = set(log.unfinished().tolist())
            for group in groups:
                if todo := [index for index in group if index in left]:
                    async with self._alone(self):
                        await self._run_job(requests, todo, whole=False)
            await self.saver.all_saved(self.stop.event)
        finally:
            ticker.cancel()
            await asyncio.wait({ticker})  # awaiting it could swallow our own cancelling
            await self.saver.save_counts()

    async def _run_job(
        self, requests: BatchFile, todo: Iterable[int], *, whole: bool
    ) -> None:
        todo = list(todo)
        if not todo or self.stop.event.is_set():
            return
        self._job = Job(
            self.batch_id,
            requests,
            todo,
            self.tries,
            self._config,
            self._store,
            limit=self.limit,
            directory=self.store.work_dir(self.batch_id),
            priority=self._priority,
        )
        try:
            await self._job.run(self.stop.event)
        finally:
            # Of a batch that was resumed it would be that of the rest.
            ratio = self._job.optimal_prefix_sharing_ratio
            self._job = None
            if ratio is not None and whole:
                with suppress(sqlite3.OperationalError):
                    self.store.update_batch(self.batch_id, optimal_cached_share=ratio)

    def _store(self, request: BatchRequestInput, output: RequestOutput) -> None:
        assert self.saver is not None
        line = result_line(request, self.batch_id, output)
        self.saver.put(request.index, line, output)

    async def _tick(self, log: ResultLog) -> None:
        assert self.saver is not None
        while True:
            await asyncio.sleep(self._count_every_s)
            self.num_left = len(log) - log.num_done
            await self.saver.save_counts()

    def _input_path(self) -> Path:
        return self.store.work_dir(self.batch_id) / "input.jsonl"

    def clean_up(self) -> None:
        """Remove what only a batch at work needs."""
        shutil.rmtree(self.store.work_dir(self.batch_id), ignore_errors=True)


def _link_or_copy(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except FileNotFoundError:
        raise
    except OSError:
        # A file system without hard links.
        with open(source, "rb") as given, atomic_write(copy) as file:
            shutil.copyfileobj(given, file, 1 << 20)


def _listed(errors: list[LineError]) -> str:
    """A batch's errors as it shows them."""
    data = [
        {"code": e.code, "line": e.line, "message": e.message, "param": e.param}
        for e in errors
    ]
    return json.dumps({"object": "list", "data": data})
