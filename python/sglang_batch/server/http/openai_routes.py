"""OpenAI's ``/v1/files``, ``/v1/uploads`` and ``/v1/batches``, and the costs of batches."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from openai.types import FileDeleted
from openai.types.uploads import UploadPart

from ...batch_api import protocol as api
from ...batch_api.objects import (
    batch_object,
    file_object,
    list_object,
    part_object,
    result_files,
    upload_object,
)
from ...errors import ApiError
from ...store.batch_store import OnMade, Row, now
from ...store.incoming import CANCELLED, COMPLETED, PENDING, UploadStore
from ..access.usage import cost_object, costs_by_label
from ..service import BatchService, new_id
from . import openapi as docs
from . import parameters
from .authorization import caller_of, owner_field
from .calls import OurRoute
from .idempotency import REPEATED_WITHIN_S, Keep, answer_once, is_repeated
from .parameters import received_form, too_large
from .result_responses import BYTES, JSONL, batch_results, file_response, results_so_far

KIND = "files"
MAX_FILE_PAGE = 10_000

file_router, upload_router, batch_router = (
    APIRouter(route_class=OurRoute, responses=docs.OPENAI_ERRORS, tags=[tag])
    for tag in ("Files", "Uploads", "Batches")
)


@file_router.post(
    "/v1/files",
    response_model=docs.FileObject,
    openapi_extra=docs.takes_form(docs.NewFile),
)
async def create_file(request: Request) -> Response:
    """Upload a file."""
    service = parameters.service_of(request)
    limit = service.config.max_file_bytes
    async with received_form(request, "file", limit) as form:
        file = form.file
        if file is None:
            raise ApiError(400, "Missing required parameter: 'file'.", param="file")
        given = {
            "filename": form.filename or "upload",
            "purpose": form.fields.get("purpose"),
            "expires_after": parameters.form_expires_after(form.fields),
        }
        new = parameters.checked(docs.FileFields, given)
        parameters.check_filename(new.filename, new.purpose)

        def make(keep: Keep) -> dict[str, Any]:
            row = service.add_file(
                file.path,
                new.filename,
                new.purpose,
                docs.seconds_of(new.expires_after),
                caller_of(request).name,
                on_made=lambda row: keep(file_object(row)),
            )
            return file_object(row)

        content = json.dumps([form.fields, new.filename, form.sha256], sort_keys=True)
        key = form.fields.get(parameters.BODY_KEY)
        return await answer_once(request, content.encode(), make, key)


@file_router.get("/v1/files", response_model=docs.FilePage)
def list_files(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, *parameters.page_limit(MAX_FILE_PAGE)] = MAX_FILE_PAGE,
    order: Annotated[str, docs.one_of("asc", "desc")] = "desc",
    purpose: str | None = None,
) -> JSONResponse:
    """List files by creation time, one page at a time."""
    if order not in ("asc", "desc"):
        raise parameters.invalid("order", order, "Use asc or desc.")
    store, owner = parameters.service_of(request).store, caller_of(request).sees
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
    return JSONResponse(list_object([_shown_file(request, row) for row in rows], limit))


@file_router.get("/v1/files/{file_id}", response_model=docs.FileObject)
def retrieve_file(request: Request, file_id: str) -> JSONResponse:
    """Get a file's name, size, purpose and times."""
    row = parameters.service_of(request).store.get_file(
        file_id, caller_of(request).sees
    )
    if row is None:
        raise no_such_file(file_id)
    return JSONResponse(_shown_file(request, row))


@file_router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses=docs.answers(JSONL, BYTES, description="The file's bytes."),
)
def file_content(request: Request, file_id: str) -> Response:
    """Read a file's bytes.

    The result files of a running batch contain its finished lines so far. The header
    ``X-Incomplete`` tells whether there will be more.
    """
    store, owner = parameters.service_of(request).store, caller_of(request).sees
    response = file_response(store, file_id, owner)
    response = response or results_so_far(store, file_id, owner)
    # The batch may have ended between the two calls.
    response = response or file_response(store, file_id, owner)
    if response is None:
        raise no_such_file(file_id)
    return response


@file_router.delete("/v1/files/{file_id}", response_model=FileDeleted)
def delete_file(request: Request, file_id: str) -> JSONResponse:
    """Delete a file. A batch that is already running has its own copy of its input.

    A repeated call has the same answer.
    """
    store, owner = parameters.service_of(request).store, caller_of(request).sees
    if not (
        store.delete_file(file_id, owner) or store.was_deleted(file_id, KIND, owner)
    ):
        raise no_such_file(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _shown_file(request: Request, row: Row) -> dict[str, Any]:
    """A file as its owner sees it. An admin also sees whose it is."""
    return file_object(row) | owner_field(request, row)


def no_such_file(file_id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No such File object: {file_id}", param=param)


MAX_PART_BYTES = 64 << 20
MAX_PARTS = 10_000


@upload_router.post(
    "/v1/uploads",
    response_model=docs.UploadObject,
    openapi_extra=docs.takes_json(docs.NewUpload),
)
async def create_upload(request: Request) -> Response:
    """Begin an upload. It accepts parts for an hour."""
    service = parameters.service_of(request)
    body, content = await parameters.json_object(request)
    row = await asyncio.to_thread(_checked_fields, service, body)

    def make(keep: Keep) -> dict[str, Any]:
        upload_id = new_id("upload_")
        new = {
            "id": upload_id,
            "owner": caller_of(request).name,
            "created_at": now(),
            **row,
        }
        with service.store.atomic():
            UploadStore(service.store).add(new)
            shown = upload_object(_upload_row(request, upload_id))
            keep(shown)
        return shown

    return await answer_once(request, content, make, body.get(parameters.BODY_KEY))


def _checked_fields(service: BatchService, body: dict[str, Any]) -> Row:
    """Check the body of a new upload and return the columns of its row."""
    num_bytes = body.get("bytes")
    limit = min(
        api.MAX_UPLOAD_BYTES, service.config.max_file_bytes or api.MAX_UPLOAD_BYTES
    )
    if type(num_bytes) is int and num_bytes > limit:
        raise too_large(limit)
    new = parameters.checked(docs.NewUpload, body)
    parameters.check_filename(new.filename, new.purpose)
    service.room.check(new.bytes)
    row = new.model_dump(include={"filename", "purpose", "mime_type", "bytes"})
    return row | {"file_expires_after": docs.seconds_of(new.expires_after)}


@upload_router.post(
    "/v1/uploads/{upload_id}/parts",
    response_model=UploadPart,
    openapi_extra=docs.takes_form(docs.NewPart),
)
async def add_part(request: Request, upload_id: str) -> Response:
    """Add a part. Parts may be sent in any order."""
    service = parameters.service_of(request)
    _check_pending(_upload_row(request, upload_id))
    # OpenAI's documentation shows a part sent as a text field.
    async with received_form(request, "data", MAX_PART_BYTES, may_be_text=True) as form:
        data = form.file
        if data is None:
            raise ApiError(400, "Missing required parameter: 'data'.", param="data")

        def make(keep: Keep) -> dict[str, Any]:
            num_bytes = data.path.stat().st_size
            row = UploadStore(service.store).add_part(
                upload_id,
                new_id("part_"),
                data.path,
                lambda: _check_parts(service, upload_id, num_bytes),
                lambda row: keep(part_object(row)),
            )
            if row is None:
                raise _not_pending(_upload_row(request, upload_id))
            return part_object(row)

        content, key = form.sha256.encode(), form.fields.get(parameters.BODY_KEY)
        return await answer_once(request, content, make, key)


def _check_parts(service: BatchService, upload_id: str, num_bytes: int) -> None:
    """Check that an upload may have another part of this size, or raise 413."""
    parts = UploadStore(service.store).parts(upload_id).values()
    # More than the announced size is fine: a part may be sent twice and used once.
    if sum(part["bytes"] for part in parts) + num_bytes > api.MAX_UPLOAD_BYTES:
        raise too_large(api.MAX_UPLOAD_BYTES)
    if len(parts) >= MAX_PARTS:
        message = f"An upload has at most {MAX_PARTS} parts."
        raise ApiError(413, message, code="too_many_parts", retry=False)


@upload_router.post(
    "/v1/uploads/{upload_id}/complete",
    response_model=docs.UploadObject,
    openapi_extra=docs.takes_json(docs.CompletedUpload),
)
async def complete_upload(request: Request, upload_id: str) -> Response:
    """Join the parts into one file, in the order of ``part_ids``.

    A repeated call has the same answer.
    """
    body, content = await parameters.json_object(request)
    row = _upload_row(request, upload_id)
    parts = parameters.checked(docs.CompletedUpload, body)

    def shown(file: Row) -> dict[str, Any]:
        return upload_object(_upload_row(request, upload_id), file)

    def make(keep: Keep) -> dict[str, Any]:
        service = parameters.service_of(request)
        return shown(_complete(service, row, parts, lambda file: keep(shown(file))))

    return await answer_once(request, content, make, body.get(parameters.BODY_KEY))


def _complete(
    service: BatchService, row: Row, call: docs.CompletedUpload, on_made: OnMade
) -> Row:
    uploads = UploadStore(service.store)
    completed_with = json.dumps([call.part_ids, call.md5])

    def completed_before(now: Row) -> Row | None:
        """The file, if another call with the same parts has completed the upload."""
        if now["status"] != COMPLETED or now["completed_with"] != completed_with:
            return None
        file = service.store.get_file(now["file_id"])
        if file is not None:
            on_made(file)
        return file

    parts = uploads.parts(row["id"])
    # After the parts were read: an upload that ended before has lost some of them.
    now = uploads.get(row["id"]) or row
    if (file := completed_before(now)) is not None:
        return file
    _check_pending(now)
    _check_part_ids(row, call.part_ids, parts)
    file_id = new_id("file-")
    kept_s = row["file_expires_after"]
    if kept_s is None:
        kept_s = service.default_lifetime(row["purpose"])
    try:
        with service.room.receive(row["bytes"]) as whole:
            md5 = uploads.assemble(row["id"], call.part_ids, whole)
            if call.md5 is not None and call.md5.lower() != md5:
                hint = f"The MD5 of the parts in this order is {md5}."
                raise parameters.invalid("md5", call.md5, hint)
            uploads.complete(
                row["id"], whole.path, file_id, kept_s, completed_with, on_made
            )
    except FileNotFoundError:  # another call ended the upload and removed its parts
        pass
    except BaseException:
        service.store.file_path(file_id).unlink(missing_ok=True)
        raise
    now = uploads.get(row["id"]) or row
    file = service.store.get_file(file_id) or completed_before(now)
    if file is None:
        raise _not_pending(now)
    return file


def _check_part_ids(row: Row, part_ids: list[str], parts: dict[str, Row]) -> None:
    seen: set[str] = set()
    for part_id in part_ids:
        if part_id not in parts:
            hint = f"Upload {row['id']} has no such part."
            raise parameters.invalid("part_ids", part_id, hint)
        if part_id in seen:
            raise parameters.invalid("part_ids", part_id, "It is named twice.")
        seen.add(part_id)
    num_bytes = sum(parts[part_id]["bytes"] for part_id in part_ids)
    if num_bytes != row["bytes"]:
        message = (
            f"The parts have {num_bytes} bytes in total, but the upload was created for "
            f"{row['bytes']} bytes."
        )
        raise ApiError(400, message, param="part_ids", code="invalid_value")


@upload_router.post("/v1/uploads/{upload_id}/cancel", response_model=docs.UploadObject)
def cancel_upload(request: Request, upload_id: str) -> JSONResponse:
    """Cancel an upload and drop its parts. A repeated call has the same answer."""
    _upload_row(request, upload_id)
    UploadStore(parameters.service_of(request).store).cancel(upload_id)
    row = _upload_row(request, upload_id)
    if row["status"] != CANCELLED:
        raise _not_pending(row)
    return JSONResponse(upload_object(row))


def _upload_row(request: Request, upload_id: str) -> Row:
    uploads = UploadStore(parameters.service_of(request).store)
    row = uploads.get(upload_id, caller_of(request).sees)
    if row is None:
        raise ApiError(404, f"No such Upload object: {upload_id}", param="id")
    return row


def _check_pending(row: Row) -> None:
    if row["status"] != PENDING:
        raise _not_pending(row)


def _not_pending(row: Row) -> ApiError:
    message = (
        f"Upload {row['id']} is {row['status']}; only a pending one takes parts and can "
        "be completed or cancelled."
    )
    return ApiError(409, message, retry=False)


API = "openai"
MAX_BATCH_PAGE = 100
MAX_LINES = 1 << 62
MAX_COST_DAYS = 366


@batch_router.post(
    "/v1/batches",
    response_model=docs.BatchObject,
    openapi_extra=docs.takes_json(docs.NewBatch),
)
async def create_batch(request: Request) -> Response:
    """Start a batch over an uploaded file."""
    body, content = await parameters.json_object(request)
    new = parameters.checked(docs.NewBatch, body)
    service, caller = parameters.service_of(request), caller_of(request)
    file = service.store.get_file(new.input_file_id, caller.name)
    # As at OpenAI, a file that does not exist fails the batch, not this call.
    if file is not None and file["purpose"] != "batch":
        message = (
            f"File {file['id']} has purpose '{file['purpose']}'; "
            "a batch needs a file uploaded with purpose 'batch'."
        )
        raise ApiError(400, message, param="input_file_id")

    def make(keep: Keep) -> dict[str, Any]:
        # A client that got no answer and calls again means the batch of its first call.
        same_since = now() - REPEATED_WITHIN_S if is_repeated(request) else None
        row = service.create_batch(
            new.input_file_id,
            new.endpoint,
            new.completion_window,
            new.metadata,
            same_since=same_since,
            on_made=lambda row: keep(_shown_batch(request, row)),
            owner=caller.name,
            allowance=caller.allowance,
            priority=new.priority or 0,
            enough=new.enough,
            dedupe=new.dedupe,
            output_expires_after=docs.seconds_of(new.output_expires_after),
        )
        return _shown_batch(request, row)

    return await answer_once(request, content, make, body.get(parameters.BODY_KEY))


@batch_router.get("/v1/batches", response_model=docs.BatchPage)
def list_batches(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, *parameters.page_limit(MAX_BATCH_PAGE)] = 20,
) -> JSONResponse:
    """List batches, newest first, one page at a time."""
    store, owner = parameters.service_of(request).store, caller_of(request).sees
    place = store.place(after, API, owner) if after else None
    if after and place is None:
        raise _no_such_batch(after, "after")
    rows = store.list_batches(after=place, limit=limit + 1, owner=owner, api=API)
    return JSONResponse(
        list_object([_shown_batch(request, row) for row in rows], limit)
    )


@batch_router.get("/v1/batches/{batch_id}", response_model=docs.BatchObject)
def retrieve_batch(request: Request, batch_id: str) -> JSONResponse:
    """Get a batch: its status, counts and files."""
    return JSONResponse(_shown_batch(request, _batch_row(request, batch_id)))


@batch_router.get(
    "/v1/batches/{batch_id}/results",
    response_class=Response,
    responses=docs.answers(JSONL, description="A JSON line for each request."),
)
def results_of_batch(
    request: Request,
    batch_id: str,
    after_line: Annotated[
        int, *parameters.whole_number("after_line", 0, MAX_LINES, "Expected 0 or more.")
    ] = 0,
) -> Response:
    """Read all finished lines, answers and errors, as JSON lines.

    ``after_line`` skips that number of lines. Headers: ``X-Incomplete`` tells whether
    there will be more lines, ``X-Last-Line`` is the number of lines so far, and
    ``X-Line-Order`` is their order: ``completion`` while the batch runs, ``input`` once
    it has ended. The order changes at the end, so clients that counted lines while the
    batch ran must start again at 0.
    """
    row = _batch_row(request, batch_id)
    return batch_results(parameters.service_of(request).store, row, after_line)


@batch_router.post("/v1/batches/{batch_id}/cancel", response_model=docs.BatchObject)
def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
    """Cancel a batch. Lines that are already answered are kept."""
    _batch_row(request, batch_id)
    row = parameters.service_of(request).cancel_batch(batch_id)
    if row is None:
        raise _no_such_batch(batch_id)
    if row["status"] not in (api.CANCELLING, api.CANCELLED):
        message = f"Cannot cancel a batch with status '{row['status']}'."
        raise ApiError(409, message, retry=False)
    return JSONResponse(_shown_batch(request, row))


def _shown_batch(request: Request, row: Row) -> dict[str, Any]:
    """A batch as its owner sees it. An admin also sees whose it is."""
    price = parameters.service_of(request).config.dollars_per_hour
    return batch_object(row, price) | owner_field(request, row)


@batch_router.get("/offline_batch/costs", response_model=docs.CostList)
def list_costs(
    request: Request,
    label: str,
    days: Annotated[int, *parameters.whole_number("days", 1, MAX_COST_DAYS)] = 30,
) -> JSONResponse:
    """List the costs of the batches of the last days, by a key of their metadata.

    ``label`` is the key, such as ``project``. Batches without it are those of null. A client sees
    the costs of its own batches, an admin those of all.
    """
    service = parameters.service_of(request)
    since = now() - days * 86_400
    rows = costs_by_label(service.store, label, since, caller_of(request).sees)
    price = service.config.dollars_per_hour
    data = [cost_object(row, price) for row in rows]
    return JSONResponse({"object": "list", "label": label, "data": data})


@batch_router.delete("/v1/batches/{batch_id}", response_model=docs.BatchDeleted)
def delete_batch(request: Request, batch_id: str) -> JSONResponse:
    """Delete a batch that has ended, with its result files. Its input file is kept.

    A repeated call has the same answer.
    """
    store, owner = parameters.service_of(request).store, caller_of(request).sees
    was_deleted = store.was_deleted(batch_id, API, owner)
    row = None if was_deleted else _batch_row(request, batch_id)
    if (
        row is not None
        and not store.delete_batch(batch_id, api.ENDED_STATUSES, result_files(row))
        and not store.was_deleted(batch_id, API, owner)  # by another call
    ):
        message = (
            f"Cannot delete a batch with status '{row['status']}'. Cancel it, and "
            "delete it when it has ended."
        )
        raise ApiError(409, message, retry=False)
    return JSONResponse({"id": batch_id, "object": "batch", "deleted": True})


def _batch_row(request: Request, batch_id: str) -> dict[str, Any]:
    """The caller's batch with this id, unless it belongs to another API."""
    row = parameters.service_of(request).store.get_batch(
        batch_id, caller_of(request).sees
    )
    if row is None or row["api"] != API:
        raise _no_such_batch(batch_id)
    return row


def _no_such_batch(batch_id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No batch found with id '{batch_id}'.", param=param)
