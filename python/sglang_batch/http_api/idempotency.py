"""Calls that are safe to repeat: the same key is answered the same, once executed.

A client sends ``Idempotency-Key: <anything>`` with a POST. The first call with a key is
executed; the same call with the same key gets the first one's answer for 24 hours, with
the header ``idempotency-replayed: true``. Answers that are errors are not kept, so what
failed can be tried again under its key.

An answer is kept in the transaction that does what was asked for, so a server that dies
has done both or neither.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ..errors import ApiError
from ..store.answers import Answer, find_answer, keep_answer, key_lock
from ..store.batch_store import BatchStore
from .caller import owner_of
from .parameters import service_of

MAX_KEY_LEN = 255
# How long a call waits for another one with the same key to end.
PATIENCE_S = 30.0
_POLL_S = 0.02

# Keeps the body of an answer; called in the transaction that makes what it shows.
Keep = Callable[[dict[str, Any]], None]


async def answer_once(
    request: Request, content: bytes, make: Callable[[Keep], Awaitable[JSONResponse]]
) -> Response:
    """The answer to a POST, made by ``make`` unless it was given before.

    Args:
        content: what the call says: its body, or for a form what the form holds, as
            boundaries differ from one attempt to the next.
        make: does what is asked for, and has its answer kept.

    Raises:
        ApiError: 409, the key was used for something else, or is in use.
    """
    key = request.headers.get("idempotency-key")
    if key is None:
        return await make(lambda body: None)
    if not 1 <= len(key) <= MAX_KEY_LEN:
        message = f"An Idempotency-Key has 1 to {MAX_KEY_LEN} characters."
        raise ApiError(400, message, code="invalid_idempotency_key")
    store, owner = service_of(request).store, owner_of(request)
    said = f"{request.method} {request.url.path}\n".encode() + content
    sha256 = hashlib.sha256(said).hexdigest()
    async with _turn(store, owner, key):
        before = await asyncio.to_thread(find_answer, store, owner, key)
        if before is not None:
            return _again(before, key, sha256)

        def keep(body: dict[str, Any]) -> None:
            answer = Answer(sha256, 200, bytes(JSONResponse(body).body))
            keep_answer(store, owner, key, answer)

        return await make(keep)


def _again(before: Answer, key: str, sha256: str) -> Response:
    if before.request_sha256 != sha256:
        raise ApiError(
            409,
            f"The Idempotency-Key {key!r} was used for another request in the last 24 "
            "hours; use a new key for each request.",
            code="idempotency_key_reused",
            retry=False,
        )
    return Response(
        before.body,
        before.status_code,
        media_type="application/json",
        headers={"idempotency-replayed": "true"},
    )


@asynccontextmanager
async def _turn(store: BatchStore, owner: str, key: str) -> AsyncIterator[None]:
    """Hold the key's lock, waiting for another call that is executed under it."""
    lock = key_lock(store, owner, key)
    deadline = time.monotonic() + PATIENCE_S
    # Not in a thread: those who wait could keep all threads from whom they wait for.
    while lock.acquire("a call") is not None:
        if time.monotonic() > deadline:
            raise ApiError(
                409,
                f"A request with the Idempotency-Key {key!r} is still being executed.",
                code="idempotency_key_in_use",
                retry=True,
            )
        await asyncio.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()
