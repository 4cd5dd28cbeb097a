"""``/v1/messages/batches``: Anthropic's batch API for the same engine and store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ....batch_api import message_batches as messages
from ....batch_api import message_results
from ....batch_api import protocol as api
from ....errors import ApiError
from ....store.batch_store import BatchStore, Row
from ....store.incoming import AHEAD_BYTES
from ..authorization.callers import caller_of, owner_field, owner_seen
from ..idempotency import Keep, answer_once, is_repeated
from ..links import base_url
from ..openapi import (
    ANTHROPIC_ERRORS,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchPage,
    NewMessageBatch,
    answers,
    takes_json,
    whole_number,
)
from ..parameters import check_limit, service_of
from ..received_bodies import content_length, large_body
from ..result_responses import in_blocks
from .anthropic_errors import AnthropicRoute
from .message_intake import make_message_batch, most_bytes, receive, recent_batch

MAX_PAGE = 1000
JSONL = "application/x-jsonl"  # Anthropic's

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

        async def make(keep: Keep) -> JSONResponse:
            def on_made(row: Row) -> None:
                keep(_object(request, row, url=""))

            row = None
            # A client that got no answer and tries again means the batch of its first
            # call.
            if is_repeated(request):
                row = recent_batch(service, sha256, caller.name)
            if row is None:
                row = await asyncio.to_thread(
                    make_message_batch, service, body, sha256, caller, on_made
                )
            else:
                await asyncio.to_thread(on_made, row)
            return JSONResponse(_object(request, row))

        def shown(kept: dict[str, Any]) -> dict[str, Any]:
            path = kept["results_url"]
            if path is None or not path.startswith("/"):  # of an earlier version
                return kept
            return kept | {"results_url": base_url(request) + path}

        return await answer_once(request, sha256.encode(), make, shown=shown)


@router.get("/v1/messages/batches", response_model=MessageBatchPage)
def list_message_batches(
    request: Request,
    before_id: str | None = None,
    after_id: str | None = None,
    limit: Annotated[int, whole_number(1, MAX_PAGE)] = 20,
) -> JSONResponse:
    """List message batches, newest first, one page at a time."""
    check_limit(limit, MAX_PAGE)
    if before_id and after_id:
        raise ApiError(400, "before_id and after_id: only one of them may be given.")
    before, after = (
        _place(request, name) if name else None for name in (before_id, after_id)
    )
    rows = service_of(request).store.list_batches(
        before=before,
        after=after,
        limit=limit + 1,
        owner=owner_seen(request),
        api=messages.API,
    )
    # Without the extra one, which is the farthest from where the page begins.
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
    """Get a message batch: its status, counts and times."""
    return JSONResponse(_object(request, _row(request, message_batch_id)))


@router.post(
    "/v1/messages/batches/{message_batch_id}/cancel", response_model=MessageBatch
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
    "/v1/messages/batches/{message_batch_id}", response_model=DeletedMessageBatch
)
def delete_message_batch(request: Request, message_batch_id: str) -> JSONResponse:
    """Delete a message batch that has ended, with its requests and results.

    A repeated call has the same answer.
    """
    store = service_of(request).store

    def was_deleted() -> bool:
        batch_id = messages.batch_id_of(message_batch_id)
        return store.was_deleted(batch_id, messages.API, owner_seen(request))

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
    responses=answers(JSONL, description="A JSON line for each request."),
)
def message_batch_results(request: Request, message_batch_id: str) -> StreamingResponse:
    """Read the results: one JSON line for each request, in the order of requests."""
    row = _row(request, message_batch_id)
    store = service_of(request).store
    if not messages.has_ended(row):
        raise ApiError(
            404,
            f"Message batch {message_batch_id} has no results yet: it has not ended.",
        )
    if not _results_kept(store, row):
        raise ApiError(
            404,
            f"The results of message batch {message_batch_id} are no longer kept.",
        )
    return StreamingResponse(in_blocks(_results(store, row)), media_type=JSONL)


# Batches and their files ----------------------------------------------------------


def _row(request: Request, message_batch_id: str) -> Row:
    row = service_of(request).store.get_batch(
        messages.batch_id_of(message_batch_id), owner_seen(request)
    )
    if row is None or row["api"] != messages.API:
        raise _no_such_batch(message_batch_id)
    return row


def _place(request: Request, message_batch_id: str) -> int:
    """Where a page begins. Raises 404 if there never was such a batch."""
    place = service_of(request).store.place(
        messages.batch_id_of(message_batch_id), messages.API, owner_seen(request)
    )
    if place is None:
        raise _no_such_batch(message_batch_id)
    return place


def _no_such_batch(message_batch_id: str) -> ApiError:
    return ApiError(404, f"No message batch found with id '{message_batch_id}'.")


def _object(request: Request, row: Row, url: str | None = None) -> dict[str, Any]:
    """A batch for a caller.

    Args:
        url: of the server. None is how the call names it. An answer that is kept has
            none: it may be repeated to a call that names another.
    """
    service = service_of(request)
    url = base_url(request) if url is None else url
    shown = messages.message_batch_object(row, url)
    if shown["results_url"] and not _results_kept(service.store, row):
        shown["results_url"] = None
    return shown | owner_field(request, row)


def _files_of(row: Row) -> list[str]:
    """The ids of all files that belong to a message batch."""
    ids = (row["input_file_id"], messages.rejected_file_id(row))
    return [each for each in (*ids, *_result_files(row)) if each]


def _result_files(row: Row) -> list[str]:
    return [id for id in (row["output_file_id"], row["error_file_id"]) if id]


def _results_kept(store: BatchStore, row: Row) -> bool:
    """Whether all files with a batch's results still exist."""
    needed = _result_files(row) or [row["input_file_id"]]
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
