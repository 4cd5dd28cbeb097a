"""Routes whose errors are Anthropic's, whatever the application does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from ..batch_api.message_batches import error_body
from ..errors import ApiError
from ..service import new_id
from .errors import storage_error

logger = logging.getLogger(__name__)


class AnthropicRoute(APIRoute):
    """A route whose errors are Anthropic's, and whose answers have a request id."""

    def get_route_handler(
        self,
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_anthropic_errors(request: Request) -> Response:
            request_id = new_id("req_")
            try:
                response = await handle(request)
            except Exception as error:
                response = _error_response(request, error, request_id)
            response.headers["request-id"] = request_id
            return response

        return handle_with_anthropic_errors


def _error_response(
    request: Request, error: Exception, request_id: str
) -> JSONResponse:
    status_code, message, headers = 500, "Internal server error.", {}
    error = storage_error(error) or error
    if isinstance(error, ApiError):
        status_code, message = error.status_code, error.message
        if error.retry is not None:
            headers["x-should-retry"] = str(error.retry).lower()
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status_code, message = 400, f"{first['loc'][-1]}: {first['msg']}."
    elif isinstance(error, HTTPException):
        status_code, message = error.status_code, str(error.detail)
        headers.update(error.headers or {})
    else:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    body = error_body(message, status_code, request_id)
    return JSONResponse(body, status_code, headers=headers)
