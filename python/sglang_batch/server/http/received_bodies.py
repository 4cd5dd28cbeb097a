"""Bodies of calls while they are received: their size, and how many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import Request

from ...errors import ApiError
from .callers import owner_of
from .calls import header_of
from .parameters import service_of

# For bodies without lines or contents of files.
MAX_JSON_BYTES = 1 << 20
_MAX_DIGITS = 18
# How long a body waits for others of its client to end, and how many may wait.
PATIENCE_S = 10.0
MAX_WAITING = 4096


def content_length(request: Request) -> int | None:
    """The announced size of a body, or None if it has none that makes sense."""
    text = header_of(request.scope, b"content-length") or ""
    if not text.isascii() or not text.isdecimal() or len(text) > _MAX_DIGITS:
        return None
    return int(text)


async def pieces_of(request: Request, most: int, message: str) -> AsyncIterator[bytes]:
    """The body piece by piece.

    Raises:
        ApiError: 413 with this message, the body has more than ``most`` bytes. Before
            the first of them if it announces that.
    """
    size = content_length(request) or 0
    if size <= most:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                break
            yield piece
    if size > most:
        raise ApiError(413, message, code="body_too_large", retry=False)


async def json_object(
    request: Request, most: int = MAX_JSON_BYTES
) -> tuple[dict[str, Any], bytes]:
    """The body of a request, which must be a JSON object, and its bytes.

    Raises:
        ApiError: 413, it has more than ``most`` bytes. 400, it is no object.
    """
    message = f"The body has more than the {most} bytes that this route takes."
    content = b"".join([piece async for piece in pieces_of(request, most, message)])
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return body, content


@asynccontextmanager
async def large_body(request: Request) -> AsyncGenerator[None]:
    """Receive a body that may be large in this block.

    A client that sends as many as it may waits for one of them to end.

    Raises:
        ApiError: 429, none has ended for ``PATIENCE_S`` seconds, or too many wait.
    """
    service, owner = service_of(request), owner_of(request)
    most = service.config.max_uploads
    # Well before the body times out.
    patience_s = min(PATIENCE_S, service.config.upload_timeout_s / 2)
    turns = service.turns.setdefault(owner, asyncio.Semaphore(most))
    service.num_receiving[owner] += 1
    try:
        try:
            late = service.num_receiving[owner] > most + MAX_WAITING
            async with asyncio.timeout(0 if late else patience_s):
                await turns.acquire()
        except TimeoutError:
            raise ApiError(
                429,
                f"{most} bodies are being received from this client (max_uploads); wait "
                "for one of them to end.",
                code="too_many_uploads",
            ) from None
        try:
            yield
        finally:
            turns.release()
    finally:
        service.num_receiving[owner] -= 1
        if not service.num_receiving[owner]:
            del service.num_receiving[owner], service.turns[owner]
