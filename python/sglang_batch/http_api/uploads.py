"""``/v1/uploads``: a large file in parts, which become one file at the end."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from openai.types.uploads import UploadPart

from ..batch_api.objects import part_object, upload_object
from ..batch_api.protocol import MAX_UPLOAD_BYTES
from ..errors import ApiError
from ..service import BatchService, new_id
from ..store.batch_store import OnMade, Row, now
from ..store.uploads import PENDING, UploadStore
from .caller import owner_of
from .errors import OpenAIRoute
from .files import check_expires_after, check_filename, check_purpose
from .forms import received_form, too_large
from .idempotency import Keep, answer_once
from .openapi import (
    OPENAI_ERRORS,
    CompletedUpload,
    NewPart,
    NewUpload,
    UploadObject,
    takes_form,
    takes_json,
)
from .parameters import check_string, invalid, json_object, service_of

MAX_PART_BYTES = 64 << 20

router = APIRouter(route_class=OpenAIRoute, responses=OPENAI_ERRORS, tags=["Uploads"])


@router.post(
    "/v1/uploads", response_model=UploadObject, openapi_extra=takes_json(NewUpload)
)
async def create_upload(request: Request) -> Response:
    """Begin an upload; it takes parts for an hour."""
    service = service_of(request)
    body = await json_object(request)
    row = await asyncio.to_thread(_checked_fields, service, body)

    async def make(keep: Keep) -> JSONResponse:
        upload_id = new_id("upload_")
        new = {"id": upload_id, "owner": owner_of(request), "created_at": now(), **row}

        def add() -> dict[str, Any]:
            with service.store.atomic():
                UploadStore(service.store).add(new)
                shown = upload_object(_upload_row(request, upload_id))
                keep(shown)
            return shown

        return JSONResponse(await asyncio.to_thread(add))

    return await answer_once(request, await request.body(), make)


def _checked_fields(service: BatchService, body: dict[str, Any]) -> Row:
    """Check the body of a new upload; returns columns of its row."""
    for key in ("filename", "purpose", "mime_type"):
        check_string(body, key)
    check_purpose(body["purpose"])
    check_filename(body["filename"], body["purpose"])
    num_bytes = body.get("bytes")
    if type(num_bytes) is not int or num_bytes < 0:
        raise invalid("bytes", num_bytes, "Expected the size of the file in bytes.")
    limit = min(MAX_UPLOAD_BYTES, service.config.max_file_bytes or MAX_UPLOAD_BYTES)
    if num_bytes > limit:
        raise too_large(limit)
    service.check_room(num_bytes)
    row = {key: body[key] for key in ("filename", "purpose", "mime_type", "bytes")}
    return row | {"file_expires_after": check_expires_after(body.get("expires_after"))}


@router.post(
    "/v1/uploads/{upload_id}/parts",
    response_model=UploadPart,
    openapi_extra=takes_form(NewPart),
)
async def add_part(request: Request, upload_id: str) -> Response:
    """Add a part; parts may come in any order."""
    service = service_of(request)
    _check_pending(_upload_row(request, upload_id))
    incoming = service.store.incoming
    # OpenAI's documentation shows a part that is sent as text.
    form_of = received_form(request, "data", incoming, MAX_PART_BYTES, may_be_text=True)
    async with form_of as form:
        data = form.file
        if data is None:
            raise ApiError(400, "Missing required parameter: 'data'.", param="data")

        async def make(keep: Keep) -> JSONResponse:
            num_bytes = data.path.stat().st_size
            uploads = UploadStore(service.store)
            row = await asyncio.to_thread(
                uploads.add_part,
                upload_id,
                new_id("part_"),
                data.path,
                lambda: _check_part(service, upload_id, num_bytes),
                lambda row: keep(part_object(row)),
            )
            if row is None:
                raise _not_pending(_upload_row(request, upload_id))
            return JSONResponse(part_object(row))

        return await answer_once(request, data.sha256.encode(), make)


def _check_part(service: BatchService, upload_id: str, num_bytes: int) -> None:
    """Whether an upload may have another part of this size."""
    service.check_room(num_bytes)
    parts = UploadStore(service.store).parts(upload_id).values()
    # Not the size that was announced: a part that was sent twice is not used twice.
    if sum(part["bytes"] for part in parts) + num_bytes > MAX_UPLOAD_BYTES:
        raise too_large(MAX_UPLOAD_BYTES)


@router.post(
    "/v1/uploads/{upload_id}/complete",
    response_model=UploadObject,
    openapi_extra=takes_json(CompletedUpload),
)
async def complete_upload(request: Request, upload_id: str) -> Response:
    """Make the parts one file, in the order of ``part_ids``."""
    body = await json_object(request)
    row = _upload_row(request, upload_id)

    def shown(file: Row) -> dict[str, Any]:
        return upload_object(_upload_row(request, upload_id), file)

    async def make(keep: Keep) -> JSONResponse:
        service = service_of(request)
        file = await asyncio.to_thread(
            _complete, service, row, body, lambda file: keep(shown(file))
        )
        return JSONResponse(shown(file))

    return await answer_once(request, await request.body(), make)


def _complete(
    service: BatchService, row: Row, body: dict[str, Any], on_made: OnMade
) -> Row:
    """Check what is to be the file, put it together, and record it."""
    uploads = UploadStore(service.store)
    parts = uploads.parts(row["id"])
    # Only now: what has ended since may have lost parts.
    _check_pending(uploads.get(row["id"]) or row)
    part_ids = _checked_part_ids(row, body, parts)
    file_id = new_id("file-")
    path = service.store.file_path(file_id)
    kept_s = row["file_expires_after"]
    made = False
    try:
        md5 = uploads.assemble(row["id"], part_ids, path)
        _check_md5(body.get("md5"), md5)
        if kept_s is None:
            expires_at = service.default_expiry(row["purpose"], now())
        else:
            expires_at = now() + kept_s
        made = uploads.complete(row["id"], file_id, expires_at, on_made)
    except FileNotFoundError:  # another call ended the upload, its parts are gone
        pass
    finally:
        if not made:
            path.unlink(missing_ok=True)
    file = service.store.get_file(file_id)
    if file is None:
        raise _not_pending(uploads.get(row["id"]) or row)
    return file


def _checked_part_ids(
    row: Row, body: dict[str, Any], parts: dict[str, Row]
) -> list[str]:
    part_ids = body.get("part_ids")
    if not isinstance(part_ids, list) or not all(isinstance(p, str) for p in part_ids):
        raise ApiError(400, "'part_ids' must be a list of strings.", param="part_ids")
    seen: set[str] = set()
    for part_id in part_ids:
        if part_id not in parts:
            hint = f"Upload {row['id']} has no such part."
            raise invalid("part_ids", part_id, hint)
        if part_id in seen:
            raise invalid("part_ids", part_id, "It is named twice.")
        seen.add(part_id)
    num_bytes = sum(parts[part_id]["bytes"] for part_id in part_ids)
    if num_bytes != row["bytes"]:
        raise ApiError(
            400,
            f"The parts have {num_bytes} bytes together, and the upload was begun for "
            f"{row['bytes']} bytes.",
            param="part_ids",
            code="invalid_value",
        )
    return part_ids


def _check_md5(wanted: Any, md5: str) -> None:
    if wanted is not None and (not isinstance(wanted, str) or wanted.lower() != md5):
        raise invalid("md5", wanted, f"The MD5 of the parts in this order is {md5}.")


@router.post("/v1/uploads/{upload_id}/cancel", response_model=UploadObject)
def cancel_upload(request: Request, upload_id: str) -> JSONResponse:
    """Cancel an upload; its parts are dropped."""
    _check_pending(_upload_row(request, upload_id))
    UploadStore(service_of(request).store).cancel(upload_id)
    row = _upload_row(request, upload_id)
    if row["status"] != "cancelled":
        raise _not_pending(row)
    return JSONResponse(upload_object(row))


def _upload_row(request: Request, upload_id: str) -> Row:
    uploads = UploadStore(service_of(request).store)
    row = uploads.get(upload_id, owner_of(request))
    if row is None:
        raise ApiError(404, f"No such Upload object: {upload_id}", param="id")
    return row


def _check_pending(row: Row) -> None:
    if row["status"] != PENDING:
        raise _not_pending(row)


def _not_pending(row: Row) -> ApiError:
    return ApiError(
        409,
        f"Upload {row['id']} is {row['status']}; only a pending one takes parts and can "
        "be completed or cancelled.",
        retry=False,
    )
