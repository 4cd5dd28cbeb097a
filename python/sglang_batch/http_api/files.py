"""``/v1/files``: what clients upload, and the results of batches."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from openai.types import FileDeleted

from ..batch_api import protocol as api
from ..batch_api.objects import file_object
from ..errors import ApiError
from ..store.batch_store import now
from .caller import owner_of
from .errors import OpenAIRoute
from .forms import Form, received_form
from .idempotency import Keep, answer_once
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
from .parameters import check_limit, invalid, page, service_of
from .results import BYTES, JSONL, file_response, results_so_far

MAX_FILE_PAGE = 10_000

router = APIRouter(route_class=OpenAIRoute, responses=OPENAI_ERRORS, tags=["Files"])


@router.post("/v1/files", response_model=FileObject, openapi_extra=takes_form(NewFile))
async def create_file(request: Request) -> Response:
    """Upload a file."""
    service = service_of(request)
    limit = service.config.max_file_bytes
    async with received_form(request, "file", service.store.incoming, limit) as form:
        purpose = form.fields.get("purpose")
        check_purpose(purpose)
        file = form.file
        if file is None:
            raise ApiError(400, "Missing required parameter: 'file'.", param="file")
        filename = file.filename or "upload"
        check_filename(filename, purpose)
        seconds = _expires_after(form)

        async def make(keep: Keep) -> JSONResponse:
            row = await asyncio.to_thread(
                service.add_file,
                file.path,
                filename,
                str(purpose),
                None if seconds is None else now() + seconds,
                owner_of(request),
                on_made=lambda row: keep(file_object(row)),
            )
            return JSONResponse(file_object(row))

        said = json.dumps([form.fields, filename, file.sha256], sort_keys=True)
        return await answer_once(request, said.encode(), make)


def check_purpose(purpose: Any) -> None:
    if purpose not in api.FILE_PURPOSES:
        raise invalid(
            "purpose", purpose, f"Supported values are: {', '.join(api.FILE_PURPOSES)}."
        )


def check_filename(filename: str, purpose: str | None) -> None:
    if len(filename) > api.MAX_FILENAME_LEN:
        message = f"A filename has at most {api.MAX_FILENAME_LEN} characters."
        raise ApiError(400, message, param="filename", code="invalid_value")
    # Clients name an in-memory upload "upload": only another suffix is wrong.
    if purpose == "batch" and "." in filename and not filename.endswith(".jsonl"):
        raise ApiError(400, "Invalid file format for Batch API. Must be .jsonl")


def _expires_after(form: Form) -> int | None:
    """Seconds that a file is kept, as a form says it; None where it does not."""
    anchor = form.fields.get("expires_after[anchor]")
    seconds: Any = form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if str(seconds).isascii() and str(seconds).isdecimal() and len(seconds) <= 7:
        seconds = int(seconds)
    # There is only one anchor, and forms are written by hand: it may be left out.
    return check_expires_after({"anchor": anchor or "created_at", "seconds": seconds})


def check_expires_after(value: Any, name: str = "expires_after") -> int | None:
    """Seconds of ``{"anchor": "created_at", "seconds": ...}``; None of None."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ApiError(
            400, f"'{name}' must be an object.", param=name, code="invalid_type"
        )
    if value.get("anchor") != "created_at":
        raise invalid(f"{name}.anchor", value.get("anchor"), "Use 'created_at'.")
    seconds = value.get("seconds")
    least, most = api.MIN_EXPIRY_S, api.MAX_EXPIRY_S
    if type(seconds) is not int or not least <= seconds <= most:
        wanted = f"Expected a whole number from {least} to {most}."
        raise invalid(f"{name}.seconds", seconds, wanted)
    return seconds


@router.get("/v1/files", response_model=FilePage)
def list_files(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, whole_number(1, MAX_FILE_PAGE)] = MAX_FILE_PAGE,
    order: Annotated[str, one_of("asc", "desc")] = "desc",
    purpose: str | None = None,
) -> JSONResponse:
    """Files by creation time, a page at a time."""
    limit = check_limit(limit, MAX_FILE_PAGE)
    if order not in ("asc", "desc"):
        raise invalid("order", order, "Use asc or desc.")
    store, owner = service_of(request).store, owner_of(request)
    if after is not None and store.get_file(after, owner) is None:
        raise no_such_file(after, "after")
    rows = store.list_files(
        after=after,
        limit=limit + 1,
        descending=order == "desc",
        purpose=purpose,
        owner=owner,
    )
    return page([file_object(row) for row in rows], limit)


@router.get("/v1/files/{file_id}", response_model=FileObject)
def retrieve_file(request: Request, file_id: str) -> JSONResponse:
    """What the server knows of a file."""
    row = service_of(request).store.get_file(file_id, owner_of(request))
    if row is None:
        raise no_such_file(file_id)
    return JSONResponse(file_object(row))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses=answers(JSONL, BYTES, description="The file's bytes."),
)
def file_content(request: Request, file_id: str) -> Response:
    """A file's bytes; of a batch that still runs, the lines that are finished.

    The header ``X-Incomplete`` says whether there will be more.
    """
    store, owner = service_of(request).store, owner_of(request)
    response = file_response(store, file_id, owner) or results_so_far(
        store, file_id, owner
    )
    # The batch may have come to its end between the two.
    response = response or file_response(store, file_id, owner)
    if response is None:
        raise no_such_file(file_id)
    return response


@router.delete("/v1/files/{file_id}", response_model=FileDeleted)
def delete_file(request: Request, file_id: str) -> JSONResponse:
    """Delete a file. A batch that already runs has its own copy of its input."""
    if not service_of(request).store.delete_file(file_id, owner_of(request)):
        raise no_such_file(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def no_such_file(file_id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No such File object: {file_id}", param=param)
