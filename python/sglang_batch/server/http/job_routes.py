"""Requests that run without a file: waves and rollouts, each as one job, and calls of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ...batch_api.lines import LineError, LineRules, check_line
from ...batch_api.protocol import INTERACTIVE_PRIORITY, canonical_url, error_body
from ...errors import ApiError, InputError
from ...fleet.messages import READ_CALL
from ...fleet.worker_host import WorkerHost
from ...job.engine import GENERATE_URL, MAX_INFLIGHT, WAVE_PATH, WORKER_PATH
from ...request import BatchRequestInput, json_line
from ...rollout.rollout_call import ID_HEADER, ROLLOUTS_PATH, RolloutCall, parse_call
from ..service import new_id
from .authorization import caller_of
from .calls import OurRoute
from .openapi import OPENAI_ERRORS, NewWave, answers, takes_json
from .parameters import checked, json_object, large_body, service_of, whole_body
from .result_responses import JSONL

MAX_WAVE_BYTES = 128 << 20
MAX_ROLLOUT_BYTES = 256 << 20

router = APIRouter(route_class=OurRoute, responses=OPENAI_ERRORS)


@router.post(
    WAVE_PATH,
    tags=["Waves"],
    response_class=StreamingResponse,
    responses=answers(JSONL, description="A JSON line for each request."),
    openapi_extra=takes_json(NewWave, repeatable=False),
)
async def run_wave(request: Request) -> StreamingResponse:
    """Run a list of requests as one job.

    The body is ``{"requests": [{...}, ...]}`` with native ``/generate`` bodies, or
    ``{"lines": [{...}, ...]}`` with the lines of a batch file, for any of its endpoints. It has
    a ``priority`` if the wave should not go before all batches. Each request that finishes is
    answered with a JSON line, ``{"index": i, "status_code": 200, "body": {...}}``. A line that
    is no valid request is answered so, too.
    """
    async with large_body(request):
        body, _ = await json_object(request, MAX_WAVE_BYTES)
    if {"requests", "lines"} <= body.keys():
        message = "A wave has either 'requests' or 'lines', not both."
        raise ApiError(400, message, param="lines")
    kind = "lines" if "lines" in body else "requests"
    given = checked(NewWave, {**body, kind: body.get(kind)})
    priority = INTERACTIVE_PRIORITY if given.priority is None else given.priority
    refused: list[tuple[int, int, bytes]] = []
    if kind == "lines":
        requests, refused = await asyncio.to_thread(
            _checked_lines, request, given.lines
        )
    else:
        requests = [
            BatchRequestInput(i, str(i), GENERATE_URL, msgspec.json.encode(body))
            for i, body in enumerate(given.requests)
        ]
        _check_adapters(request, given.requests)
    places = [line.index for line in requests]
    requests = [replace(line, index=i) for i, line in enumerate(requests)]
    service = service_of(request)
    answers = service.run_requests(new_id("wave_"), requests, priority)

    async def lines() -> AsyncIterator[bytes]:
        for answer in refused:
            yield _answer(*answer)
        async for line, output in answers:
            yield _answer(places[line.index], output.status_code, output.body)

    headers = {MAX_INFLIGHT: str(service.max_inflight)}
    return StreamingResponse(lines(), media_type=JSONL, headers=headers)


@router.post(
    ROLLOUTS_PATH,
    tags=["Rollouts"],
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
    _check_adapters(request, [{"lora_path": x.lora_path} for x in call.groups])
    service = service_of(request)
    run = service.rollout_run(call, caller_of(request).name)
    priority = INTERACTIVE_PRIORITY if call.priority is None else call.priority

    async def lines() -> AsyncIterator[bytes]:
        async with aclosing(service.run_rollouts(run, priority)) as groups:
            async for group in groups:
                yield json_line(group)

    return StreamingResponse(lines(), media_type=JSONL, headers={ID_HEADER: run.id})


@router.post(f"{ROLLOUTS_PATH}/{{rollout_id}}/stop", tags=["Rollouts"])
async def stop_rollout(request: Request, rollout_id: str) -> JSONResponse:
    """Abort the samples of a call that run. It answers their groups with their tokens."""
    run = service_of(request).rollouts.get(rollout_id)
    owner = caller_of(request).sees
    if run is None or owner not in (None, run.owner):
        raise ApiError(
            404, f"No rollout runs with id {rollout_id!r:.100}.", param="rollout_id"
        )
    run.stop()
    return JSONResponse(
        {"id": run.id, "object": "offline_batch.rollout", "stopped": True}
    )


def _answer(index: int, status_code: int, body: bytes) -> bytes:
    line = {"index": index, "status_code": status_code, "body": msgspec.Raw(body)}
    return json_line(line)


def _checked_lines(
    request: Request, lines: list[dict[str, Any]]
) -> tuple[list[BatchRequestInput], list[tuple[int, int, bytes]]]:
    """The lines that can run, and index, status and body of the answer to each other one."""
    served = service_of(request).model_names
    allowed = caller_of(request).allowance.model_rules(served)
    rules = LineRules(models=served, require_model=False)
    requests, refused = [], []
    for i, line in enumerate(lines):
        errors: list[LineError] = []
        found = check_line(i + 1, msgspec.json.encode(line), rules, errors)
        if errors:
            first = errors[0]
            error = error_body(first.message, param=first.param, code=first.code)
            refused.append((i, 400, msgspec.json.encode(error)))
            continue
        url, body = canonical_url(found["url"]), found["body"]
        if allowed is not None:
            why = allowed.body_refusal(url, body)
            if why is not None:
                error = error_body(
                    why[0], status_code=403, param=why[1], code="model_not_allowed"
                )
                refused.append((i, 403, msgspec.json.encode(error)))
                continue
        requests.append(BatchRequestInput(i, found["custom_id"], url, body))
    return requests, refused


def _check_adapters(request: Request, bodies: list[dict[str, Any]]) -> None:
    """Check that the caller may use the model and these adapters, or raise 403."""
    rules = caller_of(request).allowance.model_rules(service_of(request).model_names)
    if rules is None:
        return
    for body in bodies:
        if why := rules.native_refusal(body):
            raise ApiError(403, why[0], param=why[1], code="model_not_allowed")


# The head of a fleet uses this server as one of its workers. The bodies are msgpack, see
# :mod:`sglang_batch.fleet.messages`. They are no part of the documented API: head and workers
# have the same version of this package.

MSGPACK = "application/msgpack"
# A call has up to a thousand lines.
MAX_CALL_BYTES = 512 << 20

worker_router = APIRouter(
    route_class=OurRoute, prefix=WORKER_PATH, include_in_schema=False
)


def _answers(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        host, data = _host(request), await whole_body(request, MAX_CALL_BYTES)
        try:
            return Response(await host.call(name, data), media_type=MSGPACK)
        except InputError as error:
            raise ApiError(
                400,
                f"The body is no message of a head of this version: {error}. Install the "
                "same version of sglang-batch everywhere.",
            ) from None

    return answer


for _name in READ_CALL:
    worker_router.add_api_route(f"/{_name}", _answers(_name), methods=["POST"])


def _host(request: Request) -> WorkerHost:
    host = service_of(request).worker
    if host is None:
        raise ApiError(503, "The engine is not ready yet.", code="not_ready")
    return host
