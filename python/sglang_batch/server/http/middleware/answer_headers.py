"""Headers that every answer of ours has, and answers to HEAD."""

from __future__ import annotations

import logging
import re
import uuid
from urllib.parse import urlsplit, urlunsplit

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .calls import IsOurs, header_of, path_of

logger = logging.getLogger(__name__)

# Printed in logs and sent back, so it must be harmless in both.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_HEADERS = {
    # Results are text that clients chose: a browser must not take it for a page.
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class AnswerHeaders:
    """Adds the headers, and logs each call that changes something.

    ``X-Request-Id`` is the client's own if it sent one of up to 128 letters, digits and
    ``._:/+=@-``, else a new one.
    """

    def __init__(self, app: ASGIApp, is_ours: IsOurs) -> None:
        self._app = app
        self._is_ours = is_ours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_ours(path_of(scope)):
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        is_head, has_answer = scope["method"] == "HEAD", False

        async def send_more(message: Message) -> None:
            nonlocal has_answer
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("x-request-id", request_id)
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


def request_id_of(request: Request) -> str:
    """The id of a call, as its answer names it."""
    request_id: str | None = getattr(request.state, "request_id", None)
    return request_id or _new_id()


def _without_host(url: str) -> str:
    """A redirect's target as a path, since its host is the one that the call named."""
    parts = urlsplit(url)
    # "//" would begin a host again.
    path = "/" + parts.path.lstrip("/")
    return urlunsplit(("", "", path, parts.query, parts.fragment))


def _request_id(scope: Scope) -> str:
    given = header_of(scope, b"x-request-id")
    return given if given and _REQUEST_ID.fullmatch(given) else _new_id()


def _new_id() -> str:
    return f"req_{uuid.uuid4().hex}"


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
