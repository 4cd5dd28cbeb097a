"""Calls: the route, path and label in metrics of each, and the answers to those that fail.

Errors have OpenAI's nested ``error`` object, or Anthropic's below its path.
"""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from re import Pattern
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute, iter_route_contexts
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import WebSocketRoute
from starlette.types import Message, Receive, Scope

from ...batch_api import message_batches
from ...batch_api import protocol as api
from ...config import OfflineBatchConfig
from ...errors import ApiError
from ...job import traces


@dataclass(frozen=True, slots=True)
class KnownRoute:
    """One route of an application. A mounted application has no methods: it takes all."""

    template: str
    path_regex: Pattern[str]
    methods: frozenset[str]
    is_websocket: bool
    endpoint: object


def known_routes(app: FastAPI) -> list[KnownRoute]:
    return [
        KnownRoute(
            str(route.path),
            path_regex,
            frozenset(route.methods or ()),
            isinstance(route.original_route, WebSocketRoute),
            route.endpoint,
        )
        for route in iter_route_contexts(app.router.routes)
        if route.path is not None and (path_regex := getattr(route, "path_regex", None))
    ]


class RouteFinder:
    """Finds the route of a call as the application's router does."""

    def __init__(self) -> None:
        self._app: FastAPI | None = None
        self._num_known = -1
        self._routes: list[KnownRoute] = []

    def route(self, scope: Scope) -> KnownRoute | None:
        """The route that answers a call, if any. One with the path alone answers 405."""
        other_method = None
        for route in self._at_path(scope):
            if (
                route.is_websocket
                or not route.methods
                or scope["method"] in route.methods
            ):
                return route
            other_method = other_method or route
        return other_method

    def methods(self, scope: Scope) -> set[str]:
        """The methods of the routes at a call's path."""
        return {method for route in self._at_path(scope) for method in route.methods}

    def _at_path(self, scope: Scope) -> Iterator[KnownRoute]:
        app: FastAPI = scope["app"]
        if app is not self._app or len(app.router.routes) != self._num_known:
            self._app, self._routes = app, known_routes(app)
            self._num_known = len(app.router.routes)
        path = get_route_path(scope)
        is_websocket = scope["type"] == "websocket"
        for route in self._routes:
            if route.is_websocket == is_websocket and route.path_regex.match(path):
                yield route


def path_of(scope: Scope) -> str:
    """The path of a call below the server's root path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def without_header(scope: Scope, name: bytes) -> Scope:
    """The scope of the same call without the headers of this lowercase name."""
    kept = [each for each in scope["headers"] if each[0].lower() != name]
    return {**scope, "headers": kept}


async def with_whole_body(
    receive: Receive, most: int | None = None
) -> tuple[bytes, Receive]:
    """A call's body, and a replacement of ``receive`` with the same body.

    Of one with more than ``most`` bytes, as much as was received.
    """
    received: list[Message] = []
    body, more = bytearray(), True
    while more and (most is None or len(body) <= most):  # or until the client left
        message = await receive()
        received.append(message)
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)

    async def replay() -> Message:
        return received.pop(0) if received else await receive()

    return bytes(body), replay


def config_of(scope: Scope) -> OfflineBatchConfig:
    config: OfflineBatchConfig = scope["app"].state.offline_batch_service.config
    return config


UNKNOWN = "unknown"

_routes = RouteFinder()


def label_by_template(
    original: Callable[[Request], tuple[str, bool]], request: Request
) -> tuple[str, bool]:
    """AROUND hook on SGLang's choice of the label ``endpoint``.

    SGLang labels calls of included routers, and calls that no route takes, with
    their path: a series for each id, or for each path that somebody tries, never
    ends. Returns the label, and whether a route takes the call.
    """
    route = _routes.route(request.scope)
    if route is None:
        return UNKNOWN, False
    return route.template, original(request)[1]


logger = logging.getLogger(__name__)

# Seconds over which clients that are refused with 429 spread their next attempts.
RETRY_WITHIN_S = 8


class OurRoute(APIRoute):
    """A route with the errors of the API to which its path belongs."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_our_errors(request: Request) -> Response:
            traces.enter(request.headers)
            try:
                return await handle(request)
            except Exception as error:
                return error_at(request.scope, _api_error(request, error))

        return handle_with_our_errors


def _api_error(request: Request, error: Exception) -> ApiError:
    """The error that answers a call, from whatever its route has raised."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        param = str(first["loc"][-1])
        message = (
            f"Invalid value for '{param}': {first['input']!r:.100}. {first['msg']}."
        )
        return ApiError(400, message, param=param)
    if isinstance(error, HTTPException):  # such as a form that cannot be parsed
        headers = dict(error.headers or {})
        return ApiError(error.status_code, str(error.detail), headers=headers)
    if isinstance(error, ClientDisconnect):  # nobody reads this answer
        return ApiError(400, "The client closed the call.")
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return storage_error(error) or ApiError(500, "Internal server error.")


def storage_error(error: Exception) -> ApiError | None:
    """The error for a full or read-only disk, or None for any other exception."""
    code = getattr(error, "errno", None)
    name = getattr(error, "sqlite_errorname", "")
    if code in (errno.ENOSPC, errno.EDQUOT) or name == "SQLITE_FULL":
        message = (
            "The disk on which this server keeps its files is full. Delete files that "
            "are no longer needed with DELETE /v1/files/{file_id}, or make room in its "
            "--offline-batch-dir."
        )
        return ApiError(507, message, code="disk_full", retry=False)
    denied = (errno.EROFS, errno.EACCES, errno.EPERM)
    if code in denied or name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
        message = (
            "This server cannot write to the directory in which it keeps its files; "
            "make its --offline-batch-dir writable for the user it runs as."
        )
        return ApiError(500, message, code="storage_not_writable", retry=False)
    return None


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_at(scope: Scope, error: ApiError) -> JSONResponse:
    """An error in the format of the API to which a call's path belongs."""
    content: dict[str, Any]
    if is_anthropic(path_of(scope)):
        request_id = scope.get("state", {}).get("request_id")
        content = message_batches.error_body(
            error.message, error.status_code, request_id
        )
    else:
        content = api.error_body(
            error.message,
            status_code=error.status_code,
            param=error.param,
            code=error.code,
            kind=error.kind,
        )
    headers = dict(error.headers)
    if error.retry is not None:
        headers["x-should-retry"] = str(error.retry).lower()
    if error.status_code == 429:
        # Not one moment for all that were refused at once.
        headers.setdefault("Retry-After", str(random.randint(1, RETRY_WITHIN_S)))
    return JSONResponse(content, error.status_code, headers=headers)


async def answer_unknown(request: Request, error: Exception) -> Response:
    """Answer a call that no route takes, on SGLang's app or another.

    Its handler for ``starlette.exceptions.HTTPException``. Below ``/v1``, ``/offline_batch`` and
    the paths of our routes, a 404 and a 405 have the format of all our errors.
    """
    assert isinstance(error, HTTPException)
    path = path_of(request.scope)
    methods = _routes.methods(request.scope)
    is_ours = f"{path}/".startswith(("/v1/", "/offline_batch/")) or methods
    if not is_ours or error.status_code not in (404, 405):
        return await http_exception_handler(request, error)
    named = f"{request.method} {path[:200]}"
    if error.status_code == 404:
        unknown = ApiError(404, f"Unknown request URL: {named}.", code="unknown_url")
        return error_at(request.scope, unknown)
    use = " or ".join(sorted(methods - {"HEAD"}))
    message = f"Method {request.method} is not allowed for {path[:200]}. Use {use}."
    headers = {"Allow": ", ".join(sorted(methods))}
    return error_at(request.scope, ApiError(405, message, headers=headers))
