"""``/v1/batches``: start, show, list and cancel batches, and read their results."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ...batch_api import protocol as api
from ...batch_api.objects import batch_object, list_object, result_files
from ...errors import ApiError
from ...store.batch_store import Row, now
from ..access.usage import cost_object, costs_by_label
from . import openapi as docs
from . import parameters
from .authorization import caller_of, owner_field
from .error_responses import OurRoute
from .idempotency import REPEATED_WITHIN_S, Keep, answer_once, is_repeated
from .result_responses import JSONL, batch_results

API = "openai"
MAX_BATCH_PAGE = 100
MAX_LINES = 1 << 62
MAX_COST_DAYS = 366

router = APIRouter(route_class=OurRoute, responses=docs.OPENAI_ERRORS, tags=["Batches"])


@router.post(
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
            on_made=lambda row: keep(_shown(request, row)),
            owner=caller.name,
            allowance=caller.allowance,
            priority=new.priority or 0,
            enough=new.enough,
            dedupe=new.dedupe,
            output_expires_after=docs.seconds_of(new.output_expires_after),
        )
        return _shown(request, row)

    return await answer_once(request, content, make, body.get(parameters.BODY_KEY))


@router.get("/v1/batches", response_model=docs.BatchPage)
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
    return JSONResponse(list_object([_shown(request, row) for row in rows], limit))


@router.get("/v1/batches/{batch_id}", response_model=docs.BatchObject)
def retrieve_batch(request: Request, batch_id: str) -> JSONResponse:
    """Get a batch: its status, counts and files."""
    return JSONResponse(_shown(request, _batch_row(request, batch_id)))


@router.get(
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


@router.post("/v1/batches/{batch_id}/cancel", response_model=docs.BatchObject)
def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
    """Cancel a batch. Lines that are already answered are kept."""
    _batch_row(request, batch_id)
    row = parameters.service_of(request).cancel_batch(batch_id)
    if row is None:
        raise _no_such_batch(batch_id)
    if row["status"] not in (api.CANCELLING, api.CANCELLED):
        message = f"Cannot cancel a batch with status '{row['status']}'."
        raise ApiError(409, message, retry=False)
    return JSONResponse(_shown(request, row))


def _shown(request: Request, row: Row) -> dict[str, Any]:
    """A batch as its owner sees it. An admin also sees whose it is."""
    price = parameters.service_of(request).config.dollars_per_hour
    return batch_object(row, price) | owner_field(request, row)


@router.get("/offline_batch/costs", response_model=docs.CostList)
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


@router.delete("/v1/batches/{batch_id}", response_model=docs.BatchDeleted)
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
