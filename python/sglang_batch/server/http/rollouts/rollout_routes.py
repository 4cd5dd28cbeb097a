"""Rollouts: groups of samples of one prompt each, run as one job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from ....batch_api.protocol import INTERACTIVE_PRIORITY
from ....errors import ApiError, InputError
from ....json_lines import json_line
from ....rollout.rollout_call import ID_HEADER, ROLLOUTS_PATH, RolloutCall, parse_call
from ...access.model_names import native_refusal
from ..authorization.callers import caller_of, owner_of, owner_seen
from ..error_responses import OpenAIRoute
from ..openapi import OPENAI_ERRORS, answers, takes_json
from ..parameters import service_of
from ..received_bodies import json_object, large_body
from ..result_responses import JSONL

MAX_ROLLOUT_BYTES = 256 << 20

router = APIRouter(route_class=OpenAIRoute, responses=OPENAI_ERRORS, tags=["Rollouts"])


@router.post(
    ROLLOUTS_PATH,
    response_class=StreamingResponse,
    responses=answers(JSONL, description="A JSON line for each group."),
    openapi_extra=takes_json(RolloutCall, repeatable=False),
)
async def run_rollouts(request: Request) -> StreamingResponse:
    """Sample groups as one job.

    Each group whose last sample has ended is answered with a JSON line. The header
    ``X-Rollout-Id`` has the id with which the call is stopped.
    """
    async with large_body(request):
        body, _ = await json_object(request, MAX_ROLLOUT_BYTES)
    try:
        call = parse_call(body)
    except InputError as error:
        raise ApiError(400, str(error)) from None
    _check_adapters(request, call)
    service = service_of(request)
    run = service.rollout_run(call, owner_of(request))
    priority = INTERACTIVE_PRIORITY if call.priority is None else call.priority

    async def lines() -> AsyncIterator[bytes]:
        async with aclosing(service.run_rollouts(run, priority)) as groups:
            async for group in groups:
                yield json_line(group)

    return StreamingResponse(lines(), media_type=JSONL, headers={ID_HEADER: run.id})


@router.post(f"{ROLLOUTS_PATH}/{{rollout_id}}/stop")
async def stop_rollout(request: Request, rollout_id: str) -> JSONResponse:
    """Abort the samples of a call that run. It answers their groups with their tokens."""
    run = service_of(request).rollouts.get(rollout_id)
    owner = owner_seen(request)
    if run is None or owner not in (None, run.owner):
        raise ApiError(
            404, f"No rollout runs with id {rollout_id!r:.100}.", param="rollout_id"
        )
    run.stop()
    return JSONResponse(
        {"id": run.id, "object": "offline_batch.rollout", "stopped": True}
    )


def _check_adapters(request: Request, call: RolloutCall) -> None:
    """Check that the caller may use the served model and the adapters of a call.

    Raises:
        ApiError: 403.
    """
    allowed = caller_of(request).allowance.models
    if allowed is None:
        return
    served = service_of(request).model_names or ()
    for group in call.groups:
        fields: dict[str, Any] = {"lora_path": group.lora_path}
        why = native_refusal(allowed, served, fields)
        if why is not None:
            raise ApiError(403, why[0], param=why[1], code="model_not_allowed")
