"""Writes results to disk as they come, and a batch's files and last status at its end."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import sqlite3
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ..batch_api import protocol as api
from ..batch_api.jsonl import BatchFile
from ..batch_api.lines import ErrorReasons, ResultLine, unrun_line
from ..errors import StoreWriteError
from ..job.early_stop import GIVEN_UP, given_up_message
from ..job.inflight_limit import InflightLimit
from ..request import RequestOutput
from ..store.batch_store import BatchStore, Row, now
from ..store.files import atomic_write
from ..store.result_log import ResultLog, finished_lines
from .access.usage import add_usage
from .background import in_thread
from .progress import batch_changed

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between attempts to write, while the disk is full, say.
RETRY_S = 2.0
# Raised for a full or read-only disk, or by a database on one.
WRITE_ERRORS = (StoreWriteError, OSError, sqlite3.OperationalError)
# Of all errors of the system, those that mean no space, or no permission, to write.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# What counts as used by the batch's owner.
COUNTED = (
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "merged_input_tokens",
    "merged_output_tokens",
    "engine_s",
)


def is_write_error(error: Exception) -> bool:
    """Whether the disk had no space or permission: not the fault of the batch."""
    return (
        isinstance(error, StoreWriteError)
        or (isinstance(error, OSError) and error.errno in _DISK_ERRORS)
        or getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
    )


class Pauses:
    """The reasons for which a batch sends nothing for now, which its clients see."""

    def __init__(self, batch_id: str, store: BatchStore, limit: InflightLimit) -> None:
        self._batch_id = batch_id
        self._store = store
        self._limit = limit
        self._reasons: dict[str, str] = {}

    def __contains__(self, kind: str) -> bool:
        return kind in self._reasons

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def set(self, kind: str, reason: str | None) -> None:
        """Set the reason of one kind, or clear it with None."""
        if self._reasons.get(kind) == reason:
            return
        if reason is None:
            del self._reasons[kind]
            self._limit.resume(kind)
        else:
            self._reasons[kind] = reason
            # With the engine paused, none of its requests continues.
            self._limit.pause(kind, recalls=kind != "engine")
        self.tell()

    def tell(self) -> None:
        """Write the present reasons to the store, over those of an earlier server."""
        reason = " ".join(self._reasons[kind] for kind in sorted(self._reasons))
        self._store.pause(self._batch_id, reason or None, api.ACTIVE_STATUSES)
        row = self._store.get_batch(self._batch_id)
        if row is not None:
            batch_changed(row)


@dataclass(eq=False)
class ResultSaver:
    """The results of one batch on their way to disk.

    A result that cannot be written is kept in memory, and the batch is paused with
    the reason. No more of its lines are sent, so at most the lines that were in
    flight are kept.
    """

    batch_id: str
    store: BatchStore
    log: ResultLog
    pauses: Pauses
    engine_s: Callable[[], float]

    def __post_init__(self) -> None:
        self.errors = ErrorReasons()
        if self.log.num_failed:  # of an earlier server
            with open(self.log.path, "rb") as file:
                end = self.log.path.stat().st_size
                for line in finished_lines(file, end, ok=False):
                    self.errors.add(_body_of(line))
        self._unsaved: deque[tuple[int, bytes, RequestOutput]] = deque()
        self._paused = False

    def put(self, index: int, line: bytes, output: RequestOutput) -> None:
        """Take the result of a line, and write it now unless the batch is paused."""
        self._unsaved.append((index, line, output))
        if not output.ok:
            self.errors.add(output.body)
        if not self._paused:
            try:
                self.flush()
            except StoreWriteError as error:
                self._pause(error)

    def flush(self) -> None:
        """Write the results that are kept in memory, or raise StoreWriteError."""
        while self._unsaved:
            self.log.put_output(*self._unsaved[0])
            self._unsaved.popleft()

    async def save_counts(self) -> None:
        """Make the results survive a power cut, then write their counts."""
        try:
            self.flush()
            await in_thread(self._commit, self._counts())
        except WRITE_ERRORS as error:
            self._pause(error)
        else:
            self._resume()

    def save_optimal_share(self, share: float) -> None:
        """Record the share of prompt tokens that a perfect prefix cache would save."""
        with suppress(sqlite3.OperationalError):  # for information only
            self.store.update_batch(self.batch_id, optimal_cached_share=share)

    def _commit(self, counts: dict[str, Any]) -> None:
        self.log.commit()
        with self.store.atomic():
            before = self.store.get_batch(self.batch_id)
            self.store.update_batch(self.batch_id, **counts)
            if before is not None:
                # The difference to the written counts: a line counts once, whichever
                # server it ends in.
                more = {key: counts[key] - before[key] for key in COUNTED}
                merged = more.pop("merged_input_tokens")
                merged += more.pop("merged_output_tokens")
                add_usage(self.store, before["owner"], merged_tokens=merged, **more)

    def _counts(self) -> dict[str, Any]:
        log = self.log
        codes = self.errors.by_code()
        merged = dataclasses.asdict(log.merged_usage)
        del merged["reasoning_tokens"]
        return {
            **dataclasses.asdict(log.usage),
            **{f"merged_{name}": count for name, count in merged.items()},
            "completed": log.num_completed,
            "failed": log.num_failed,
            "truncated": log.cuts.length,
            "merged": log.num_merged,
            "engine_s": self.engine_s(),
            "line_errors": json.dumps(codes) if codes else None,
            "error_reasons": self.errors.as_json(),
        }

    async def all_saved(self, stop: asyncio.Event) -> None:
        """Wait until every result is on disk, or ``stop`` is set."""
        while self._unsaved and not stop.is_set():
            await asyncio.sleep(RETRY_S)
            await self.save_counts()

    async def until_written(self, write: Callable[[], T], *, quick: bool = False) -> T:
        """Call ``write`` until it succeeds, in a thread unless it is quick."""
        while True:
            try:
                written = write() if quick else await in_thread(write)
            except WRITE_ERRORS as error:
                self._pause(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._resume()
                return written

    def _pause(self, error: Exception) -> None:
        if not self._paused:
            logger.error(
                "Batch %s is paused: its results cannot be written (%s). It resumes "
                "when they can.",
                self.batch_id,
                error,
            )
        self._paused = True
        self.pauses.set("disk", f"Results cannot be written: {error}")

    def _resume(self) -> None:
        if self._paused and not self._unsaved:
            self._paused = False
            self.pauses.set("disk", None)


def _body_of(line: bytes) -> bytes:
    """The body of a result line, or empty if it has none."""
    try:
        response = msgspec.json.decode(line, type=ResultLine).response
    except msgspec.DecodeError:
        return b""
    return b"" if response is None else bytes(response.body)


# Code and message of a line that never ran, by the final status of its batch.
UNRUN = {
    api.CANCELLED: (
        "batch_cancelled",
        "This request was not executed because the batch was cancelled.",
    ),
    api.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    api.FAILED: (
        "batch_failed",
        "This request was not executed because the batch failed.",
    ),
}


async def finish(
    saver: ResultSaver,
    requests: BatchFile,
    end: str,
    file_days: int,
    errors: str | None = None,
) -> None:
    """Write the result files and move the batch to its final status.

    A batch in status cancelling is always cancelled. The files are kept for
    ``file_days`` if it sets no time. ``errors`` are its own, as JSON for its
    object.
    """
    row = await _begin_finalizing(saver, end)
    if row["status"] == api.CANCELLING:
        end = api.CANCELLED
    file_ids = await saver.until_written(lambda: _write(saver, requests, end))
    kept_s = row["output_expires_after"] or 86_400 * file_days
    await saver.save_counts()
    await saver.until_written(
        lambda: _record_end(saver.store, row, end, file_ids, kept_s, errors), quick=True
    )
    # Also a reason that the disk was too full for.
    saver.store.pause(saver.batch_id, None, api.ACTIVE_STATUSES)
    ended = saver.store.get_batch(saver.batch_id)
    if ended is not None:  # its client may have deleted it already
        batch_changed(ended)


async def _begin_finalizing(saver: ResultSaver, end: str) -> Row:
    """Make all results safe, then give the batch the status finalizing."""
    # A status that survives a power cut must not promise results that do not.
    await saver.until_written(saver.flush, quick=True)
    await saver.until_written(saver.log.commit)
    # The next server must not run the remaining lines of an expired batch.
    expired = {"expired_at": now()} if end == api.EXPIRED else {}
    await saver.until_written(
        lambda: saver.store.transition(
            saver.batch_id,
            (api.IN_PROGRESS,),
            api.FINALIZING,
            finalizing_at=now(),
            **expired,
        ),
        quick=True,
    )
    row = saver.store.get_batch(saver.batch_id)
    assert row is not None
    batch_changed(row)
    return row


def _record_end(
    store: BatchStore,
    row: Row,
    end: str,
    file_ids: dict[str, str | None],
    kept_s: int,
    errors: str | None,
) -> None:
    """Record the result files and the final status in one transaction."""
    with store.atomic():
        for name, file_id in file_ids.items():
            if file_id is not None:
                store.record_file(
                    file_id,
                    f"{row['id']}_{name}.jsonl",
                    api.BATCH_OUTPUT_PURPOSE,
                    kept_s,
                    row["owner"],
                )
        store.transition(
            row["id"],
            (api.FINALIZING, api.CANCELLING),
            end,
            output_file_id=file_ids["output"],
            error_file_id=file_ids["error"],
            errors=errors,
            paused_reason=None,
            **{f"{end}_at": now()},
        )


def _write(saver: ResultSaver, requests: BatchFile, end: str) -> dict[str, str | None]:
    """Write both files and return their ids, None for a file that would be empty."""
    batch_id = saver.batch_id

    share = None
    if end == api.COMPLETED and (row := saver.store.get_batch(batch_id)) is not None:
        share = row["enough"]

    def unrun(index: int) -> bytes:
        reason = UNRUN[end] if share is None else (GIVEN_UP, given_up_message(share))
        return unrun_line(requests[index], batch_id, *reason)

    # The same ids each time: if the server dies here, the next one overwrites these
    # files, and none is orphaned.
    ids: dict[str, str | None] = {
        name: f"file-{name}-{batch_id.removeprefix('batch_')}"
        for name in ("output", "error")
    }
    paths = {name: saver.store.file_path(str(ids[name])) for name in ids}
    with (
        atomic_write(paths["output"]) as outputs,
        atomic_write(paths["error"]) as errors,
    ):
        num_outputs, num_errors = saver.log.write_ordered(outputs, errors, unrun)
    # As at OpenAI, a file that would be empty does not exist.
    for name, count in (("output", num_outputs), ("error", num_errors)):
        if count == 0:
            paths[name].unlink()
            ids[name] = None
    return ids
