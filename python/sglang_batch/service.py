"""The batches of one server: accepted, validated, run, finished, and taken up again.

Every process of a server that answers HTTP has a :class:`BatchService`; the one that
holds the store's lock also runs the batches. What they share is the store alone, so a
cancel that reaches one process stops a batch in another. A batch's life::

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
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from .batch_api import protocol as api
from .batch_api.jsonl import BatchFile, LineError, LineRules, validate
from .batch_api.lines import result_line, unrun_line
from .config import OfflineBatchConfig
from .engine import Engine
from .errors import StoreError
from .job import Job
from .request import BatchRequestInput, RequestOutput
from .store.batch_store import BatchStore, Row
from .store.files import atomic_write
from .store.lock import FileLock
from .store.result_log import ResultLog

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How often the runner looks for new batches and cancellations, and writes counts.
POLL_S = 0.5
# How long a server that starts waits for another one to let go of the store.
LOCK_PATIENCE_S = 1.0
CANCELLED_MESSAGE = "This request was not executed because the batch was cancelled."


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


class BatchService:
    """Batches of one server process.

    Args:
        store: shared by all processes of the server.
        config: how jobs are planned and fed.
        server_name: tells this server from another one on the same directory; the
            same in all its processes.
    """

    def __init__(
        self, store: BatchStore, config: OfflineBatchConfig, server_name: str
    ) -> None:
        self.store = store
        self.config = config
        self._server_name = server_name
        self._lock = FileLock(store.directory / "lock")
        self._engine: Engine | None = None
        self._closing: Callable[[], bool] = lambda: False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Event] = {}
        # One batch runs at a time; the others wait in the order they became valid.
        self._run_slot = asyncio.Lock()
        self._runner: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise StoreError("the batch service has not been started")
        return self._engine

    async def start(
        self, engine: Engine, closing: Callable[[], bool] = lambda: False
    ) -> None:
        """Begin to run batches, those of an earlier server first.

        Args:
            closing: says when the server is going down; no more requests are sent
                from then on, and what is unfinished stays for the next server.

        Raises:
            StoreError: another server runs the batches of this directory.
        """
        self._engine = engine
        self._closing = closing
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
        self._runner = asyncio.create_task(self._run_batches())

    async def stop(self) -> None:
        """Stop running; aborted requests are run again by the next server."""
        tasks = [task for task in (self._runner, *self._tasks.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lock.release()

    # What the routes call -----------------------------------------------------

    def create_file(
        self, source: BinaryIO, filename: str, purpose: str, expires_at: int | None
    ) -> Row:
        """Store an uploaded file."""
        file_id = new_id("file-")
        path = self.store.file_path(file_id)
        with atomic_write(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)
        return self._record_file(file_id, filename, purpose, expires_at)

    def _record_file(
        self, file_id: str, filename: str, purpose: str, expires_at: int | None
    ) -> Row:
        row = {
            "id": file_id,
            "purpose": purpose,
            "filename": filename,
            "bytes": self.store.file_path(file_id).stat().st_size,
            "created_at": now(),
            "expires_at": expires_at,
        }
        self.store.add_file(row)
        return row

    def create_batch(
        self,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        metadata: dict[str, str] | None,
    ) -> Row:
        """Accept a batch; the runner validates and runs it."""
        created_at = now()
        batch_id = new_id("batch_")
        self.store.add_batch(
            {
                "id": batch_id,
                "status": api.VALIDATING,
                "endpoint": endpoint,
                "input_file_id": input_file_id,
                "completion_window": completion_window,
                "created_at": created_at,
                "expires_at": created_at + api.COMPLETION_WINDOW_S[completion_window],
                "metadata": None if metadata is None else json.dumps(metadata),
            }
        )
        row = self.store.get_batch(batch_id)
        assert row is not None
        return row

    def cancel_batch(self, batch_id: str) -> Row | None:
        """Ask for a batch to be cancelled; returns its row, None if there is none."""
        self.store.transition(
            batch_id,
            (api.VALIDATING, api.IN_PROGRESS),
            api.CANCELLING,
            cancelling_at=now(),
        )
        return self.store.get_batch(batch_id)

    async def run_requests(
        self, job_id: str, requests: list[BatchRequestInput]
    ) -> AsyncGenerator[tuple[BatchRequestInput, RequestOutput], None]:
        """Run requests that no file holds; yields each answer as it comes."""
        answers: asyncio.Queue[tuple[BatchRequestInput, RequestOutput] | None] = (
            asyncio.Queue()
        )
        job = Job(
            job_id,
            requests,
            range(len(requests)),
            self.engine,
            self.config,
            lambda request, output: answers.put_nowait((request, output)),
        )
        work = asyncio.ensure_future(job.run())
        work.add_done_callback(lambda _: answers.put_nowait(None))
        try:
            while (answer := await answers.get()) is not None:
                yield answer
            await work
        finally:
            work.cancel()

    # The runner ---------------------------------------------------------------

    async def _run_batches(self) -> None:
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
                self._tasks[batch_id] = asyncio.create_task(self._process(batch_id))

    async def _process(self, batch_id: str) -> None:
        """Take a batch from whatever status it is in to its end."""
        try:
            await self._validate(batch_id)
            async with self._run_slot:
                await self._run(batch_id)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("Batch %s stopped", batch_id)
            self._fail(batch_id, [LineError("internal_error", str(error))])
        finally:
            self._stops.pop(batch_id, None)
            self._tasks.pop(batch_id, None)

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
        self._clean_up(batch_id)

    async def _validate(self, batch_id: str) -> None:
        row = self._row(batch_id)
        if row["status"] not in (api.VALIDATING, api.CANCELLING):
            return
        if row["status"] == api.CANCELLING and row["total"]:
            return  # cancelled after it was found valid, by an earlier server
        result = await asyncio.to_thread(self._validate_input, row)
        if isinstance(result, list):
            self._fail(batch_id, result)
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
                os.link(source, copy)
            except FileNotFoundError:
                return [missing]
        rules = LineRules(endpoint=row["endpoint"], models=self.engine.model_names)
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
        job = Job(batch_id, requests, todo, self.engine, self.config, store)
        ticker = asyncio.create_task(self._keep_counts(batch_id, log))
        try:
            await job.run(self._stops[batch_id])
        finally:
            ticker.cancel()
            with suppress(asyncio.CancelledError):
                await ticker
            self._write_counts(batch_id, log)

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
                    self._record_file(file_id, filename, api.BATCH_OUTPUT_PURPOSE, None)
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


def batch_object(row: Row) -> dict[str, Any]:
    """A batch as the API shows it; every nullable key is there, as at OpenAI."""
    from openai.types import Batch

    fields = {
        key: row[key]
        for key in Batch.model_fields
        if key in row and key not in ("metadata", "errors")
    }
    for key in ("metadata", "errors"):
        fields[key] = json.loads(row[key]) if row[key] else None
    fields["object"] = "batch"
    fields["request_counts"] = {
        key: row[key] for key in ("total", "completed", "failed")
    }
    fields["usage"] = {
        "input_tokens": row["input_tokens"],
        "input_tokens_details": {"cached_tokens": row["cached_tokens"]},
        "output_tokens": row["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": row["reasoning_tokens"]},
        "total_tokens": row["input_tokens"] + row["output_tokens"],
    }
    return Batch.model_validate(fields).model_dump(mode="json")


def file_object(row: Row) -> dict[str, Any]:
    """A file as the API shows it."""
    from openai.types import FileObject

    # Not validated: the client's type leaves out a purpose that its uploads may have.
    fields = {key: row.get(key) for key in FileObject.model_fields}
    return fields | {"object": "file", "status": "processed"}
