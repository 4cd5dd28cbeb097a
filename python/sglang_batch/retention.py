"""What a store need not keep any longer."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from .batch_api import protocol as api
from .config import OfflineBatchConfig
from .store.answers import KEPT_S
from .store.batch_store import BatchStore
from .store.uploads import PENDING, UploadStore

logger = logging.getLogger(__name__)

# Contents without a row are what a call or a batch is writing at this moment, or what
# a process left that died; after so long they are the latter.
ORPHAN_S = 3600
# How long an upload that has ended is known by its status.
UPLOAD_KEPT_S = 86_400


@dataclass(frozen=True, slots=True)
class Collected:
    """Numbers of things that were removed.

    files: expired files, rows and contents.
    uploads: uploads that expired, with their parts.
    answers: answers that were kept for idempotency keys.
    orphans: files and directories that belong to nothing.
    """

    files: int = 0
    uploads: int = 0
    answers: int = 0
    orphans: int = 0

    def __bool__(self) -> bool:
        return any(asdict(self).values())


def collect(store: BatchStore, config: OfflineBatchConfig, now: int) -> Collected:
    """Remove what has expired and what belongs to nothing; call it now and then.

    Args:
        now: Unix time in seconds.
    """
    collected = Collected(
        files=_expired_files(store, now),
        uploads=_expired_uploads(store, now),
        orphans=_remove(_orphans(store, config, now)),
        answers=_old_answers(store, now),
    )
    if collected:
        counts = ", ".join(f"{n} {name}" for name, n in asdict(collected).items() if n)
        logger.info("Removed what is kept no longer: %s", counts)
    return collected


def _expired_files(store: BatchStore, now: int) -> int:
    rows = store.rows("SELECT id FROM files WHERE expires_at <= ?", (now,))
    # No call sees them any more. Contents first: a disk may be too full for the rest.
    removed = _remove(store.file_path(row["id"]) for row in rows)
    with store.atomic() as db:
        db.executemany("DELETE FROM files WHERE id = ?", [(r["id"],) for r in rows])
    return removed


def _expired_uploads(store: BatchStore, now: int) -> int:
    """Drop the parts of uploads that expired, and in the end what ended long ago."""
    uploads = UploadStore(store)
    expired = store.rows(
        "SELECT id FROM uploads WHERE status = ? AND expires_at <= ?", (PENDING, now)
    )
    _remove(uploads.directory(row["id"]) for row in expired)
    for row in expired:
        uploads.expire(row["id"], now)
    with store.atomic() as db:
        db.execute("DELETE FROM uploads WHERE expires_at <= ?", (now - UPLOAD_KEPT_S,))
    return len(expired)


def _old_answers(store: BatchStore, now: int) -> int:
    with store.atomic() as db:
        query = "DELETE FROM idempotent_answers WHERE created_at <= ?"
        return db.execute(query, (now - KEPT_S,)).rowcount


def _orphans(store: BatchStore, config: OfflineBatchConfig, now: int) -> Iterator[Path]:
    """What no row of the database names. The disk is looked at before the rows."""
    old = {name: _older(store.directory / name, now - ORPHAN_S) for name in _LOOKED_AT}
    yield from old["incoming"]
    files = {row["id"] for row in store.rows("SELECT id FROM files")}
    # Result files are written before they have rows; their names hold the batch's.
    active = [
        row["id"].removeprefix("batch_")
        for row in store.batches_in(api.ACTIVE_STATUSES)
    ]
    for path in old["files"]:
        if path.name not in files and not any(name in path.name for name in active):
            yield path
    pending = store.rows("SELECT id FROM uploads WHERE status = ?", (PENDING,))
    uploads = {row["id"] for row in pending}
    yield from (path for path in old["uploads"] if path.name not in uploads)
    # What a batch had finished that failed for the server's fault can be looked at.
    kept = store.rows(
        "SELECT id FROM batches WHERE status NOT IN (?, ?, ?)"
        " AND COALESCE(failed_at, ?) > ?",
        (
            api.COMPLETED,
            api.CANCELLED,
            api.EXPIRED,
            now,
            now - config.file_days * 86_400,
        ),
    )
    at_work = {row["id"] for row in kept}
    yield from (path for path in old["batches"] if path.name not in at_work)


_LOOKED_AT = ("incoming", "files", "uploads", "batches")


def _older(directory: Path, time_s: float) -> list[Path]:
    found = []
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_mtime <= time_s:
                found.append(path)
    return found


def _remove(paths: Iterable[Path]) -> int:
    """Remove files and directories; returns how many of them there were."""
    count = 0
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        count += 1
    return count
