"""``/v1/files``: files that clients upload, and the results of batches."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from openai.types import FileDeleted

from ...batch_api.objects import file_object, list_object
from ...errors import ApiError
from ...store.batch_store import Row
from .callers import owner_field, owner_of, owner_seen
from .error_responses import OpenAIRoute
from .idempotency import BODY_KEY, Keep, answer_once
from .multipart_form import received_form
from .openapi import (
    OPENAI_ERRORS,
    FileObject,
    FilePage,
    NewFile,
    answers,
    one_of,
    takes_form,
    whole_number,
)
from .parameters import (
    check_filename,
    check_limit,
    check_purpose,
    form_expires_after,
    invalid,
    service_of,
)
from .result_responses import BYTES, JSONL, file_response, results_so_far

KIND = "files"
MAX_FILE_PAGE = 10_000

router = APIRouter(route_class=OpenAIRoute, responses=OPENAI_ERRORS, tags=["Files"])


@router.post("/v1/files", response_model=FileObject, openapi_extra=takes_form(NewFile))
async def create_file(request: Request) -> Response:
    """Upload a file."""
    service = service_of(request)
    limit = service.config.max_file_bytes
    async with received_form(request, "file", limit) as form:
        purpose = check_purpose(form.fields.get("purpose"))
        file = form.file
        if file is None:
            raise ApiError(400, "Missing required parameter: 'file'.", param="file")
        filename = file.filename or "upload"
        check_filename(filename, purpose)
        kept_s = form_expires_after(form.fields)

        async def make(keep: Keep) -> JSONResponse:
            row = await asyncio.to_thread(
                service.add_file,
                file.path,
                filename,
                purpose,
                kept_s,
                owner_of(request),
                on_made=lambda row: keep(file_object(row)),
            )
            return JSONResponse(file_object(row))

        content = json.dumps([form.fields, filename, file.sha256], sort_keys=True)
        key = form.fields.get(BODY_KEY)
        return await answer_once(request, content.encode(), make, key)


@router.get("/v1/files", response_model=FilePage)
def list_files(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, whole_number(1, MAX_FILE_PAGE)] = MAX_FILE_PAGE,
    order: Annotated[str, one_of("asc", "desc")] = "desc",
    purpose: str | None = None,
) -> JSONResponse:
    """List files by creation time, one page at a time."""
    limit = check_limit(limit, MAX_FILE_PAGE)
    if order not in ("asc", "desc"):
        raise invalid("order", order, "Use asc or desc.")
    store, owner = service_of(request).store, owner_seen(request)
    place = store.place(after, KIND, owner) if after else None
    if after and place is None:
        raise no_such_file(after, "after")
    rows = store.list_files(
        after=place,
        limit=limit + 1,
        descending=order == "desc",
        purpose=purpose or None,
        owner=owner,
    )
    return JSONResponse(list_object([_shown(request, row) for row in rows], limit))


@router.get("/v1/files/{file_id}", response_model=FileObject)
def retrieve_file(request: Request, file_id: str) -> JSONResponse:
    """Get a file's name, size, purpose and times."""
    row = service_of(request).store.get_file(file_id, owner_seen(request))
    if row is None:
        raise no_such_file(file_id)
    return JSONResponse(_shown(request, row))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses=answers(JSONL, BYTES, description="The file's bytes."),
)
def file_content(request: Request, file_id: str) -> Response:
    """Read a file's bytes.

    The result files of a running batch contain its finished lines so far. The header
    ``X-Incomplete`` tells whether there will be more.
    """
    store, owner = service_of(request).store, owner_seen(request)
    response = file_response(store, file_id, owner) or results_so_far(
        store, file_id, owner
    )
    # The batch may have ended between the two calls.
    response = response or file_response(store, file_id, owner)
    if response is None:
        raise no_such_file(file_id)
    return response


@router.delete("/v1/files/{file_id}", response_model=FileDeleted)
def delete_file(request: Request, file_id: str) -> JSONResponse:
    """Delete a file. A batch that is already running has its own copy of its input.

    A repeated call has the same answer.
    """
    store, owner = service_of(request).store, owner_seen(request)
    if not store.delete_file(file_id, owner) and not (
        store.was_deleted(file_id, KIND, owner)
    ):
        raise no_such_file(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _shown(request: Request, row: Row) -> dict[str, Any]:
    """A file as its owner sees it. An admin also sees whose it is."""
    return file_object(row) | owner_field(request, row)


def no_such_file(file_id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No such File object: {file_id}", param=param)
