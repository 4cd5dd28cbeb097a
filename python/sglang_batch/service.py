"""The batches of one server, as its routes see them.

Every process of a server that answers HTTP has a :class:`BatchService`, and each
brings a :class:`~sglang_batch.runner.BatchRunner`, of which one runs the batches. What
they share is the store alone, so a cancel that reaches one process stops a batch in
another.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, BinaryIO

from .batch_api import protocol as api
from .config import OfflineBatchConfig
from .engine import Engine
from .errors import ApiError, StoreError
from .history import History
from .job import Job
from .request import BatchRequestInput, RequestOutput
from .runner import BatchRunner
from .service_log import batch_changed
from .store.batch_store import BatchStore, OnMade, Row, now
from .store.files import atomic_write, move_into_place


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


class BatchService:
    """Batches of one server process.

    Args:
        store: shared by all processes of the server.
        config: how jobs are planned and fed.
        server_name: see :class:`~sglang_batch.runner.BatchRunner`.
    """

    def __init__(
        self, store: BatchStore, config: OfflineBatchConfig, server_name: str
    ) -> None:
        self.store = store
        self.config = config
        self._server_name = server_name
        self._engine: Engine | None = None
        self.runner: BatchRunner | None = None
        self.history = History(store)

    async def start(
        self, engine: Engine, closing: Callable[[], bool] = lambda: False
    ) -> None:
        """Begin to run batches; see :meth:`~sglang_batch.runner.BatchRunner.start`."""
        self._engine = engine
        self.history = History(self.store, engine)
        self.runner = BatchRunner(
            self.store,
            self.config,
            self._server_name,
            engine,
            closing,
            self.history.rate,
        )
        await self.runner.start()
        self.history.start()

    @property
    def model_names(self) -> tuple[str, ...] | None:
        """The models served; None before the start."""
        return None if self._engine is None else self._engine.model_names

    async def stop(self) -> None:
        """Stop running; aborted requests are run again by the next server."""
        await self.history.stop()
        if self.runner is not None:
            await self.runner.stop()

    def create_file(
        self,
        source: BinaryIO,
        filename: str,
        purpose: str,
        expires_at: int | None,
        owner: str = "",
    ) -> Row:
        """Store a copy of a file.

        Args:
            expires_at: None is the default for this purpose.
        """
        file_id = new_id("file-")
        with atomic_write(self.store.file_path(file_id)) as file:
            shutil.copyfileobj(source, file, 1 << 20)
        return self.record_file(file_id, filename, purpose, expires_at, owner)

    def add_file(
        self,
        source: Path,
        filename: str,
        purpose: str,
        expires_at: int | None,
        owner: str = "",
        on_made: OnMade | None = None,
    ) -> Row:
        """Make a file that was received into the store's directory one of the API.

        Args:
            source: it is moved, not copied.
            expires_at: None is the default for this purpose.
            on_made: see :data:`OnMade`.
        """
        file_id = new_id("file-")
        move_into_place(source, self.store.file_path(file_id))
        return self.record_file(file_id, filename, purpose, expires_at, owner, on_made)

    def record_file(
        self,
        file_id: str,
        filename: str,
        purpose: str,
        expires_at: int | None,
        owner: str,
        on_made: OnMade | None = None,
    ) -> Row:
        """Make contents that are in place a file of the API.

        Raises:
            ApiError: there is no room for it; the contents are removed.
        """
        if expires_at is None:
            expires_at = self.default_expiry(purpose, now())
        path = self.store.file_path(file_id)
        try:
            with self.store.atomic():
                self.check_room(path.stat().st_size)
                row = self.store.record_file(
                    file_id, filename, purpose, expires_at, owner
                )
                if on_made is not None:
                    on_made(row)
                return row
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def default_expiry(self, purpose: str, created_at: int) -> int | None:
        """When a file expires whose client did not say; None is never."""
        if purpose not in ("batch", api.BATCH_OUTPUT_PURPOSE):
            return None
        return created_at + self.config.file_days * 86_400

    def check_room(self, num_bytes: int) -> None:
        """Whether so many more bytes may be stored.

        Raises:
            ApiError: 413, they would be more than ``storage_bytes``.
        """
        limit = self.config.storage_bytes
        if limit is None:
            return
        used = self.store.bytes_stored()
        if used + num_bytes > limit:
            raise ApiError(
                413,
                f"No room for {num_bytes} bytes: {used} of the {limit} bytes that this "
                "server keeps (storage_bytes) are used. Delete files that are no "
                "longer needed with DELETE /v1/files/{file_id}, or let them expire "
                "with expires_after.",
                code="storage_full",
                retry=False,
            )

    def create_batch(
        self,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        metadata: dict[str, str] | None,
        *,
        same_since: int | None = None,
        on_made: OnMade | None = None,
        **fields: Any,
    ) -> Row:
        """Accept a batch; the runner validates and runs it.

        Args:
            completion_window: one that ``protocol.window_seconds`` knows.
            same_since: return a batch made at this time or later with the very same
                parameters, if there is one, instead of making another.
            on_made: see :data:`OnMade`; also called with such a batch.
            fields: more columns of the batch: owner, priority, and so on.
        """
        window_s = api.window_seconds(completion_window)
        assert window_s is not None, completion_window
        asked = {
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "completion_window": completion_window,
            "metadata": None if metadata is None else json.dumps(metadata),
            **fields,
        }
        with self.store.atomic():
            row = None
            if same_since is not None:
                row = self.store.find_batch(same_since, asked)
            is_new = row is None
            if row is None:
                row = self._add_batch(asked, window_s)
            if on_made is not None:
                on_made(row)
        if is_new:
            batch_changed(row)
            self._wake_runner()
        return row

    def _add_batch(self, asked: dict[str, Any], window_s: int) -> Row:
        batch_id, created_at = new_id("batch_"), now()
        self.store.add_batch(
            {
                "id": batch_id,
                "status": api.VALIDATING,
                "created_at": created_at,
                "expires_at": created_at + window_s,
                **asked,
            }
        )
        row = self.store.get_batch(batch_id)
        assert row is not None
        return row

    def _wake_runner(self) -> None:
        # The one that runs the batches may be another process's: it looks by itself.
        if self.runner is not None:
            self.runner.wake()

    def cancel_batch(self, batch_id: str) -> Row | None:
        """Ask for a batch to be cancelled; returns its row, None if there is none."""
        cancelling = self.store.transition(
            batch_id,
            (api.VALIDATING, api.IN_PROGRESS),
            api.CANCELLING,
            cancelling_at=now(),
        )
        row = self.store.get_batch(batch_id)
        if cancelling and row is not None:
            batch_changed(row)
            self._wake_runner()
        return row

    async def run_requests(
        self, job_id: str, requests: list[BatchRequestInput]
    ) -> AsyncGenerator[tuple[BatchRequestInput, RequestOutput], None]:
        """Run requests that no file holds; yields each answer as it comes.

        In their part of the engine's share, as a batch, but at any hour: somebody waits
        for the answers.
        """
        answers: asyncio.Queue[tuple[BatchRequestInput, RequestOutput] | None] = (
            asyncio.Queue()
        )
        if self._engine is None or self.runner is None:
            raise StoreError("the batch service has not been started")
        with self.runner.share.wave() as limit:
            job = Job(
                job_id,
                requests,
                range(len(requests)),
                self._engine,
                self.config,
                lambda request, output: answers.put_nowait((request, output)),
                limit=limit,
            )
            work = asyncio.ensure_future(job.run())
            work.add_done_callback(lambda _: answers.put_nowait(None))
            try:
                while (answer := await answers.get()) is not None:
                    yield answer
                await work
            finally:
                work.cancel()
