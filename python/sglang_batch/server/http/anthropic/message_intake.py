"""Turns the JSON body of a new message batch into an input file with its lines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from fastapi import Request

from ....batch_api import message_batches as messages
from ....batch_api import protocol as api
from ....batch_api.jsonl import FileErrors, validate
from ....batch_api.line_checks import BodyCheck, LineError, LineRules
from ....batch_api.message_batches import MessageBatchRequest
from ....errors import ApiError
from ....store.batch_store import OnMade, Row, now
from ....store.incoming import IncomingFile
from ...access.keys import Caller
from ...batch_input import model_check
from ...service import BatchService
from ..idempotency import REPEATED_WITHIN_S
from ..parameters import service_of
from ..received_bodies import pieces_of
from ..result_responses import in_blocks

MAX_RECENT = 100
_CHUNK_BYTES = 1 << 18


def most_bytes(request: Request) -> int:
    """The size that the body of a new message batch may have."""
    config = service_of(request).config
    return min(messages.MAX_BYTES, config.max_file_bytes or messages.MAX_BYTES)


async def receive(request: Request, body: IncomingFile) -> str:
    """Write a call's body to a file piece by piece. Returns its SHA-256 in hex.

    Raises:
        ApiError: 413 or 507, the body is too large or there is no room for it.
    """
    most = most_bytes(request)
    digest, held = hashlib.sha256(), bytearray()

    def write() -> None:
        digest.update(held)
        body.write(held)
        held.clear()

    message = f"The requests of a batch have at most {most} bytes."
    async for piece in pieces_of(request, most, message):
        held += piece
        if len(held) >= _CHUNK_BYTES:
            await asyncio.to_thread(write)
    await asyncio.to_thread(write)
    body.close()
    return digest.hexdigest()


def recent_batch(service: BatchService, sha256: str, owner: str) -> Row | None:
    """A batch created from a body with this digest in the last ten minutes."""
    rows = service.store.list_batches(
        after=None, limit=MAX_RECENT, owner=owner, api=messages.API
    )
    for row in rows:
        is_recent = row["created_at"] >= now() - REPEATED_WITHIN_S
        if is_recent and json.loads(row["metadata"])["sha256"] == sha256:
            return row
    return None


def make_message_batch(
    service: BatchService, body: Path, sha256: str, caller: Caller, on_made: OnMade
) -> Row:
    """Create a batch from the requests in a file.

    The file is mapped, so the params of all requests are never in memory together.

    Args:
        body: the file.
        sha256: digest of the body, in hexadecimal.
        on_made: see :data:`OnMade`.

    Raises:
        ApiError: the body is not a batch, or the store has no space left for it.
    """
    requests = _mapped_requests(body)
    most = service.config.max_batch_requests
    if most is not None and len(requests) > most:
        raise ApiError(
            400, f"requests: {len(requests)} requests; a batch has at most {most}."
        )
    details = {"requests": str(len(requests)), "sha256": sha256}
    with ExitStack() as files, ExitStack() as undo:

        def add(file: IncomingFile, name: str, purpose: str) -> str:
            file.close()
            file_id = service.add_file(file.path, name, purpose, None, caller.name)[
                "id"
            ]
            undo.callback(service.store.delete_file, file_id)
            return str(file_id)

        lines = files.enter_context(service.room.receive())
        _write(lines, requests)
        # The runner accepts or fails a batch as a whole, but here one request may be bad.
        check = model_check(service.store, caller.name, service.model_names or ())
        rejected = messages.rejections(
            _problems(lines.path, service.model_names, check)
        )
        if rejected:
            lines = files.enter_context(service.room.receive())
            _write(lines, (r for i, r in enumerate(requests) if i not in rejected))
            errors = files.enter_context(service.room.receive())
            _write_rejected(errors, requests, rejected)
            details["rejected"] = str(len(rejected))
            details["rejected_file_id"] = add(
                errors, "rejected.jsonl", api.BATCH_OUTPUT_PURPOSE
            )
        row = service.create_batch(
            add(lines, "requests.jsonl", "batch"),
            messages.URL,
            messages.WINDOW,
            details,
            api=messages.API,
            owner=caller.name,
            allowance=caller.allowance,
            on_made=on_made,
        )
        undo.pop_all()
    return row


def _mapped_requests(body: Path) -> list[MessageBatchRequest]:
    with open(body, "rb") as file:
        empty = body.stat().st_size == 0
        # Requests refer to the mapping, which ends with the last of them.
        data = b"" if empty else mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return messages.requests_of(data)


def _write(file: IncomingFile, requests: Iterable[MessageBatchRequest]) -> None:
    for block in in_blocks(messages.input_lines(requests)):
        file.write(block)
    file.close()


def _problems(
    path: Path, models: tuple[str, ...] | None, check_body: BodyCheck | None
) -> list[LineError]:
    """The errors in the lines of an input file."""
    most = 10 * messages.MAX_REQUESTS
    rules = LineRules(messages.URL, models, check_body=check_body, max_errors=most)
    checked = validate(path, rules)
    if isinstance(checked, FileErrors):
        return checked.listed
    with checked.closing():
        return []


def _write_rejected(
    file: IncomingFile,
    requests: list[MessageBatchRequest],
    rejected: dict[int, LineError],
) -> None:
    for index, error in rejected.items():
        custom_id = requests[index].custom_id
        file.write(messages.rejected_line(custom_id, index, error))
