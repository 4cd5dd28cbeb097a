"""A batch service over an engine without a GPU, and checks of its results."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

from builders import CHAT, ids_of, make_lines, parse_lines
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.answer_cache import ModelAnswers
from sglang_batch.server.service import BatchService
from sglang_batch.store.batch_store import BatchStore, Row

UNRUN = {
    "code": "batch_cancelled",
    "message": "This request was not executed because the batch was cancelled.",
}


def make_service(
    directory: Path,
    server_name: str = "server",
    answers: ModelAnswers | None = None,
    **config: Any,
) -> BatchService:
    """A service that has not been started, with an open store."""
    return BatchService(
        BatchStore(directory), OfflineBatchConfig(**config), server_name, answers
    )


@asynccontextmanager
async def running_service(
    directory: Path,
    engine: FakeEngine | None = None,
    *,
    closing: Callable[[], bool] = lambda: False,
    **kwargs: Any,
) -> AsyncIterator[BatchService]:
    """A service at work until the block ends, which stops it in the middle."""
    service = make_service(directory, **kwargs)
    try:
        await service.start(engine or FakeEngine(), closing)
        yield service
    finally:
        await service.stop()
        service.store.close()


def add_input(service: BatchService, source: BinaryIO, owner: str = "") -> Row:
    """Store a copy of a file as the input of a batch."""
    with service.room.receive() as file:
        file.write(source.read())
        file.close()
        return service.add_file(file.path, "in.jsonl", "batch", None, owner)


def submit(
    service: BatchService,
    lines: Iterable[str | bytes],
    *,
    endpoint: str = CHAT,
    metadata: dict[str, str] | None = None,
    **fields: Any,
) -> str:
    """Upload a file of these lines and start a batch over it. Returns its id."""
    data = b"".join(
        (line.encode() if isinstance(line, str) else line) + b"\n" for line in lines
    )
    owner = fields.get("owner", "")
    file = add_input(service, io.BytesIO(data), owner)
    row = service.create_batch(file["id"], endpoint, "24h", metadata, **fields)
    batch_id: str = row["id"]
    return batch_id


def batch_row(service: BatchService, batch_id: str) -> Row:
    row = service.store.get_batch(batch_id)
    assert row is not None
    return row


async def until_over(service: BatchService, batch_id: str) -> Row:
    """Wait for a batch's final status, as clients do: by asking again."""
    while (row := batch_row(service, batch_id))["status"] in api.ACTIVE_STATUSES:
        await asyncio.sleep(0.002)
    return row


def result_lines(service: BatchService, row: Row, name: str) -> list[dict[str, Any]]:
    """The lines of a batch's ``output`` or ``error`` file, none if it has no file."""
    file_id = row[f"{name}_file_id"]
    if file_id is None:
        return []
    data = service.store.file_path(file_id).read_bytes()
    assert data, "a file that would be empty does not exist"
    return parse_lines(data)


def custom_ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def counts_of(row: Row) -> tuple[int, int, int]:
    return row["total"], row["completed"], row["failed"]


def leftovers(service: BatchService) -> list[str]:
    """Names in the store's directory that are no client's file and no active batch.

    Results that an active batch is writing are its own, too. A batch that has just ended is
    active until its run is over, which then removes its directory.
    """
    directory = service.store.directory
    # Asked for first: a batch that ends in the meantime has its files recorded below.
    at_work = [row["id"] for row in service.store.batches_in(api.ACTIVE_STATUSES)]
    at_work += service.runner._runs if service.runner else ()
    files = {path.name for path in (directory / "files").iterdir()}
    batches = {path.name for path in (directory / "batches").iterdir()}
    files_known = service.store.list_files(
        after=None, limit=1000, descending=True, purpose=None
    )
    being_written = {
        f"file-{name}-{batch_id.removeprefix('batch_')}"
        for batch_id in at_work
        for name in ("output", "error")
    }
    known = {row["id"] for row in files_known} | {*at_work} | being_written
    half_written = {
        name
        for name in files
        if name.endswith(".tmp") and name[1:].split(".")[0] in being_written
    }
    return sorted((files | batches) - known - half_written)


def check_results(
    service: BatchService, row: Row
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of both files, which are checked as for every batch that ran."""
    outputs = result_lines(service, row, "output")
    errors = result_lines(service, row, "error")
    assert len(outputs) + len(errors) == row["total"]
    assert len({*custom_ids(outputs), *custom_ids(errors)}) == row["total"]
    for lines in (outputs, errors):
        numbers = [int(custom_id[1:]) for custom_id in custom_ids(lines)]
        assert numbers == sorted(numbers), "not in input order"
    assert {line["response"]["status_code"] for line in outputs} <= {200}
    assert row["completed"] == len(outputs)
    assert row["failed"] == sum(line["response"] is not None for line in errors)
    assert leftovers(service) == []
    return outputs, errors


async def run_part(
    directory: Path, num_lines: int, num_answered: int, engine: FakeEngine
) -> str:
    """Begin a batch and stop the server when ``num_answered`` lines are answered."""
    engine.hold(ids_of(range(num_answered, num_lines)))
    async with running_service(
        directory, engine, policy="fcfs", max_inflight=3
    ) as service:
        batch_id = submit(service, make_lines(num_lines))
        await engine.until_stalled(num_answered, min(3, num_lines - num_answered))
    return batch_id
