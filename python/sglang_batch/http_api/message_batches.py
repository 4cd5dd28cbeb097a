"""``/v1/messages/batches``: Anthropic's batch API over the same batches and files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ..batch_api import message_batches as messages
from ..batch_api import message_results
from ..batch_api import protocol as api
from ..errors import ApiError
from ..store.batch_store import BatchStore, Row
from .anthropic_errors import AnthropicRoute
from .caller import owner_of
from .idempotency import Keep, answer_once
from .message_intake import make_message_batch, receive, repeated
from .openapi import (
    ANTHROPIC_ERRORS,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchPage,
    NewMessageBatch,
    answers,
    takes_json,
    whole_number,
)
from .parameters import check_limit, service_of

MAX_PAGE = 1000
JSONL = "application/x-jsonl"  # Anthropic's
_CHUNK_BYTES = 1 << 18


router = APIRouter(
    route_class=AnthropicRoute, responses=ANTHROPIC_ERRORS, tags=["Message batches"]
)


@router.post(
    "/v1/messages/batches",
    response_model=MessageBatch,
    openapi_extra=takes_json(NewMessageBatch),
)
async def create_message_batch(request: Request) -> Response:
    """Start a batch of messages."""
    service, owner = service_of(request), owner_of(request)
    # On the store's disk: the system's directory for such files may be memory.
    with TemporaryDirectory(dir=service.store.incoming) as scratch:
        body = Path(scratch) / "body.json"
        sha256 = await receive(request, body)

        async def make(keep: Keep) -> JSONResponse:
            def on_made(row: Row) -> None:
                keep(_object(request, row))

            row = None
            # A client that repeats what it got no answer to means the batch it asked
            # for.
            if request.headers.get("x-stainless-retry-count", "0") not in ("", "0"):
                row = repeated(service, sha256, owner)
            if row is None:
                row = await asyncio.to_thread(
                    make_message_batch, service, body, sha256, owner, on_made
                )
            else:
                await asyncio.to_thread(on_made, row)
            return JSONResponse(_object(request, row))

        return await answer_once(request, sha256.encode(), make)


@router.get("/v1/messages/batches", response_model=MessageBatchPage)
def list_message_batches(
    request: Request,
    before_id: str | None = None,
    after_id: str | None = None,
    limit: Annotated[int, whole_number(1, MAX_PAGE)] = 20,
) -> JSONResponse:
    """Message batches, newest first, a page at a time."""
    check_limit(limit, MAX_PAGE)
    if before_id is not None and after_id is not None:
        raise ApiError(400, "before_id and after_id: only one of them may be given.")
    # Also says that a batch the page is to begin at does not exist.
    before, after = (
        None if name is None else _row(request, name)["id"]
        for name in (before_id, after_id)
    )
    rows = service_of(request).store.list_batches(
        before=before,
        after=after,
        limit=limit + 1,
        owner=owner_of(request),
        api=messages.API,
    )
    # One more than asked for: the farthest from where the page begins.
    shown = rows[-limit:] if before is not None else rows[:limit]
    data = [_object(request, row) for row in shown]
    return JSONResponse(
        {
            "data": data,
            "has_more": len(rows) > limit,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
        }
    )


@router.get("/v1/messages/batches/{message_batch_id}", response_model=MessageBatch)
def retrieve_message_batch(request: Request, message_batch_id: str) -> JSONResponse:
    """A message batch as it stands."""
    return JSONResponse(_object(request, _row(request, message_batch_id)))


@router.post(
    "/v1/messages/batches/{message_batch_id}/cancel", response_model=MessageBatch
)
def cancel_message_batch(request: Request, message_batch_id: str) -> JSONResponse:
    """Cancel a message batch; what is finished is kept."""
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
    "/v1/messages/batches/{message_batch_id}", response_model=DeletedMessageBatch
)
def delete_message_batch(request: Request, message_batch_id: str) -> JSONResponse:
    """Forget a message batch that has ended, its requests and its results."""
    row = _row(request, message_batch_id)
    store = service_of(request).store
    if not store.delete_batch(row["id"], messages.ENDED_STATUSES):
        raise ApiError(
            400,
            f"Message batch {message_batch_id} has not ended; cancel it before "
            "deleting it.",
        )
    for file_id in _files_of(row):
        store.delete_file(file_id)
    return JSONResponse({"id": message_batch_id, "type": "message_batch_deleted"})


@router.get(
    "/v1/messages/batches/{message_batch_id}/results",
    response_class=StreamingResponse,
    responses=answers(JSONL, description="A JSON line for each request."),
)
def message_batch_results(request: Request, message_batch_id: str) -> StreamingResponse:
    """One JSON line for each request, in the order of the requests."""
    row = _row(request, message_batch_id)
    store = service_of(request).store
    if not messages.has_ended(row):
        raise ApiError(
            404,
            f"Message batch {message_batch_id} has no results yet: it has not ended.",
        )
    if not _results_kept(store, row):
        raise ApiError(
            404, f"The results of message batch {message_batch_id} are kept no longer."
        )
    return StreamingResponse(_in_chunks(_results(store, row)), media_type=JSONL)


# --------------------------------------------------------------------------------


def _row(request: Request, message_batch_id: str) -> Row:
    row = service_of(request).store.get_batch(
        messages.batch_id_of(message_batch_id), owner_of(request)
    )
    if row is None or row["api"] != messages.API:
        raise _no_such_batch(message_batch_id)
    return row


def _no_such_batch(message_batch_id: str) -> ApiError:
    return ApiError(404, f"No message batch found with id '{message_batch_id}'.")


def _object(request: Request, row: Row) -> dict[str, Any]:
    shown = messages.message_batch_object(row, str(request.base_url))
    if shown["results_url"] and not _results_kept(service_of(request).store, row):
        shown["results_url"] = None
    return shown


def _files_of(row: Row) -> list[str]:
    """All files that belong to a message batch."""
    ids = (row["input_file_id"], messages.rejected_file_id(row))
    return [each for each in (*ids, *_result_files(row)) if each]


def _result_files(row: Row) -> list[str]:
    return [id for id in (row["output_file_id"], row["error_file_id"]) if id]


def _results_kept(store: BatchStore, row: Row) -> bool:
    """Whether the files that a batch's results are read from are still there."""
    needed = [*(_result_files(row) or [row["input_file_id"]])]
    if rejected := messages.rejected_file_id(row):
        needed.append(rejected)
    return all(store.get_file(file_id) is not None for file_id in needed)


def _results(store: BatchStore, row: Row) -> Iterator[bytes]:
    def lines(file_id: str | None) -> Iterator[bytes]:
        if file_id is not None:
            with open(store.file_path(file_id), "rb") as file:
                yield from file

    rejected = lines(messages.rejected_file_id(row))
    if messages.has_results(row):
        files = lines(row["output_file_id"]), lines(row["error_file_id"])
        return message_results.results(*files, rejected)
    return message_results.results_without_files(
        lines(row["input_file_id"]), rejected, row
    )


def _in_chunks(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Lines together, so that not each is a write of its own."""
    pieces, held = [], 0
    for line in lines:
        pieces.append(line)
        held += len(line)
        if held >= _CHUNK_BYTES:
            yield b"".join(pieces)
            pieces, held = [], 0
    if pieces:
        yield b"".join(pieces)
