"""Earlier answers, by the idempotency key that the client sent with its call."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from .batch_store import BatchStore, now
from .files import FileLock

KEPT_S = 86_400


@dataclass(frozen=True, slots=True)
class Answer:
    """The first answer to a call.

    request_sha256: digest of the call. The same key with another digest is an error.
    """

    request_sha256: str
    status_code: int
    body: bytes


def find_answer(store: BatchStore, owner: str, key: str) -> Answer | None:
    """The answer to a call with this key in the last 24 hours."""
    found = store.rows(
        "SELECT * FROM idempotent_answers WHERE owner = ? AND key = ?"
        " AND created_at > ?",
        (owner, key, now() - KEPT_S),
    )
    if not found:
        return None
    row = found[0]
    return Answer(row["request_sha256"], row["status_code"], row["body"])


def keep_answer(store: BatchStore, owner: str, key: str, answer: Answer) -> None:
    """Keep an answer for 24 hours, replacing an older one with the same key."""
    with store.atomic() as db:
        db.execute(
            "INSERT OR REPLACE INTO idempotent_answers VALUES (?, ?, ?, ?, ?, ?)",
            (
                owner,
                key,
                answer.request_sha256,
                answer.status_code,
                answer.body,
                now(),
            ),
        )


def key_lock(store: BatchStore, owner: str, key: str) -> FileLock:
    """The lock to hold while a call with this key is executed, in any process.

    It is released when its holder dies. All keys share 256 files, so none need ever be
    removed. Two calls whose keys share a file wait for each other.
    """
    name = hashlib.sha256(f"{owner}\n{key}".encode()).hexdigest()[:2]
    return FileLock(store.directory / "keys" / name)
