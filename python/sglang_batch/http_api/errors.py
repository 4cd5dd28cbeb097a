"""Routes whose errors have OpenAI's nested body, whatever the application does."""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..batch_api import protocol as api
from ..errors import ApiError

logger = logging.getLogger(__name__)


class OpenAIRoute(APIRoute):
    """A route whose errors are OpenAI's nested ones."""

    def get_route_handler(
        self,
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_nested_errors(request: Request) -> Response:
            response = await answer(request)
            # What OpenAI's clients show of a call, to look for in a log.
            response.headers.setdefault("x-request-id", f"req_{uuid.uuid4().hex}")
            return response

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                return error_response(error)
            except RequestValidationError as error:
                first = error.errors()[0]
                param = str(first["loc"][-1])
                message = f"Invalid value for '{param}': {first['msg']}."
                return error_response(ApiError(400, message, param=param))
            except HTTPException as error:  # such as a form that cannot be parsed
                response = error_response(
                    ApiError(error.status_code, str(error.detail))
                )
                response.headers.update(error.headers or {})
                return response
            except ClientDisconnect:  # who sent half a body reads no answer
                return error_response(ApiError(400, "The client closed the call."))
            except Exception as error:
                logger.exception("%s %s failed", request.method, request.url.path)
                return error_response(
                    storage_error(error) or ApiError(500, "Internal server error.")
                )

        return handle_with_nested_errors


def storage_error(error: Exception) -> ApiError | None:
    """What a client is told of a disk that is full or cannot be written."""
    code = getattr(error, "errno", None)
    name = getattr(error, "sqlite_errorname", "")
    if code in (errno.ENOSPC, errno.EDQUOT) or name == "SQLITE_FULL":
        return ApiError(
            507,
            "The disk on which this server keeps its files is full. Delete files that "
            "are no longer needed with DELETE /v1/files/{file_id}, or make room in its "
            "--offline-batch-dir.",
            code="disk_full",
            retry=False,
        )
    denied = (errno.EROFS, errno.EACCES, errno.EPERM)
    if code in denied or name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
        return ApiError(
            500,
            "This server cannot write to the directory in which it keeps its files; "
            "make its --offline-batch-dir writable for the user it runs as.",
            code="storage_not_writable",
            retry=False,
        )
    return None


def error_response(error: ApiError) -> JSONResponse:
    content = api.error_body(
        error.message,
        status_code=error.status_code,
        param=error.param,
        code=error.code,
    )
    headers = {}
    if error.retry is not None:
        headers["x-should-retry"] = str(error.retry).lower()
    return JSONResponse(content, error.status_code, headers=headers)
