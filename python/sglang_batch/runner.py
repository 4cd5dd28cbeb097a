"""Running the batches of a server: validated, run, finished, and taken up again.

A batch's life::

    validating -> in_progress -> finalizing -> completed
         |             |
         |             +-> cancelling -> cancelled
         +-> failed

Whatever status a killed server left behind, the next one goes on from there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from .batch_api import protocol as api
from .batch_api.jsonl import BatchFile, LineError, LineRules, validate
from .batch_api.lines import result_line, unrun_line
from .config import OfflineBatchConfig
from .engine import Engine
from .errors import StoreError
from .job import Job
from .request import BatchRequestInput, RequestOutput
from .store.batch_store import BatchStore, Row, now
from .store.files import atomic_write
from .store.lock import FileLock
from .store.result_log import ResultLog

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How often the runner looks for new batches and cancellations, and writes counts.
POLL_S = 0.5
# How long a server that starts waits for another one to let go of the store.
LOCK_PATIENCE_S = 1.0
# A batch that stops with an error of the server, not of its own, is tried again.
MAX_ATTEMPTS = 3
RETRY_AFTER_S = 10.0
CANCELLED_MESSAGE = "This request was not executed because the batch was cancelled."


class BatchRunner:
    """Runs the batches of a store; of all processes that try, one at a time does.

    Args:
        server_name: tells this server from another one on the same directory; the
            same in all its processes.
        closing: says when the server is going down; no more requests are sent from
            then on, and what is unfinished stays for the next server.
    """

    def __init__(
        self,
        store: BatchStore,
        config: OfflineBatchConfig,
        server_name: str,
        engine: Engine,
        closing: Callable[[], bool],
    ) -> None:
        self.store = store
        self._config = config
        self._server_name = server_name
        self._engine = engine
        self._closing = closing
        self._lock = FileLock(store.directory / "lock")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Event] = {}
        self._attempts: Counter[str] = Counter()
        # One batch runs at a time, the oldest first: the first of these is its turn.
        self._turns: dict[str, asyncio.Event] = {}
        self._polling: asyncio.Task[None] | None = None

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
        self._polling = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        """Stop running; aborted requests are run again by the next server."""
        tasks = [task for task in (self._polling, *self._tasks.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lock.release()

    async def _poll(self) -> None:
        while True:
            try:
                if self._lock.acquire(self._server_name) is None:
                    self._look_for_work()
            except Exception:
                # A busy database, say. Other batches must not stand still for it.
                logger.exception("Looking for batches failed; trying again")
            await asyncio.sleep(POLL_S)

    def _look_for_work(self) -> None:
        closing = self._closing()
        for row in self.store.batches_in(api.ACTIVE_STATUSES):
            batch_id = row["id"]
            if batch_id in self._stops and (closing or row["status"] == api.CANCELLING):
                self._stops[batch_id].set()
            if batch_id not in self._tasks and not closing:
                self._stops[batch_id] = asyncio.Event()
                self._turns[batch_id] = asyncio.Event()
                self._tasks[batch_id] = asyncio.create_task(self._process(batch_id))

    async def _process(self, batch_id: str) -> None:
        """Take a batch from whatever status it is in to its end."""
        try:
            await self._validate(batch_id)
            await self._wait_for_turn(batch_id)
            if not self._closing():
                await self._run(batch_id)
        except Exception as error:
            self._turns.pop(batch_id)
            self._start_next()
            await self._retry_or_fail(batch_id, error)
        finally:
            for waiting in (self._stops, self._turns, self._tasks):
                waiting.pop(batch_id, None)
            self._start_next()

    async def _wait_for_turn(self, batch_id: str) -> None:
        """Until the batch may run, or has to stop: a cancelled one need not wait."""
        self._start_next()
        events = (self._turns[batch_id], self._stops[batch_id])
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _start_next(self) -> None:
        if self._turns:
            next(iter(self._turns.values())).set()

    async def _retry_or_fail(self, batch_id: str, error: Exception) -> None:
        """After an error of the server: again, a few times, from where it stopped."""
        self._attempts[batch_id] += 1
        if self._attempts[batch_id] < MAX_ATTEMPTS:
            logger.exception("Batch %s stopped; trying again soon", batch_id)
            await asyncio.sleep(RETRY_AFTER_S)
            return
        logger.exception(
            "Batch %s failed; what was finished is in %s",
            batch_id,
            self.store.work_dir(batch_id),
        )
        self._fail(batch_id, [LineError("internal_error", str(error))])

    def _fail(self, batch_id: str, errors: list[LineError]) -> None:
        data = [
            {"code": e.code, "line": e.line, "message": e.message, "param": e.param}
            for e in errors
        ]
        listed = json.dumps({"object": "list", "data": data})
        # Who was told that a batch is being cancelled never sees it fail.
        if not self.store.transition(
            batch_id,
            (api.CANCELLING,),
            api.CANCELLED,
            cancelled_at=now(),
            errors=listed,
        ):
            self.store.transition(
                batch_id,
                api.ACTIVE_STATUSES,
                api.FAILED,
                failed_at=now(),
                errors=listed,
            )

    async def _validate(self, batch_id: str) -> None:
        row = self._row(batch_id)
        if row["status"] not in (api.VALIDATING, api.CANCELLING):
            return
        if row["status"] == api.CANCELLING and row["total"]:
            return  # cancelled after it was found valid, by an earlier server
        result = await asyncio.to_thread(self._validate_input, row)
        if isinstance(result, list):
            self._fail(batch_id, result)
            self._clean_up(batch_id)
            return
        with result.closing():
            self.store.update_batch(
                batch_id, total=len(result), model=result.model() or None
            )
            self.store.transition(
                batch_id, (api.VALIDATING,), api.IN_PROGRESS, in_progress_at=now()
            )

    def _validate_input(self, row: Row) -> BatchFile | list[LineError]:
        """Check the input as a file of our own, which outlives the client's."""
        source = self.store.file_path(row["input_file_id"])
        copy = self._input_path(row["id"])
        missing = LineError(
            "invalid_request",
            f"Cannot find file {row['input_file_id']}.",
            None,
            "file_id",
        )
        copy.parent.mkdir(exist_ok=True)
        if not copy.exists():
            # The id is a client's: a path only if it names a file of the store.
            if self.store.get_file(row["input_file_id"]) is None:
                return [missing]
            try:
                _link_or_copy(source, copy)
            except FileNotFoundError:
                return [missing]
        rules = LineRules(endpoint=row["endpoint"], models=self._engine.model_names)
        return validate(copy, rules)

    async def _run(self, batch_id: str) -> None:
        row = self._row(batch_id)
        if row["status"] not in (api.IN_PROGRESS, api.FINALIZING, api.CANCELLING):
            return
        # Validated before, so nothing is checked again; only the lines are found.
        rules = LineRules(require_model=False)
        requests = await asyncio.to_thread(validate, self._input_path(batch_id), rules)
        if isinstance(requests, list):
            raise StoreError(f"the input of {batch_id} changed on disk: {requests[0]}")
        log = ResultLog(self.store.work_dir(batch_id) / "results.jsonl", len(requests))
        with requests.closing():
            try:
                if row["status"] != api.CANCELLING and len(log.unfinished()):
                    await self._run_job(batch_id, requests, log)
                await self._finish(batch_id, requests, log)
            finally:
                log.close()

    async def _run_job(
        self, batch_id: str, requests: BatchFile, log: ResultLog
    ) -> None:
        def store(request: BatchRequestInput, output: RequestOutput) -> None:
            line = result_line(request, batch_id, output)
            log.put(request.index, line, ok=output.ok, usage=output.usage)

        todo = log.unfinished()
        if len(todo) < len(requests):
            logger.info(
                "Batch %s: resuming with %d of %d requests done",
                batch_id,
                len(requests) - len(todo),
                len(requests),
            )
        job = Job(batch_id, requests, todo, self._engine, self._config, store)
        ticker = asyncio.create_task(self._keep_counts(batch_id, log))
        try:
            await job.run(self._stops[batch_id])
        finally:
            ticker.cancel()
            with suppress(asyncio.CancelledError):
                await ticker
            self._write_counts(batch_id, log)
            # Of a batch that was resumed it would be that of the rest.
            if job.optimal_prefix_sharing_ratio is not None and len(todo) == len(
                requests
            ):
                self.store.update_batch(
                    batch_id, optimal_cached_share=job.optimal_prefix_sharing_ratio
                )

    async def _keep_counts(self, batch_id: str, log: ResultLog) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await _in_thread(log.commit)
            self._write_counts(batch_id, log)

    def _write_counts(self, batch_id: str, log: ResultLog) -> None:
        self.store.update_batch(
            batch_id,
            completed=log.num_completed,
            failed=log.num_failed,
            input_tokens=log.usage.input_tokens,
            cached_tokens=log.usage.cached_tokens,
            output_tokens=log.usage.output_tokens,
            reasoning_tokens=log.usage.reasoning_tokens,
        )

    async def _finish(self, batch_id: str, requests: BatchFile, log: ResultLog) -> None:
        """Write the result files and move the batch to its final status."""
        if self._closing() and log.num_done < len(requests):
            return
        # The status must not survive a power cut that the results do not.
        await _in_thread(log.commit)
        self.store.transition(
            batch_id, (api.IN_PROGRESS,), api.FINALIZING, finalizing_at=now()
        )
        cancelling = self._row(batch_id)["status"] == api.CANCELLING
        file_ids = await _in_thread(self._write_results, batch_id, requests, log)
        with self.store.atomic():
            self._write_counts(batch_id, log)
            for name, file_id in file_ids.items():
                if file_id is not None:
                    filename = f"{batch_id}_{name}.jsonl"
                    self.store.record_file(
                        file_id, filename, api.BATCH_OUTPUT_PURPOSE, None
                    )
            if cancelling:
                end, stamp = api.CANCELLED, "cancelled_at"
            else:
                end, stamp = api.COMPLETED, "completed_at"
            self.store.transition(
                batch_id,
                (api.FINALIZING, api.CANCELLING),
                end,
                output_file_id=file_ids["output"],
                error_file_id=file_ids["error"],
                **{stamp: now()},
            )
        self._clean_up(batch_id)

    def _write_results(
        self, batch_id: str, requests: BatchFile, log: ResultLog
    ) -> dict[str, str | None]:
        def unrun(index: int) -> bytes:
            return unrun_line(
                requests[index], batch_id, "batch_cancelled", CANCELLED_MESSAGE
            )

        # The same ids each time: a server that dies here leaves no files that nobody
        # knows, the next one writes them again.
        ids: dict[str, str | None] = {
            name: f"file-{name}-{batch_id.removeprefix('batch_')}"
            for name in ("output", "error")
        }
        paths = {name: self.store.file_path(str(ids[name])) for name in ids}
        with (
            atomic_write(paths["output"]) as outputs,
            atomic_write(paths["error"]) as errors,
        ):
            num_outputs, num_errors = log.write_ordered(outputs, errors, unrun)
        # As at OpenAI, a file that would be empty does not exist.
        for name, count in (("output", num_outputs), ("error", num_errors)):
            if count == 0:
                paths[name].unlink()
                ids[name] = None
        return ids

    def _row(self, batch_id: str) -> Row:
        row = self.store.get_batch(batch_id)
        if row is None:
            raise StoreError(f"batch {batch_id} vanished from the store")
        return row

    def _input_path(self, batch_id: str) -> Path:
        return self.store.work_dir(batch_id) / "input.jsonl"

    def _clean_up(self, batch_id: str) -> None:
        shutil.rmtree(self.store.work_dir(batch_id), ignore_errors=True)


def _link_or_copy(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except FileNotFoundError:
        raise
    except OSError:
        # A file system without hard links.
        shutil.copyfile(source, copy)


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    """Like ``asyncio.to_thread``, but over no sooner than the thread, even if cancelled.

    By then the files it works on may be closed, and the store another server's.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
