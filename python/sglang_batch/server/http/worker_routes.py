"""Routes by which the head of a fleet uses this server as one of its workers.

Their bodies are msgpack, see :mod:`sglang_batch.fleet.messages`. They are no part of the
documented API: head and workers have the same version of this package.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from ...errors import ApiError, InputError
from ...fleet.messages import READ_CALL
from ...fleet.worker_host import WorkerHost
from ...job.engine import WORKER_PATH
from .error_responses import OurRoute
from .parameters import service_of, whole_body

MSGPACK = "application/msgpack"
# A call has up to a thousand lines.
MAX_CALL_BYTES = 512 << 20

router = APIRouter(route_class=OurRoute, prefix=WORKER_PATH, include_in_schema=False)


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
    router.add_api_route(f"/{_name}", _answers(_name), methods=["POST"])


def _host(request: Request) -> WorkerHost:
    host = service_of(request).worker
    if host is None:
        raise ApiError(503, "The engine is not ready yet.", code="not_ready")
    return host
