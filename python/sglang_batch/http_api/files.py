"""``/v1/files``: what clients upload, and the results of batches."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse
from starlette.datastructures import UploadFile

from ..batch_api import protocol as api
from ..batch_api.objects import file_object
from ..errors import ApiError
from ..store.batch_store import now
from .errors import OpenAIRoute
from .parameters import check_limit, page, service_of

MAX_FILE_PAGE = 10_000

router = APIRouter(route_class=OpenAIRoute)


@router.post("/v1/files")
async def create_file(request: Request) -> JSONResponse:
    """Upload a file (multipart form: ``purpose``, ``file``)."""
    async with request.form() as form:
        purpose, file = form.get("purpose"), form.get("file")
        if purpose not in api.FILE_PURPOSES:
            raise ApiError(
                400,
                f"Invalid value for 'purpose': {purpose!r}. "
                f"Supported values are: {', '.join(api.FILE_PURPOSES)}.",
                param="purpose",
                code="invalid_value",
            )
        if not isinstance(file, UploadFile):
            raise ApiError(400, "Missing required parameter: 'file'.", param="file")
        filename = file.filename or "upload"
        # Clients name an in-memory upload "upload": only another suffix is wrong.
        if purpose == "batch" and "." in filename and not filename.endswith(".jsonl"):
            raise ApiError(400, "Invalid file format for Batch API. Must be .jsonl")
        expires_at = _expires_at(form.get("expires_after[seconds]"))
        row = await asyncio.to_thread(
            service_of(request).create_file, file.file, filename, purpose, expires_at
        )
    return JSONResponse(file_object(row))


def _expires_at(seconds: Any) -> int | None:
    if seconds is None:
        return None
    digits = str(seconds)
    usable = digits.isdecimal() and len(digits) <= 7
    if not usable or not 3600 <= int(digits) <= 2_592_000:
        raise ApiError(
            400,
            f"Invalid value for 'expires_after.seconds': {seconds!r}. "
            "Expected a whole number from 3600 to 2592000.",
            param="expires_after.seconds",
        )
    return now() + int(digits)


@router.get("/v1/files")
def list_files(
    request: Request,
    after: str | None = None,
    limit: int = MAX_FILE_PAGE,
    order: str = "desc",
    purpose: str | None = None,
) -> JSONResponse:
    """Files by creation time, a page at a time."""
    limit = check_limit(limit, MAX_FILE_PAGE)
    if order not in ("asc", "desc"):
        raise ApiError(
            400,
            f"Invalid value for 'order': {order!r}. Use asc or desc.",
            param="order",
        )
    store = service_of(request).store
    if after is not None and store.get_file(after) is None:
        raise _no_such_file(after, "after")
    rows = store.list_files(
        after=after, limit=limit + 1, descending=order == "desc", purpose=purpose
    )
    return page([file_object(row) for row in rows], limit)


@router.get("/v1/files/{file_id}")
def retrieve_file(request: Request, file_id: str) -> JSONResponse:
    """What the server knows of a file."""
    return JSONResponse(file_object(_file_row(request, file_id)))


@router.get("/v1/files/{file_id}/content")
def file_content(request: Request, file_id: str) -> FileResponse:
    """A file's bytes."""
    row = _file_row(request, file_id)
    path = service_of(request).store.file_path(file_id)
    return FileResponse(path, media_type="application/jsonl", filename=row["filename"])


@router.delete("/v1/files/{file_id}")
def delete_file(request: Request, file_id: str) -> JSONResponse:
    """Delete a file. A batch that already runs has its own copy of its input."""
    if not service_of(request).store.delete_file(file_id):
        raise _no_such_file(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _file_row(request: Request, file_id: str) -> dict[str, Any]:
    row = service_of(request).store.get_file(file_id)
    if row is None:
        raise _no_such_file(file_id)
    return row


def _no_such_file(file_id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No such File object: {file_id}", param=param)
