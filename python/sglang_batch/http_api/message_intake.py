"""A batch of messages as it comes in: from one JSON body to an input file of lines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from fastapi import Request

from ..batch_api import message_batches as messages
from ..batch_api import protocol as api
from ..batch_api.jsonl import LineError, LineRules, validate
from ..batch_api.message_batches import MessageRequest
from ..errors import ApiError
from ..service import BatchService
from ..store.batch_store import OnMade, Row, now
from .parameters import service_of

# A repeated call for a batch is about one that was made no longer ago.
REPEATED_WITHIN_S = 600
MAX_RECENT = 100
_CHUNK_BYTES = 1 << 18


async def receive(request: Request, path: Path) -> str:
    """Write a call's body to a file, a piece at a time; returns its SHA-256."""
    config = service_of(request).config
    most = min(messages.MAX_BYTES, config.max_file_bytes or messages.MAX_BYTES)
    size, digest, held = 0, hashlib.sha256(), bytearray()
    with open(path, "wb") as file:

        def write() -> None:
            digest.update(held)
            file.write(held)
            held.clear()

        async for piece in request.stream():
            size += len(piece)
            # The rest is read all the same: a client that still sends would take an
            # answer in the middle of it for a broken connection.
            if size <= most:
                held += piece
            if len(held) >= _CHUNK_BYTES:
                await asyncio.to_thread(write)
        write()
    if size > most:
        raise ApiError(413, f"The requests of a batch have at most {most} bytes.")
    return digest.hexdigest()


def repeated(service: BatchService, sha256: str, owner: str) -> Row | None:
    """A batch made a short while ago of a body with this digest."""
    rows = service.store.list_batches(
        after=None, limit=MAX_RECENT, owner=owner, api=messages.API
    )
    for row in rows:
        is_recent = row["created_at"] >= now() - REPEATED_WITHIN_S
        if is_recent and json.loads(row["metadata"])["sha256"] == sha256:
            return row
    return None


def make_message_batch(
    service: BatchService, body: Path, sha256: str, owner: str, on_made: OnMade
) -> Row:
    """Make a batch of the requests in a file; their params are never all in memory.

    Args:
        body: other files are written beside it.
        sha256: of the body.
        on_made: see :data:`OnMade`.

    Raises:
        ApiError: they are no batch, or there is no room for them.
    """
    with open(body, "rb") as file:
        empty = body.stat().st_size == 0
        # Requests refer to it; it is unmapped when the last of them is gone.
        data = b"" if empty else mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    requests = messages.requests_of(data)
    most = service.config.max_batch_requests
    if most is not None and len(requests) > most:
        raise ApiError(
            400, f"requests: {len(requests)} requests; a batch has at most {most}."
        )
    lines = body.with_name("requests.jsonl")
    _write(lines, requests)
    # The runner finds a batch good or bad as a whole; here one request may be bad.
    rejected = messages.rejections(_problems(lines, service.model_names))
    if rejected:
        _write(lines, (r for i, r in enumerate(requests) if i not in rejected))

    details = {"requests": str(len(requests)), "sha256": sha256}
    with ExitStack() as undo:

        def add(path: Path, purpose: str) -> str:
            file_id = service.add_file(path, path.name, purpose, None, owner)["id"]
            undo.callback(service.store.delete_file, file_id)
            return str(file_id)

        if rejected:
            path = body.with_name("rejected.jsonl")
            _write_rejected(path, requests, rejected)
            details["rejected"] = str(len(rejected))
            details["rejected_file_id"] = add(path, api.BATCH_OUTPUT_PURPOSE)
        row = service.create_batch(
            add(lines, "batch"),
            messages.URL,
            messages.WINDOW,
            details,
            api=messages.API,
            owner=owner,
            on_made=on_made,
        )
        undo.pop_all()
    return row


def _write(path: Path, requests: Iterable[MessageRequest]) -> None:
    with open(path, "wb") as file:
        messages.write_lines(requests, file)


def _problems(path: Path, models: tuple[str, ...] | None) -> list[LineError]:
    """What is wrong with the lines of an input file."""
    rules = LineRules(messages.URL, models, max_errors=10 * messages.MAX_REQUESTS)
    checked = validate(path, rules)
    if isinstance(checked, list):
        return checked
    with checked.closing():
        return []


def _write_rejected(
    path: Path, requests: list[MessageRequest], rejected: dict[int, LineError]
) -> None:
    with open(path, "wb") as file:
        for index, error in rejected.items():
            custom_id = requests[index].custom_id
            file.write(messages.rejected_line(custom_id, index, error) + b"\n")
