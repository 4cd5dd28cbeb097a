"""Waves of frontend programs: a list of native requests as one job."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from ..engine import GENERATE_URL, WAVE_PATH
from ..errors import ApiError
from ..request import BatchRequestInput
from ..service import new_id
from .errors import OpenAIRoute
from .openapi import OPENAI_ERRORS, NewWave, answers, takes_json
from .parameters import json_object, service_of
from .results import JSONL

router = APIRouter(route_class=OpenAIRoute, responses=OPENAI_ERRORS, tags=["Waves"])


@router.post(
    WAVE_PATH,
    response_class=StreamingResponse,
    responses=answers(JSONL, description="A JSON line for each request."),
    openapi_extra=takes_json(NewWave, repeatable=False),
)
async def run_wave(request: Request) -> StreamingResponse:
    """Run a list of native ``/generate`` bodies as one job.

    Body: ``{"requests": [{...}, ...]}``. Answer: one JSON line per request as it
    finishes, ``{"index": i, "status_code": 200, "body": {...}}``.
    """
    body = await json_object(request)
    bodies = body.get("requests")
    if not isinstance(bodies, list) or not all(isinstance(b, dict) for b in bodies):
        raise ApiError(400, "'requests' must be a list of objects.", param="requests")
    requests = [
        BatchRequestInput(i, str(i), GENERATE_URL, msgspec.json.encode(body))
        for i, body in enumerate(bodies)
    ]
    answers = service_of(request).run_requests(new_id("wave_"), requests)

    async def lines() -> AsyncIterator[bytes]:
        async for asked, output in answers:
            line = {
                "index": asked.index,
                "status_code": output.status_code,
                "body": msgspec.Raw(output.body),
            }
            yield msgspec.json.encode(line) + b"\n"

    return StreamingResponse(lines(), media_type=JSONL)
