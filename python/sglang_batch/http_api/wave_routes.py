"""Waves of frontend programs: lists of native requests, each run as one job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from ..access.model_names import native_refusal
from ..batch_api.protocol import INTERACTIVE_PRIORITY
from ..engine import GENERATE_URL, WAVE_PATH
from ..errors import ApiError
from ..request import BatchRequestInput
from ..server.service import new_id
from .authorization.callers import caller_of
from .error_responses import OpenAIRoute
from .openapi import OPENAI_ERRORS, NewWave, answers, takes_json
from .parameters import check_priority, service_of
from .received_bodies import json_object, large_body
from .result_responses import JSONL

MAX_WAVE_BYTES = 128 << 20

router = APIRouter(route_class=OpenAIRoute, responses=OPENAI_ERRORS, tags=["Waves"])


@router.post(
    WAVE_PATH,
    response_class=StreamingResponse,
    responses=answers(JSONL, description="A JSON line for each request."),
    openapi_extra=takes_json(NewWave, repeatable=False),
)
async def run_wave(request: Request) -> StreamingResponse:
    """Run a list of native ``/generate`` bodies as one job.

    The body is ``{"requests": [{...}, ...]}``, with a ``priority`` if the wave should
    not go before all batches. Each request that finishes is answered
    with a JSON line, ``{"index": i, "status_code": 200, "body": {...}}``.
    """
    with large_body(request):
        body, _ = await json_object(request, MAX_WAVE_BYTES)
    bodies = body.get("requests")
    if not isinstance(bodies, list) or not all(isinstance(b, dict) for b in bodies):
        raise ApiError(400, "'requests' must be a list of objects.", param="requests")
    priority = body.get("priority")
    priority = INTERACTIVE_PRIORITY if priority is None else check_priority(priority)
    requests = [
        BatchRequestInput(i, str(i), GENERATE_URL, msgspec.json.encode(body))
        for i, body in enumerate(bodies)
    ]
    _check_adapters(request, bodies)
    answers = service_of(request).run_requests(new_id("wave_"), requests, priority)

    async def lines() -> AsyncIterator[bytes]:
        async for request, output in answers:
            line = {
                "index": request.index,
                "status_code": output.status_code,
                "body": msgspec.Raw(output.body),
            }
            yield msgspec.json.encode(line) + b"\n"

    return StreamingResponse(lines(), media_type=JSONL)


def _check_adapters(request: Request, bodies: list[dict[str, Any]]) -> None:
    """Check that the caller may use the served model and the adapters of a wave.

    Raises:
        ApiError: 403.
    """
    allowed = caller_of(request).allowance.models
    if allowed is None:
        return
    served = service_of(request).model_names or ()
    for body in bodies:
        why = native_refusal(allowed, served, body)
        if why is not None:
            raise ApiError(403, why[0], param=why[1], code="model_not_allowed")
