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
from typing import Any, BinaryIO

from .batch_api import protocol as api
from .config import OfflineBatchConfig
from .engine import Engine
from .errors import StoreError
from .job import Job
from .request import BatchRequestInput, RequestOutput
from .runner import BatchRunner
from .store.batch_store import BatchStore, Row, now
from .store.files import atomic_write


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

    async def start(
        self, engine: Engine, closing: Callable[[], bool] = lambda: False
    ) -> None:
        """Begin to run batches; see :meth:`~sglang_batch.runner.BatchRunner.start`."""
        self._engine = engine
        self.runner = BatchRunner(
            self.store, self.config, self._server_name, engine, closing
        )
        await self.runner.start()

    async def stop(self) -> None:
        """Stop running; aborted requests are run again by the next server."""
        if self.runner is not None:
            await self.runner.stop()

    def create_file(
        self, source: BinaryIO, filename: str, purpose: str, expires_at: int | None
    ) -> Row:
        """Store an uploaded file."""
        file_id = new_id("file-")
        path = self.store.file_path(file_id)
        with atomic_write(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)
        return self.store.record_file(file_id, filename, purpose, expires_at)

    def create_batch(
        self,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        metadata: dict[str, str] | None,
        **fields: Any,
    ) -> Row:
        """Accept a batch; the runner validates and runs it.

        Args:
            completion_window: one that ``protocol.window_seconds`` knows.
            fields: more columns of the batch: owner, priority, and so on.
        """
        window_s = api.window_seconds(completion_window)
        assert window_s is not None, completion_window
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
                "expires_at": created_at + window_s,
                "metadata": None if metadata is None else json.dumps(metadata),
                **fields,
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
        if self._engine is None:
            raise StoreError("the batch service has not been started")
        job = Job(
            job_id,
            requests,
            range(len(requests)),
            self._engine,
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
