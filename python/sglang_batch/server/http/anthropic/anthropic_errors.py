"""Error answers in Anthropic's format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ....batch_api.message_batches import error_body
from ....errors import ApiError
from ..error_responses import storage_error
from ..middleware.answer_headers import request_id_of

logger = logging.getLogger(__name__)


class AnthropicRoute(APIRoute):
    """A route with Anthropic's errors and a ``request-id`` header on every answer."""

    def get_route_handler(
        self,
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_anthropic_errors(request: Request) -> Response:
            request_id = request_id_of(request)
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
        headers.update(error.headers)
        if error.retry is not None:
            headers["x-should-retry"] = str(error.retry).lower()
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status_code, message = 400, f"{first['loc'][-1]}: {first['msg']}."
    elif isinstance(error, HTTPException):
        status_code, message = error.status_code, str(error.detail)
        headers.update(error.headers or {})
    elif isinstance(error, ClientDisconnect):  # nobody reads this answer
        status_code, message = 400, "The client closed the call."
    else:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    body = error_body(message, status_code, request_id)
    return JSONResponse(body, status_code, headers=headers)
