"""POST calls that are safe to repeat.

The first call with a key, in the header ``Idempotency-Key`` or in its body, is executed. For
24 hours, the same call with the same key gets the first call's answer. Errors are not kept.
The answer is stored in the same transaction as the call's effect: both or neither.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...errors import ApiError
from ...store.batch_store import BatchStore, now
from ...store.files import FileLock
from ..retention import ANSWERS_KEPT_S
from .authorization import caller_of
from .parameters import BODY_KEY, service_of

MAX_KEY_LEN = 255
# How long a call waits for another one with the same key to end.
PATIENCE_S = 30.0
# Without a key, a repeated call for a batch means one created at most this long ago.
REPEATED_WITHIN_S = 600
_POLL_S = 0.02

# Stores an answer's body. Called in the transaction that creates the object.
Keep = Callable[[dict[str, Any]], None]


async def answer_once(
    request: Request,
    content: bytes,
    make: Callable[[Keep], dict[str, Any]],
    body_key: Any = None,
    shown: Callable[[dict[str, Any]], dict[str, Any]] = lambda kept: kept,
) -> Response:
    """Answer a POST with the object that ``make`` creates, or the one kept for its key.

    ``content`` identifies the call: its body or, since boundaries of forms differ
    from one attempt to the next, fields and files. ``make`` is called in a thread
    and has the object kept with its :data:`Keep`. ``shown`` makes of a kept object
    what this call gets. Raises ApiError: 400 if header or body have no valid key or
    differ, 409 if the key was used for another call or is in use.
    """
    key = _key(request.headers.get("idempotency-key"), body_key)
    if key is None:
        return JSONResponse(await asyncio.to_thread(make, lambda body: None))
    store, owner = service_of(request).store, caller_of(request).name
    call = f"{request.method} {request.url.path}\n".encode() + content
    sha256 = hashlib.sha256(call).hexdigest()

    def answer() -> Response:
        kept = store.rows(
            "SELECT request_sha256, body FROM idempotent_answers"
            " WHERE owner = ? AND key = ? AND created_at > ?",
            (owner, key, now() - ANSWERS_KEPT_S),
        )
        if not kept:
            return JSONResponse(make(keep))
        if kept[0]["request_sha256"] != sha256:
            message = (
                f"The Idempotency-Key {key!r} was used for another request in the last "
                "24 hours; use a new key for each request."
            )
            raise ApiError(409, message, code="idempotency_key_reused", retry=False)
        headers = {"idempotency-replayed": "true"}
        return JSONResponse(shown(json.loads(kept[0]["body"])), headers=headers)

    def keep(body: dict[str, Any]) -> None:
        keep_answer(store, owner, key, sha256, body)

    async with _locked(store, owner, key):
        return await asyncio.to_thread(answer)


def keep_answer(
    store: BatchStore, owner: str, key: str, sha256: str, body: dict[str, Any]
) -> None:
    """Keep the answer to a call with this digest, in place of an older one of the key."""
    row = (owner, key, sha256, 200, bytes(JSONResponse(body).body), now())
    with store.atomic() as db:
        query = "INSERT OR REPLACE INTO idempotent_answers VALUES (?, ?, ?, ?, ?, ?)"
        db.execute(query, row)


def _key(header: str | None, body_key: Any) -> str | None:
    key = body_key if header is None else header
    if key is None:
        return None
    message = None
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY_LEN:
        message = f"An Idempotency-Key has 1 to {MAX_KEY_LEN} characters."
    elif body_key not in (None, key):
        message = f"The header Idempotency-Key and {BODY_KEY} of the body differ."
    if message is not None:
        raise ApiError(400, message, code="invalid_idempotency_key")
    return str(key)


def is_repeated(request: Request) -> bool:
    """Whether an official client repeats a call because it got no answer."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")


def key_lock(store: BatchStore, owner: str, key: str) -> FileLock:
    """The lock to hold while a call with this key is executed, in any process.

    All keys share 256 files, so none need ever be removed, and some wait for each
    other.
    """
    name = hashlib.sha256(f"{owner}\n{key}".encode()).hexdigest()[:2]
    return FileLock(store.directory / "keys" / name)


@asynccontextmanager
async def _locked(store: BatchStore, owner: str, key: str) -> AsyncIterator[None]:
    """Hold the key's lock. Waits while another call with this key is executed."""
    lock = key_lock(store, owner, key)
    deadline = time.monotonic() + PATIENCE_S
    # Not in a thread: waiting calls could use up all threads that the first one needs.
    while lock.acquire("a call") is not None:
        if time.monotonic() > deadline:
            message = (
                f"A request with the Idempotency-Key {key!r} is still being executed."
            )
            raise ApiError(409, message, code="idempotency_key_in_use", retry=True)
        await asyncio.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()
