"""``/v1/batches``: start, look at, list and cancel batches."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ..batch_api import protocol as api
from ..batch_api.objects import batch_object
from ..errors import ApiError
from ..store.batch_store import now
from .caller import owner_of
from .errors import OpenAIRoute
from .files import check_expires_after
from .idempotency import Keep, answer_once
from .openapi import (
    OPENAI_ERRORS,
    BatchObject,
    BatchPage,
    NewBatch,
    answers,
    takes_json,
    whole_number,
)
from .parameters import (
    check_choice,
    check_limit,
    check_metadata,
    check_string,
    invalid,
    json_object,
    page,
    service_of,
)
from .results import JSONL, batch_results

API = "openai"
MAX_BATCH_PAGE = 100
MAX_LINES = 1 << 62
# A repeated call for a batch is about one that was made no longer ago.
REPEATED_WITHIN_S = 600

router = APIRouter(route_class=OpenAIRoute, responses=OPENAI_ERRORS, tags=["Batches"])


@router.post(
    "/v1/batches", response_model=BatchObject, openapi_extra=takes_json(NewBatch)
)
async def create_batch(request: Request) -> Response:
    """Start a batch over an uploaded file."""
    body = await json_object(request)
    fields = _checked_fields(body)
    service, owner = service_of(request), owner_of(request)
    file = service.store.get_file(body["input_file_id"], owner)
    # A file that does not exist is reported by the batch itself, as at OpenAI.
    if file is not None and file["purpose"] != "batch":
        raise ApiError(
            400,
            f"File {file['id']} has purpose '{file['purpose']}'; "
            "a batch needs a file uploaded with purpose 'batch'.",
            param="input_file_id",
        )
    # A client that repeats what it got no answer to means the batch it asked for.
    repeated = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")

    async def make(keep: Keep) -> JSONResponse:
        row = await asyncio.to_thread(
            service.create_batch,
            body["input_file_id"],
            body["endpoint"],
            body["completion_window"],
            body.get("metadata"),
            same_since=now() - REPEATED_WITHIN_S if repeated else None,
            on_made=lambda row: keep(batch_object(row)),
            owner=owner,
            **fields,
        )
        return JSONResponse(batch_object(row))

    return await answer_once(request, await request.body(), make)


def _checked_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Check the body of a new batch; returns columns for what is optional."""
    for key in ("input_file_id", "endpoint", "completion_window"):
        check_string(body, key)
    check_choice(body, "endpoint", tuple(api.ENDPOINTS))
    if api.window_seconds(body["completion_window"]) is None:
        raise ApiError(
            400,
            f"Invalid value for 'completion_window': '{body['completion_window']}'. "
            "Use '24h' or another duration such as '30m', '6h' or '7d'.",
            param="completion_window",
            code="invalid_value",
        )
    check_metadata(body.get("metadata"))
    priority = body.get("priority")
    if priority is None:
        priority = 0
    most = api.MAX_PRIORITY
    if type(priority) is not int or abs(priority) > most:
        wanted = f"Expected a whole number from -{most} to {most}."
        raise invalid("priority", priority, wanted)
    kept_s = check_expires_after(
        body.get("output_expires_after"), "output_expires_after"
    )
    return {"priority": priority, "output_expires_after": kept_s}


@router.get("/v1/batches", response_model=BatchPage)
def list_batches(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, whole_number(1, MAX_BATCH_PAGE)] = 20,
) -> JSONResponse:
    """Batches, newest first, a page at a time."""
    limit = check_limit(limit, MAX_BATCH_PAGE)
    store, owner = service_of(request).store, owner_of(request)
    if after is not None:
        _batch_row(request, after, "after")
    rows = store.list_batches(after=after, limit=limit + 1, owner=owner, api=API)
    return page([batch_object(row) for row in rows], limit)


@router.get("/v1/batches/{batch_id}", response_model=BatchObject)
def retrieve_batch(request: Request, batch_id: str) -> JSONResponse:
    """A batch as it stands."""
    return JSONResponse(batch_object(_batch_row(request, batch_id)))


@router.get(
    "/v1/batches/{batch_id}/results",
    response_class=Response,
    responses=answers(JSONL, description="A JSON line for each request."),
)
def results_of_batch(
    request: Request,
    batch_id: str,
    after_line: Annotated[int, whole_number(0, MAX_LINES)] = 0,
) -> Response:
    """All lines that are finished, answers and errors, as JSON lines.

    ``after_line`` leaves out the first so many. Headers: ``X-Incomplete`` says whether
    there will be more, ``X-Last-Line`` how many lines there are, and ``X-Line-Order``
    how they are ordered: while a batch runs by ``completion``, at its end as its
    ``input``. Who counted lines while it ran begins again at 0 at its end.
    """
    if not 0 <= after_line <= MAX_LINES:
        raise invalid("after_line", after_line, "Expected 0 or more.")
    row = _batch_row(request, batch_id)
    return batch_results(service_of(request).store, row, after_line)


@router.post("/v1/batches/{batch_id}/cancel", response_model=BatchObject)
def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
    """Cancel a batch; what is finished is kept."""
    _batch_row(request, batch_id)
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


def _batch_row(request: Request, batch_id: str, param: str = "id") -> dict[str, Any]:
    """The caller's batch of this id; other APIs' batches have other ids."""
    row = service_of(request).store.get_batch(batch_id, owner_of(request))
    if row is None or row["api"] != API:
        raise _no_such_batch(batch_id, param)
    return row


def _no_such_batch(batch_id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No batch found with id '{batch_id}'.", param=param)
