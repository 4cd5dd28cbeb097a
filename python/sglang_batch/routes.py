"""HTTP: ``/v1/files``, ``/v1/batches`` and waves of frontend programs.

Thin: parameters in, :class:`~sglang_batch.service.BatchService`, objects out. Every
error these routes answer has OpenAI's nested body, whatever the host application
does with its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from .batch_api import protocol as api
from .batch_api.objects import batch_object, file_object
from .engine import GENERATE_URL, WAVE_PATH
from .errors import ApiError
from .request import BatchRequestInput
from .service import BatchService, new_id
from .store.batch_store import now

logger = logging.getLogger(__name__)

MAX_BATCH_PAGE = 100
MAX_FILE_PAGE = 10_000


class OpenAIRoute(APIRoute):
    """A route whose errors are OpenAI's nested ones."""

    def get_route_handler(
        self,
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_nested_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                return _error_response(error)
            except RequestValidationError as error:
                first = error.errors()[0]
                param = str(first["loc"][-1])
                message = f"Invalid value for '{param}': {first['msg']}."
                return _error_response(ApiError(400, message, param=param))
            except HTTPException as error:  # such as a form that cannot be parsed
                return _error_response(ApiError(error.status_code, str(error.detail)))
            except Exception:
                logger.exception("%s %s failed", request.method, request.url.path)
                return _error_response(ApiError(500, "Internal server error."))

        return handle_with_nested_errors


router = APIRouter(route_class=OpenAIRoute)


def _error_response(error: ApiError) -> JSONResponse:
    content = api.error_body(
        error.message,
        status_code=error.status_code,
        param=error.param,
        code=error.code,
    )
    headers = {}
    if error.retry is not None:
        headers["x-should-retry"] = str(error.retry).lower()
    return JSONResponse(content, error.status_code, headers=headers)


def _service(request: Request) -> BatchService:
    service: BatchService = request.app.state.offline_batch_service
    return service


# Files ------------------------------------------------------------------------


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
            _service(request).create_file, file.file, filename, purpose, expires_at
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
    limit = _check_limit(limit, MAX_FILE_PAGE)
    if order not in ("asc", "desc"):
        raise ApiError(
            400,
            f"Invalid value for 'order': {order!r}. Use asc or desc.",
            param="order",
        )
    store = _service(request).store
    if after is not None and store.get_file(after) is None:
        raise _no_such_file(after, "after")
    rows = store.list_files(
        after=after, limit=limit + 1, descending=order == "desc", purpose=purpose
    )
    return _page([file_object(row) for row in rows], limit)


@router.get("/v1/files/{file_id}")
def retrieve_file(request: Request, file_id: str) -> JSONResponse:
    """What the server knows of a file."""
    return JSONResponse(file_object(_file_row(request, file_id)))


@router.get("/v1/files/{file_id}/content")
def file_content(request: Request, file_id: str) -> FileResponse:
    """A file's bytes."""
    row = _file_row(request, file_id)
    path = _service(request).store.file_path(file_id)
    return FileResponse(path, media_type="application/jsonl", filename=row["filename"])


@router.delete("/v1/files/{file_id}")
def delete_file(request: Request, file_id: str) -> JSONResponse:
    """Delete a file. A batch that already runs has its own copy of its input."""
    if not _service(request).store.delete_file(file_id):
        raise _no_such_file(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _file_row(request: Request, file_id: str) -> dict[str, Any]:
    row = _service(request).store.get_file(file_id)
    if row is None:
        raise _no_such_file(file_id)
    return row


def _no_such_file(file_id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No such File object: {file_id}", param=param)


# Batches ----------------------------------------------------------------------


@router.post("/v1/batches")
async def create_batch(request: Request) -> JSONResponse:
    """Start a batch over an uploaded file."""
    body = await _json_object(request)
    for key in ("input_file_id", "endpoint", "completion_window"):
        if not isinstance(body.get(key), str):
            raise ApiError(
                400,
                f"Missing required parameter: '{key}'."
                if body.get(key) is None
                else f"Invalid type for '{key}': expected a string.",
                param=key,
                code="missing_required_parameter"
                if body.get(key) is None
                else "invalid_type",
            )
    _check_choice(body, "endpoint", tuple(api.ENDPOINTS))
    _check_choice(body, "completion_window", tuple(api.COMPLETION_WINDOW_S))
    metadata = body.get("metadata")
    _check_metadata(metadata)
    service = _service(request)
    file = service.store.get_file(body["input_file_id"])
    # A file that does not exist is reported by the batch itself, as at OpenAI.
    if file is not None and file["purpose"] != "batch":
        raise ApiError(
            400,
            f"File {file['id']} has purpose '{file['purpose']}'; "
            "a batch needs a file uploaded with purpose 'batch'.",
            param="input_file_id",
        )
    row = await asyncio.to_thread(
        service.create_batch,
        body["input_file_id"],
        body["endpoint"],
        body["completion_window"],
        metadata,
    )
    return JSONResponse(batch_object(row))


@router.get("/v1/batches")
def list_batches(
    request: Request, after: str | None = None, limit: int = 20
) -> JSONResponse:
    """Batches, newest first, a page at a time."""
    limit = _check_limit(limit, MAX_BATCH_PAGE)
    store = _service(request).store
    if after is not None and store.get_batch(after) is None:
        raise _no_such_batch(after, "after")
    rows = store.list_batches(after=after, limit=limit + 1)
    return _page([batch_object(row) for row in rows], limit)


@router.get("/v1/batches/{batch_id}")
def retrieve_batch(request: Request, batch_id: str) -> JSONResponse:
    """A batch as it stands."""
    row = _service(request).store.get_batch(batch_id)
    if row is None:
        raise _no_such_batch(batch_id)
    return JSONResponse(batch_object(row))


@router.post("/v1/batches/{batch_id}/cancel")
def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
    """Cancel a batch; what is finished is kept."""
    row = _service(request).cancel_batch(batch_id)
    if row is None:
        raise _no_such_batch(batch_id)
    if row["status"] not in (api.CANCELLING, api.CANCELLED):
        raise ApiError(
            409,
            f"Cannot cancel a batch with status '{row['status']}'.",
            retry=False,
        )
    return JSONResponse(batch_object(row))


def _no_such_batch(batch_id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No batch found with id '{batch_id}'.", param=param)


# Waves of frontend programs -----------------------------------------------------


@router.post(WAVE_PATH)
async def run_wave(request: Request) -> StreamingResponse:
    """Run a list of native ``/generate`` bodies as one job.

    Body: ``{"requests": [{...}, ...]}``. Answer: one JSON line per request as it
    finishes, ``{"index": i, "status_code": 200, "body": {...}}``.
    """
    body = await _json_object(request)
    bodies = body.get("requests")
    if not isinstance(bodies, list) or not all(isinstance(b, dict) for b in bodies):
        raise ApiError(400, "'requests' must be a list of objects.", param="requests")
    requests = [
        BatchRequestInput(i, str(i), GENERATE_URL, msgspec.json.encode(body))
        for i, body in enumerate(bodies)
    ]
    answers = _service(request).run_requests(new_id("wave_"), requests)

    async def lines() -> AsyncIterator[bytes]:
        async for asked, output in answers:
            line = {
                "index": asked.index,
                "status_code": output.status_code,
                "body": msgspec.Raw(output.body),
            }
            yield msgspec.json.encode(line) + b"\n"

    return StreamingResponse(lines(), media_type="application/jsonl")


# Parameters -------------------------------------------------------------------


async def _json_object(request: Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return body


def _check_choice(body: dict[str, Any], key: str, choices: tuple[str, ...]) -> None:
    if body[key] not in choices:
        raise ApiError(
            400,
            f"Invalid value: '{body[key]}'. Supported values are: "
            f"{', '.join(repr(choice) for choice in choices)}.",
            param=key,
            code="invalid_value",
        )


def _check_metadata(metadata: Any) -> None:
    def bad(message: str, param: str, code: str) -> ApiError:
        return ApiError(400, message, param=param, code=code)

    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise bad("'metadata' must be an object.", "metadata", "invalid_type")
    if len(metadata) > api.MAX_METADATA_PAIRS:
        raise bad(
            f"'metadata' has {len(metadata)} pairs; at most "
            f"{api.MAX_METADATA_PAIRS} are allowed.",
            "metadata",
            "invalid_value",
        )
    for key, value in metadata.items():
        param = f"metadata.{key}"
        if not isinstance(value, str):
            kinds: dict[type, str] = {list: "an array", dict: "an object"}
            kind = kinds.get(type(value), "another type")
            raise bad(
                f"Invalid type for '{param}': expected a string, but got {kind} "
                "instead.",
                param,
                "invalid_type",
            )
        if (
            len(key) > api.MAX_METADATA_KEY_LEN
            or len(value) > api.MAX_METADATA_VALUE_LEN
        ):
            raise bad(
                f"'{param}' is too long: keys have at most "
                f"{api.MAX_METADATA_KEY_LEN} and values at most "
                f"{api.MAX_METADATA_VALUE_LEN} characters.",
                param,
                "invalid_value",
            )


def _check_limit(limit: int, maximum: int) -> int:
    if not 1 <= limit <= maximum:
        raise ApiError(
            400,
            f"Invalid value for 'limit': {limit}. Expected 1 to {maximum}.",
            param="limit",
        )
    return limit


def _page(objects: list[dict[str, Any]], limit: int) -> JSONResponse:
    shown = objects[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(objects) > limit,
        }
    )
