"""The routes of a prefill server on which decode servers send it requests and plans."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from sglang.srt.entrypoints import http_server

from ...errors import ApiError, InputError
from ...fleet.plan_bytes import plan_of
from ...server.http.job_routes import MAX_CALL_BYTES
from ...server.http.parameters import pieces_of
from ..calls.call_items import engine_of
from ..engine.request_ids import set_rid
from ..engine.responses import abort_reason
from ..engine.sglang_engine import SGLangEngine
from . import prefill_calls as calls
from .prefill_calls import JobCall, PrefillCall

T = TypeVar("T")

router = APIRouter(include_in_schema=False)


def add_routes(app: FastAPI) -> None:
    app.include_router(router)
    app.state.decode_servers = DecodeServers()


class DecodeServers:
    """The jobs of each decode server, which are closed when it is silent for long."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._jobs: dict[str, set[str]] = {}

    async def handle(self, engine: SGLangEngine, call: JobCall) -> None:
        """Carry out a call.

        Raises:
            InputError: its plan cannot be read.
        """
        self._heard[call.sender] = time.monotonic()
        jobs = self._jobs.setdefault(call.sender, set())
        if call.action == calls.OPEN:
            plan = await asyncio.to_thread(plan_of, call.plan)
            await engine.open_job(call.job_id, [plan])
            jobs.add(call.job_id)
        elif call.action == calls.PRIORITY and call.job_id in jobs:
            await engine.set_priority(call.job_id, call.priority)
        elif call.action == calls.CLOSE and call.job_id in jobs:
            jobs.discard(call.job_id)
            await engine.close_job(call.job_id)
        for sender, heard in list(self._heard.items()):
            if time.monotonic() - heard > calls.SILENCE_S:
                del self._heard[sender]
                for job_id in self._jobs.pop(sender, ()):
                    await engine.close_job(job_id)


def _manager() -> Any:
    return http_server.get_global_state().tokenizer_manager


@router.post(calls.JOBS_PATH)
async def change_job(request: Request) -> Response:
    """Open, change or close a job of a decode server."""
    call = await _read(request, JobCall)
    servers: DecodeServers = request.app.state.decode_servers
    try:
        await servers.handle(await engine_of(_manager()), call)
    except InputError as error:
        raise HTTPException(400, str(error)) from None
    return Response()


@router.post(calls.CALL_PATH)
async def compute_prompt(request: Request) -> Response:
    """Compute a prompt, and answer once its KV has been sent."""
    call = await _read(request, PrefillCall)
    try:
        obj = call.request()
        set_rid(obj, call.rid)
        # Ends with the connection: the decode server gave the request up.
        answers = [each async for each in _manager().generate_request(obj, request)]
    except (TypeError, ValueError) as error:
        return Response(str(error), 400)
    except HTTPException as error:
        return Response(str(error.detail), error.status_code)
    reason = abort_reason(answers)
    return Response() if reason is None else Response(reason, 503)


async def _read(request: Request, kind: type[T]) -> T:
    try:
        pieces = pieces_of(request, MAX_CALL_BYTES, "This is too large for a call.")
        data = b"".join([piece async for piece in pieces])
        return msgspec.msgpack.decode(data, type=kind)
    except ApiError as error:
        raise HTTPException(error.status_code, error.message) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HTTPException(400, f"not a call of a decode server: {error}") from None
