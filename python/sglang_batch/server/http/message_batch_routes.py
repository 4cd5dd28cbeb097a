"""``/v1/messages/batches``: Anthropic's batch API for the same engine and store.

The JSON body of a new message batch is turned into an input file with its lines while it
arrives. Errors are in Anthropic's format.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ...batch_api import message_batches as messages
from ...batch_api import protocol as api
from ...batch_api.jsonl import FileErrors, validate
from ...batch_api.lines import BodyCheck, LineError, LineRules
from ...batch_api.message_batches import MessageBatchRequest
from ...batch_api.objects import list_object, result_files
from ...errors import ApiError
from ...store.batch_store import BatchStore, OnMade, Row, now
from ...store.incoming import AHEAD_BYTES, IncomingFile
from ..access.keys import Caller
from ..batch_run import model_check
from ..service import BatchService
from . import openapi as docs
from .authorization import caller_of, owner_field
from .calls import OurRoute
from .idempotency import REPEATED_WITHIN_S, Keep, answer_once, is_repeated
from .parameters import (
    base_url,
    content_length,
    large_body,
    page_limit,
    pieces_of,
    service_of,
    write_body,
)
from .result_responses import in_blocks

MAX_RECENT = 100


def most_bytes(request: Request) -> int:
    """The size that the body of a new message batch may have."""
    config = service_of(request).config
    return min(messages.MAX_BYTES, config.max_file_bytes or messages.MAX_BYTES)


async def receive(request: Request, body: IncomingFile) -> str:
    """Write a body to a file, or raise 413 or 507. Returns its SHA-256 in hex."""
    most = most_bytes(request)
    digest = hashlib.sha256()

    def write(block: bytes) -> None:
        digest.update(block)
        body.write(block)

    message = f"The requests of a batch have at most {most} bytes."
    await write_body(pieces_of(request, most, message), write)
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
    Raises ApiError if it is not a batch, or the store has no space left for it.
    """
    with open(body, "rb") as file:
        empty = body.stat().st_size == 0
        # Requests refer to the mapping, which ends with the last of them.
        data = b"" if empty else mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    requests = messages.requests_of(data)
    most = service.config.max_batch_requests
    if most is not None and len(requests) > most:
        raise ApiError(
            400, f"requests: {len(requests)} requests; a batch has at most {most}."
        )
    details = {"requests": str(len(requests)), "sha256": sha256}
    with ExitStack() as files, ExitStack() as undo:

        def add(file: IncomingFile, name: str, purpose: str) -> str:
            file.close()
            row = service.add_file(file.path, name, purpose, None, caller.name)
            file_id = str(row["id"])
            undo.callback(service.store.delete_file, file_id)
            return file_id

        lines = files.enter_context(service.room.receive())
        _write(lines, requests)
        # The runner accepts or fails a batch as a whole, but here one request may be bad.
        check = model_check(service.store, caller.name, service.model_names or ())
        problems = _problems(lines.path, service.model_names, check)
        rejected = messages.rejections(problems)
        if rejected:
            lines = files.enter_context(service.room.receive())
            _write(lines, (r for i, r in enumerate(requests) if i not in rejected))
            errors = files.enter_context(service.room.receive())
            for index, error in rejected.items():
                custom_id = requests[index].custom_id
                errors.write(messages.rejected_line(custom_id, index, error))
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


def _write(file: IncomingFile, requests: Iterable[MessageBatchRequest]) -> None:
    for block in in_blocks(messages.input_lines(requests)):
        file.write(block)
    file.close()


def _problems(
    path: Path, models: tuple[str, ...] | None, check_body: BodyCheck | None
) -> list[LineError]:
    most = 10 * messages.MAX_REQUESTS
    rules = LineRules(messages.URL, models, check_body=check_body, max_errors=most)
    checked = validate(path, rules)
    if isinstance(checked, FileErrors):
        return checked.listed
    with checked.closing():
        return []


MAX_PAGE = 1000
JSONL = "application/x-jsonl"  # Anthropic's

router = APIRouter(
    route_class=OurRoute, responses=docs.ANTHROPIC_ERRORS, tags=["Message batches"]
)


@router.post(
    "/v1/messages/batches",
    response_model=docs.MessageBatch,
    openapi_extra=docs.takes_json(docs.NewMessageBatch),
)
async def create_message_batch(request: Request) -> Response:
    """Start a batch of messages."""
    service, caller = service_of(request), caller_of(request)
    with ExitStack() as files:
        async with large_body(request):
            size = content_length(request) or 0
            if size > most_bytes(request):
                size = 0  # refused before it is read
            if size:
                await asyncio.to_thread(service.room.check, size)
            file = await asyncio.to_thread(
                files.enter_context, service.room.receive(min(size, AHEAD_BYTES))
            )
            sha256 = await receive(request, file)
        body = file.path

        def make(keep: Keep) -> dict[str, Any]:
            def on_made(row: Row) -> None:
                keep(_object(request, row, url=""))

            row = None
            # A client that got no answer and tries again means its first call's batch.
            if is_repeated(request):
                row = recent_batch(service, sha256, caller.name)
            if row is None:
                row = make_message_batch(service, body, sha256, caller, on_made)
            else:
                on_made(row)
            return _object(request, row)

        def shown(kept: dict[str, Any]) -> dict[str, Any]:
            path = kept["results_url"]
            if path is None or not path.startswith("/"):  # of an earlier version
                return kept
            return kept | {"results_url": base_url(request) + path}

        return await answer_once(request, sha256.encode(), make, shown=shown)


@router.get("/v1/messages/batches", response_model=docs.MessageBatchPage)
def list_message_batches(
    request: Request,
    before_id: str | None = None,
    after_id: str | None = None,
    limit: Annotated[int, *page_limit(MAX_PAGE)] = 20,
) -> JSONResponse:
    """List message batches, newest first, one page at a time."""
    if before_id and after_id:
        raise ApiError(400, "before_id and after_id: only one of them may be given.")
    before, after = (
        _place(request, id) if id else None for id in (before_id, after_id)
    )
    rows = service_of(request).store.list_batches(
        before=before,
        after=after,
        limit=limit + 1,
        owner=caller_of(request).sees,
        api=messages.API,
    )
    # Without the extra one, which is the farthest from where the page begins.
    shown = rows[-limit:] if before is not None else rows[:limit]
    page = list_object([_object(request, row) for row in shown], limit)
    del page["object"]  # Anthropic's pages have none
    return JSONResponse(page | {"has_more": len(rows) > limit})


@router.get("/v1/messages/batches/{message_batch_id}", response_model=docs.MessageBatch)
def retrieve_message_batch(request: Request, message_batch_id: str) -> JSONResponse:
    """Get a message batch: its status, counts and times."""
    return JSONResponse(_object(request, _row(request, message_batch_id)))


@router.post(
    "/v1/messages/batches/{message_batch_id}/cancel", response_model=docs.MessageBatch
)
def cancel_message_batch(request: Request, message_batch_id: str) -> JSONResponse:
    """Cancel a message batch. Requests that are already answered are kept."""
    batch_id = _row(request, message_batch_id)["id"]
    row = service_of(request).cancel_batch(batch_id)
    if row is None:  # deleted since
        raise _no_such_batch(message_batch_id)
    if row["status"] not in (api.CANCELLING, api.CANCELLED):
        raise ApiError(
            400,
            f"Message batch {message_batch_id} cannot be canceled: "
            + ("it has ended." if messages.has_ended(row) else "it is about to end."),
        )
    return JSONResponse(_object(request, row))


@router.delete(
    "/v1/messages/batches/{message_batch_id}", response_model=docs.DeletedMessageBatch
)
def delete_message_batch(request: Request, message_batch_id: str) -> JSONResponse:
    """Delete a message batch that has ended, with its requests and results.

    A repeated call has the same answer.
    """
    store = service_of(request).store

    def was_deleted() -> bool:
        batch_id = messages.batch_id_of(message_batch_id)
        return store.was_deleted(batch_id, messages.API, caller_of(request).sees)

    row = None if was_deleted() else _row(request, message_batch_id)
    if (
        row is not None
        and not store.delete_batch(row["id"], api.ENDED_STATUSES, _files_of(row))
        and not was_deleted()  # by another call
    ):
        raise ApiError(
            400,
            f"Message batch {message_batch_id} has not ended. Cancel it before "
            "deleting it.",
        )
    return JSONResponse({"id": message_batch_id, "type": "message_batch_deleted"})


@router.get(
    "/v1/messages/batches/{message_batch_id}/results",
    response_class=StreamingResponse,
    responses=docs.answers(JSONL, description="A JSON line for each request."),
)
def message_batch_results(request: Request, message_batch_id: str) -> StreamingResponse:
    """Read the results: one JSON line for each request, in the order of requests."""
    row = _row(request, message_batch_id)
    store = service_of(request).store
    named = f"message batch {message_batch_id}"
    if not messages.has_ended(row):
        raise ApiError(404, f"There are no results of {named} yet: it has not ended.")
    if not _results_kept(store, row):
        raise ApiError(404, f"The results of {named} are no longer kept.")
    return StreamingResponse(in_blocks(_results(store, row)), media_type=JSONL)


def _row(request: Request, message_batch_id: str) -> Row:
    row = service_of(request).store.get_batch(
        messages.batch_id_of(message_batch_id), caller_of(request).sees
    )
    if row is None or row["api"] != messages.API:
        raise _no_such_batch(message_batch_id)
    return row


def _place(request: Request, message_batch_id: str) -> int:
    """Where a page begins. Raises 404 if there never was such a batch."""
    place = service_of(request).store.place(
        messages.batch_id_of(message_batch_id), messages.API, caller_of(request).sees
    )
    if place is None:
        raise _no_such_batch(message_batch_id)
    return place


def _no_such_batch(message_batch_id: str) -> ApiError:
    return ApiError(404, f"No message batch found with id '{message_batch_id}'.")


def _object(request: Request, row: Row, url: str | None = None) -> dict[str, Any]:
    """A batch for a caller.

    An object that is kept has no ``url``, since calls that name other servers may
    get it.
    """
    service = service_of(request)
    url = base_url(request) if url is None else url
    shown = messages.message_batch_object(row, url)
    if shown["results_url"] and not _results_kept(service.store, row):
        shown["results_url"] = None
    return shown | owner_field(request, row)


def _files_of(row: Row) -> list[str]:
    ids = (row["input_file_id"], messages.rejected_file_id(row))
    return [each for each in (*ids, *result_files(row)) if each]


def _results_kept(store: BatchStore, row: Row) -> bool:
    """Whether all files with a batch's results still exist."""
    needed = result_files(row) or [row["input_file_id"]]
    if rejected := messages.rejected_file_id(row):
        needed.append(rejected)
    return all(store.get_file(file_id) is not None for file_id in needed)


def _results(store: BatchStore, row: Row) -> Iterator[bytes]:
    def lines(file_id: str | None) -> Iterator[bytes]:
        if file_id is not None:
            with open(store.file_path(file_id), "rb") as file:
                yield from file

    rejected = lines(messages.rejected_file_id(row))
    if result_files(row):
        files = lines(row["output_file_id"]), lines(row["error_file_id"])
        return messages.results(*files, rejected)
    return messages.results_without_files(lines(row["input_file_id"]), rejected, row)
