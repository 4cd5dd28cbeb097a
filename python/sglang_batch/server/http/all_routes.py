"""All routes of the HTTP API as one router, and the layers around them.

Routes are thin: they check parameters, call
:class:`~sglang_batch.server.service.BatchService` and return its objects. The layers leave
the other routes of the server alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...batch_api.protocol import error_body
from ...errors import ApiError
from . import job_routes, key_routes, message_batch_routes, openai_routes, page_routes
from .calls import (
    answer_unknown,
    config_of,
    error_at,
    is_anthropic,
    path_of,
    without_header,
)

ROUTERS = (
    openai_routes.file_router,
    openai_routes.upload_router,
    openai_routes.batch_router,
    message_batch_routes.router,
    job_routes.router,
    page_routes.router,
    key_routes.router,
    job_routes.worker_router,
)


def make_router() -> APIRouter:
    router = APIRouter()
    for each in ROUTERS:
        router.include_router(each)
    for route in _routes():
        if "GET" in (route.methods or ()):  # HEAD works there, too
            router.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                include_in_schema=False,
                route_class_override=type(route),
            )
    return router


def install(app: FastAPI) -> None:
    """Add our routes and layers. The service is ``app.state.offline_batch_service``."""
    app.include_router(make_router())
    app.add_exception_handler(HTTPException, answer_unknown)
    stock_answer: Any = app.exception_handlers[RequestValidationError]

    async def answer(request: Request, error: Any) -> Any:
        error.endpoint_file = None  # SGLang would tell this path of the machine
        return await stock_answer(request, error)

    app.add_exception_handler(RequestValidationError, answer)
    # The last one is outermost.
    for layer in (OpenAIErrors, BodyPace, CrossOrigin, AnswerHeaders, KnownMethods):
        app.add_middleware(layer)


def is_ours(path: str) -> bool:
    """Whether a path is that of one of our routes, or below one."""
    return any(path == each or path.startswith(f"{each}/") for each in _PREFIXES)


def _routes() -> Iterator[APIRoute]:
    for each in ROUTERS:
        for route in each.routes:
            if isinstance(route, APIRoute):
                yield route


# /v1/files of /v1/files/{file_id}/content
_PREFIXES = {route.path.partition("/{")[0] for route in _routes()} | {page_routes.PATH}


logger = logging.getLogger(__name__)

# Printed in logs and sent back, so it must be harmless in both.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_HEADERS = {
    # Results are text that clients chose: a browser must not take it for a page.
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class _OurLayer(ABC):
    """A layer around the calls of our routes, or of those that it ``takes``."""

    takes: Callable[[str], object] = staticmethod(is_ours)

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_it = scope["type"] == "http" and self.takes(path_of(scope))
        await (self._answer if has_it else self._app)(scope, receive, send)

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer such a call."""


class AnswerHeaders(_OurLayer):
    """Adds the headers, and logs each call that changes something.

    ``X-Request-Id`` is the client's own if it sent one of up to 128 letters, digits and
    ``._:/+=@-``, else a new one.
    """

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        is_head, has_answer = scope["method"] == "HEAD", False

        async def send_more(message: Message) -> None:
            nonlocal has_answer
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("x-request-id", request_id)
                if is_anthropic(path_of(scope)):
                    headers["request-id"] = request_id
                if "location" in headers:
                    headers["location"] = _without_host(headers["location"])
                _log(scope, message["status"], request_id)
            elif is_head:
                # A body that is streamed ends here, since no client reads it.
                if not has_answer:
                    has_answer = True
                    await send({**message, "body": b"", "more_body": False})
                return
            await send(message)

        await self._app(scope, receive, send_more)


def _without_host(url: str) -> str:
    """A redirect's target as a path, since its host is the one that the call named."""
    parts = urlsplit(url)
    # "//" would begin a host again.
    path = "/" + parts.path.lstrip("/")
    return urlunsplit(("", "", path, parts.query, parts.fragment))


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id")
    return (
        given if given and _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
    )


def _log(scope: Scope, status: int, request_id: str) -> None:
    reads = scope["method"] in ("GET", "HEAD", "OPTIONS")
    logger.log(
        logging.DEBUG if reads and status < 500 else logging.INFO,
        "call=%s path=%r status=%d request_id=%s",
        scope["method"],
        path_of(scope)[:200],
        status,
        request_id,
    )


# Bytes per second, on average, that keep a body from timing out.
MIN_RATE = 1024
# Seconds for which the rest of a refused body is read.
DRAIN_S = 10.0


class BodyPace(_OurLayer):
    """Times the bodies of calls to our routes, and ends refused ones.

    A body that stalls is answered with 408. An error that is known before the body was read
    is answered at once. The rest of the body is then read and dropped for a few seconds,
    since a client that is still sending takes a closed connection for a failure and does
    not look for an answer.
    """

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        is_sized = headers.get("content-length", "").strip("0") != ""
        if not is_sized and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        if error := _encoding_error(scope):
            await error_at(scope, error)(scope, receive, send)
            return
        body = _PacedBody(receive, config_of(scope).upload_timeout_s)
        closes = scope.get("http_version", "1.1").startswith("1")

        async def send_then_drain(message: Message) -> None:
            if message["type"] == "http.response.start":
                body.is_answered = True
                if not body.ended and closes:
                    MutableHeaders(scope=message)["connection"] = "close"
            elif not message.get("more_body", False) and not body.ended:
                await send({**message, "more_body": True})
                await body.drain()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, body.receive, send_then_drain)


class _PacedBody:
    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self.ended = False
        self.is_answered = False
        self._receive = receive
        self._timeout_s = timeout_s
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self._began = self._now()
        self._num_bytes = 0
        self._has_stopped = False

    async def receive(self) -> Message:
        """The next message. 408 is raised, as an ApiError, if it does not arrive."""
        if self.ended:
            return await self._receive()
        if self._has_stopped:
            return {"type": "http.disconnect"}
        total_s = self._timeout_s + self._num_bytes / MIN_RATE
        latest = min(self._now() + self._timeout_s, self._began + total_s)
        try:
            async with asyncio.timeout_at(latest):
                message = await self._receive()
        except TimeoutError:
            self._has_stopped = True
            if self.is_answered:
                return {"type": "http.disconnect"}
            said = (
                f"The body stopped after {self._num_bytes} bytes: none arrived for "
                f"{self._timeout_s:g} seconds (upload_timeout_s), or less than {MIN_RATE} "
                "bytes per second."
            )
            raise ApiError(408, said, code="body_timeout") from None
        self._num_bytes += len(message.get("body", b""))
        self.ended = not message.get("more_body", False)
        return message

    async def drain(self) -> None:
        """Read and drop the rest, for a limited time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while not (self.ended or self._has_stopped):
                    await self.receive()


def _encoding_error(scope: Scope) -> ApiError | None:
    """The error for a body that would have to be decompressed."""
    for name in ("content-encoding", "x-body-compressed"):
        value = Headers(scope=scope).get(name)
        if value and value.lower() != "identity":
            message = (
                f"The body is compressed ({name}: {value!r:.100}). Send it "
                "uncompressed."
            )
            return ApiError(415, message, code="unsupported_encoding", retry=False)
    return None


_METHODS = ("GET", "HEAD", "POST", "DELETE")
_READABLE = (
    "Content-Disposition",
    "Idempotency-Replayed",
    "Request-Id",
    "Retry-After",
    "X-Incomplete",
    "X-Last-Line",
    "X-Line-Order",
    "X-Request-Id",
)


class CrossOrigin(_OurLayer):
    """Answers or refuses the calls to our routes that name an ``Origin``.

    SGLang lets pages of every origin read its answers. Without a key, any page that is open
    in a browser near the server could read all files and start batches.
    """

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self._cors: dict[tuple[str, ...], CORSMiddleware] = {}

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        config = config_of(scope)
        allowed = config.allowed_origins
        if origin in allowed or "*" in allowed:
            if allowed not in self._cors:
                self._cors[allowed] = CORSMiddleware(
                    self._without_origin,
                    allow_origins=allowed,
                    allow_methods=_METHODS,
                    allow_headers=("*",),
                    expose_headers=_READABLE,
                )
            await self._cors[allowed](scope, receive, send)
        elif _is_same_origin(scope, origin, config.public_url):
            await self._without_origin(scope, receive, send)
        else:
            message = (
                f"Pages of {origin!r:.200} may not call this server. Its operator can add "
                "the origin to allowed_origins in --offline-batch-config, or set "
                "public_url if this is the server's own address behind a proxy."
            )
            error = ApiError(403, message, code="origin_not_allowed", retry=False)
            await error_at(scope, error)(scope, receive, send)

    async def _without_origin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app in a way that adds no headers of SGLang's for the origin."""
        await self._app(without_header(scope, b"origin"), receive, send)


def _is_same_origin(scope: Scope, origin: str, public_url: str | None) -> bool:
    """Whether the page that calls was itself loaded from this server."""
    # Set by the browser, and no page can change it.
    if Headers(scope=scope).get("sec-fetch-site") in ("same-origin", "none"):
        return True
    if public_url is not None and origin == "/".join(public_url.split("/")[:3]):
        return True
    host = Headers(scope=scope).get("host")
    return bool(host) and origin.lower() in (f"http://{host}", f"https://{host}")


class OpenAIErrors(_OurLayer):
    """Adds ``error`` to SGLang's errors: many clients look for their fields nowhere else."""

    takes = staticmethod(re.compile("/v1/").match)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None

        async def send_more(message: Message) -> None:
            nonlocal start
            if message.get("status", 0) >= 400:
                start = message
                return
            if start is not None:
                message["body"] = _with_error(start, message.get("body", b""))
                await send(start)
                start = None
            await send(message)

        await self._app(scope, receive, send_more)


def _with_error(start: Message, body: bytes) -> bytes:
    with suppress(ValueError, AttributeError):  # no object of JSON
        content = json.loads(body)
        error = content.get("error", content)
        if isinstance(error.get("code"), int):  # SGLang's is the status
            said, param = str(error.get("message")), error.get("param")
            content |= error_body(said, status_code=error["code"], param=param)
            body = json.dumps(content).encode()
            MutableHeaders(scope=start)["content-length"] = str(len(body))
    return body


METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"}
OTHER = "OTHER"


class KnownMethods:
    """Renames them: SGLang's metrics would have a series for each made-up method."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in METHODS:
            scope = {**scope, "method": OTHER}
        await self._app(scope, receive, send)
