"""Error answers: OpenAI's nested ``error`` object, and Anthropic's below its path."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from ...batch_api import message_batches
from ...batch_api import protocol as api
from ...errors import ApiError
from .calls import RouteFinder, path_of

logger = logging.getLogger(__name__)

# Seconds over which clients that are refused with 429 spread their next attempts.
RETRY_WITHIN_S = 8

_routes = RouteFinder()


class OurRoute(APIRoute):
    """A route with the errors of the API to which its path belongs."""

    def get_route_handler(
        self,
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_our_errors(request: Request) -> Response:
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
        message = f"Invalid value for '{param}': {first['msg']}."
        return ApiError(400, message, param=param)
    if isinstance(error, HTTPException):  # such as a form that cannot be parsed
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
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

    Its handler for ``starlette.exceptions.HTTPException``. Below ``/v1`` and the paths
    of our routes, a 404 and a 405 have the format of all our errors.
    """
    assert isinstance(error, HTTPException)
    path = path_of(request.scope)
    methods = _routes.methods(request.scope)
    is_ours = f"{path}/".startswith("/v1/") or methods
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
