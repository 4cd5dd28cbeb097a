"""Bodies must arrive at some pace, and an answer may come before the body has.

A body that stalls is answered with 408. An error that is known before the body was read
is answered at once. The rest of the body is then read and dropped for a few seconds,
since a client that is still sending takes a closed connection for a failure and does
not look for an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....errors import ApiError
from ..error_responses import error_at
from .calls import IsOurs, config_of, header_of, path_of

# Bytes per second, on average, that keep a body from timing out.
MIN_RATE = 1024
# Seconds for which the rest of a refused body is read.
DRAIN_S = 10.0


class BodyPace:
    """Times the bodies of calls to our routes, and ends refused ones."""

    def __init__(self, app: ASGIApp, is_ours: IsOurs) -> None:
        self._app = app
        self._is_ours = is_ours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or not self._is_ours(path_of(scope))
            or not _has_body(scope)
        ):
            await self._app(scope, receive, send)
            return
        if error := _encoding_error(scope):
            await error_at(path_of(scope), error)(scope, receive, send)
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
    """The body of a call as it arrives."""

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
            raise self._timed_out() from None
        self._num_bytes += len(message.get("body", b""))
        self.ended = not message.get("more_body", False)
        return message

    async def drain(self) -> None:
        """Read and drop the rest, for a limited time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while not (self.ended or self._has_stopped):
                    await self.receive()

    def _timed_out(self) -> ApiError:
        return ApiError(
            408,
            f"The body stopped after {self._num_bytes} bytes: none arrived for "
            f"{self._timeout_s:g} seconds (upload_timeout_s), or less than {MIN_RATE} "
            "bytes per second.",
            code="body_timeout",
        )


def _has_body(scope: Scope) -> bool:
    if header_of(scope, b"transfer-encoding") is not None:
        return True
    return (header_of(scope, b"content-length") or "0").strip("0") != ""


def _encoding_error(scope: Scope) -> ApiError | None:
    """The error for a body that would have to be decompressed."""
    for name in (b"content-encoding", b"x-body-compressed"):
        value = header_of(scope, name)
        if value and value.lower() != "identity":
            return ApiError(
                415,
                f"The body is compressed ({name.decode()}: {value!r:.100}). Send it "
                "uncompressed.",
                code="unsupported_encoding",
                retry=False,
            )
    return None
