"""``/v1/batches``: start, look at, list and cancel batches."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from ..batch_api import protocol as api
from ..batch_api.objects import batch_object
from ..errors import ApiError
from .errors import OpenAIRoute
from .parameters import (
    check_choice,
    check_limit,
    check_metadata,
    json_object,
    page,
    service_of,
)

MAX_BATCH_PAGE = 100

router = APIRouter(route_class=OpenAIRoute)


@router.post("/v1/batches")
async def create_batch(request: Request) -> JSONResponse:
    """Start a batch over an uploaded file."""
    body = await json_object(request)
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
    check_choice(body, "endpoint", tuple(api.ENDPOINTS))
    if api.window_seconds(body["completion_window"]) is None:
        raise ApiError(
            400,
            f"Invalid value for 'completion_window': '{body['completion_window']}'. "
            "Use '24h' or another duration such as '30m', '6h' or '7d'.",
            param="completion_window",
            code="invalid_value",
        )
    metadata = body.get("metadata")
    check_metadata(metadata)
    service = service_of(request)
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
    limit = check_limit(limit, MAX_BATCH_PAGE)
    store = service_of(request).store
    if after is not None and store.get_batch(after) is None:
        raise _no_such_batch(after, "after")
    rows = store.list_batches(after=after, limit=limit + 1)
    return page([batch_object(row) for row in rows], limit)


@router.get("/v1/batches/{batch_id}")
def retrieve_batch(request: Request, batch_id: str) -> JSONResponse:
    """A batch as it stands."""
    row = service_of(request).store.get_batch(batch_id)
    if row is None:
        raise _no_such_batch(batch_id)
    return JSONResponse(batch_object(row))


@router.post("/v1/batches/{batch_id}/cancel")
def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
    """Cancel a batch; what is finished is kept."""
    row = service_of(request).cancel_batch(batch_id)
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
