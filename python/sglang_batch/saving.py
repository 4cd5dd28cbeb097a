"""Puts results on disk as they come, and waits where the disk does not take them."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from .errors import StoreWriteError
from .request import RequestOutput
from .send_limit import SendLimit
from .service_log import batch_changed
from .store.batch_store import BatchStore
from .store.result_log import ResultLog, finished_lines

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Between tries to write while the disk is full, say.
RETRY_S = 2.0
# What a full or read-only disk, or a database on one, raises.
WRITE_ERRORS = (StoreWriteError, OSError, sqlite3.OperationalError)
# So many kinds of error are told apart.
_MOST_CODES = 50


class Pauses:
    """Why a batch sends nothing for now; the store, and so its clients, are told.

    Args:
        limit: held while there is a reason.
    """

    def __init__(self, batch_id: str, store: BatchStore, limit: SendLimit) -> None:
        self._batch_id = batch_id
        self._store = store
        self._limit = limit
        self._reasons: dict[str, str] = {}

    def __contains__(self, kind: str) -> bool:
        return kind in self._reasons

    def set(self, kind: str, reason: str | None) -> None:
        """There is a reason of this kind now, or none any more."""
        if self._reasons.get(kind) == reason:
            return
        if reason is None:
            del self._reasons[kind]
            self._limit.release(kind)
        else:
            self._reasons[kind] = reason
            self._limit.hold(kind)
        self.tell()

    def tell(self) -> None:
        """Have the store know what holds now, whatever an earlier server left there."""
        reason = " ".join(self._reasons[kind] for kind in sorted(self._reasons))
        self._store.pause(self._batch_id, reason or None)
        row = self._store.get_batch(self._batch_id)
        if row is not None:
            batch_changed(row)


class ResultSaver:
    """The results of one batch on their way to disk.

    A result that cannot be written is kept in memory, the batch is paused with the
    reason, and no more of its lines are sent, so what is kept is what was in flight.

    Attributes:
        log: what is on disk.
        errors: error lines by code.
    """

    def __init__(
        self, batch_id: str, store: BatchStore, log: ResultLog, pauses: Pauses
    ) -> None:
        self.batch_id = batch_id
        self.store = store
        self.log = log
        self.errors = _errors_of(log)
        self._pauses = pauses
        self._unsaved: deque[tuple[int, bytes, RequestOutput]] = deque()
        self._paused = False

    def put(self, index: int, line: bytes, output: RequestOutput) -> None:
        """Take the result of a line: on disk when this returns, if the disk is well."""
        self._unsaved.append((index, line, output))
        if not output.ok:
            self.errors[_code(output.body)] += 1
        if not self._paused:
            try:
                self.flush()
            except StoreWriteError as error:
                self._pause(error)

    def flush(self) -> None:
        """Write what is kept in memory.

        Raises:
            StoreWriteError: the disk does not take it.
        """
        while self._unsaved:
            index, line, output = self._unsaved[0]
            self.log.put(index, line, ok=output.ok, usage=output.usage)
            self._unsaved.popleft()

    async def save_counts(self) -> None:
        """Make what is there safe from a power cut, and count it then."""
        try:
            self.flush()
            await in_thread(self._commit, self._counts())
        except WRITE_ERRORS as error:
            self._pause(error)
        else:
            self._go_on()

    def _commit(self, counts: dict[str, Any]) -> None:
        self.log.commit()
        self.store.update_batch(self.batch_id, **counts)

    def _counts(self) -> dict[str, Any]:
        log = self.log
        codes = dict(self.errors.most_common(_MOST_CODES))
        return {
            "completed": log.num_completed,
            "failed": log.num_failed,
            "input_tokens": log.usage.input_tokens,
            "cached_tokens": log.usage.cached_tokens,
            "output_tokens": log.usage.output_tokens,
            "reasoning_tokens": log.usage.reasoning_tokens,
            "line_errors": json.dumps(codes) if codes else None,
        }

    async def all_saved(self, stop: asyncio.Event) -> None:
        """Wait until every result is on disk, or ``stop`` is set."""
        while self._unsaved and not stop.is_set():
            await asyncio.sleep(RETRY_S)
            await self.save_counts()

    async def until_written(self, write: Callable[[], T], *, quick: bool = False) -> T:
        """Call ``write`` until the disk takes what it writes; in a thread unless quick."""
        while True:
            try:
                written = write() if quick else await in_thread(write)
            except WRITE_ERRORS as error:
                self._pause(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._go_on()
                return written

    def _pause(self, error: Exception) -> None:
        if not self._paused:
            logger.error(
                "Batch %s is paused, its results cannot be written: %s. It goes on "
                "when they can.",
                self.batch_id,
                error,
            )
        self._paused = True
        self._pauses.set("disk", f"Results cannot be written: {error}")

    def _go_on(self) -> None:
        if self._paused and not self._unsaved:
            self._paused = False
            self._pauses.set("disk", None)


def _errors_of(log: ResultLog) -> Counter[str]:
    """Error lines of an earlier server by code."""
    codes: Counter[str] = Counter()
    if log.num_failed:
        with open(log.path, "rb") as file:
            for line in finished_lines(file, log.path.stat().st_size, ok=False):
                codes[_code(_body_of(line))] += 1
    return codes


def _body_of(line: bytes) -> bytes:
    """The body of a result line; empty where it has none."""
    try:
        return bytes(msgspec.json.decode(line, type=_Line).response.body)
    except msgspec.DecodeError:
        return b""


class _Response(msgspec.Struct):
    body: msgspec.Raw


class _Line(msgspec.Struct):
    response: _Response


def _code(body: bytes) -> str:
    """What kind of error an answer is: its code, or else its type."""
    try:
        error = msgspec.json.decode(body)["error"]
        code = error.get("code") or error.get("type")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        code = None
    return str(code or "unknown")[:64]


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Like ``asyncio.to_thread``, but over no sooner than the thread, even if cancelled.

    By then the files it works on may be closed, and the store another server's.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
