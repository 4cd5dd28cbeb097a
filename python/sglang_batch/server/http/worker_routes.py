"""Routes by which the head of a fleet uses this server as one of its workers.

Their bodies are msgpack, see :mod:`sglang_batch.fleet.messages`. They are no part of the
documented API: head and workers have the same version of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from ...errors import ApiError, InputError
from ...fleet import messages
from ...fleet.worker_host import WorkerHost
from ...job.engine import WORKER_PATH
from .error_responses import OpenAIRoute
from .parameters import pieces_of, service_of

MSGPACK = "application/msgpack"
# A call has up to a thousand lines.
MAX_CALL_BYTES = 512 << 20

router = APIRouter(route_class=OpenAIRoute, prefix=WORKER_PATH, include_in_schema=False)


@router.post("/attach")
async def attach(request: Request) -> Response:
    """Begin a session, which ends any other."""
    session = await _message(request, messages.decode_session)
    return _answer(await _host(request).attach(session))


@router.post("/exchange")
async def exchange(request: Request) -> Response:
    """Take commands and reply with events."""
    call = await _message(request, messages.decode_exchange)
    return _answer(await _host(request).exchange(call))


@router.post("/render")
async def render(request: Request) -> Response:
    """Render lines."""
    call = await _message(request, messages.decode_render_call)
    return _answer(await _host(request).render(call))


@router.post("/query")
async def query(request: Request) -> Response:
    """Answer a question about the running engine."""
    asked = await _message(request, messages.decode_query)
    return _answer(await _host(request).query(asked))


def _host(request: Request) -> WorkerHost:
    host = service_of(request).worker
    if host is None:
        raise ApiError(503, "The engine is not ready yet.", code="not_ready")
    return host


async def _message(request: Request, decode: Callable[[bytes], Any]) -> Any:
    message = (
        f"The body has more than the {MAX_CALL_BYTES} bytes that this route takes."
    )
    pieces = pieces_of(request, MAX_CALL_BYTES, message)
    data = b"".join([piece async for piece in pieces])
    try:
        return decode(data)
    except InputError as error:
        raise ApiError(
            400,
            f"The body is no message of a head of this version: {error}. Install the same "
            "version of sglang-batch everywhere.",
        ) from None


def _answer(message: object) -> Response:
    return Response(messages.encode(message), media_type=MSGPACK)
