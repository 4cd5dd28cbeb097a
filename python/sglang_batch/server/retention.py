"""Removes expired and orphaned data from a store."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ..batch_api import protocol as api
from ..config import OfflineBatchConfig
from ..store.batch_store import BatchStore
from ..store.incoming import PENDING, UploadStore

logger = logging.getLogger(__name__)

# Contents without a row are being written by a call or a batch, or were left by a
# process that died. At this age, in seconds, they are orphans.
ORPHAN_S = 3600
# Seconds that the status of an upload is kept after it expired.
UPLOAD_KEPT_S = 86_400
# Seconds for which the answers to calls with an idempotency key are kept.
ANSWERS_KEPT_S = 86_400
# Seconds for which a list continues after a deleted object, its deletion can be repeated,
# and a webhook waits for a server with its endpoint.
DELETION_KEPT_S = 30 * 86_400


# How often expired files are removed.
COLLECT_EVERY_S = 60.0


def collect(store: BatchStore, config: OfflineBatchConfig, now: int) -> dict[str, int]:
    """Remove expired and orphaned data, and count it by kind.

    ``now`` is a Unix time in seconds. Deletions are records of those of long ago.
    """
    counts = {
        "files": _expired_files(store, now),
        "uploads": _expired_uploads(store, now),
        "orphans": _remove(_orphans(store, config, now)),
        "answers": _delete_old(
            store, "idempotent_answers", "created_at", now - ANSWERS_KEPT_S
        ),
        "deletions": _delete_old(store, "deleted", "deleted_at", now - DELETION_KEPT_S),
        "webhooks": _delete_old(store, "webhooks", "created_at", now - DELETION_KEPT_S),
    }
    removed = {kind: count for kind, count in counts.items() if count}
    if removed:
        shown = ", ".join(f"{count} {kind}" for kind, count in removed.items())
        logger.info("Removed expired and orphaned data: %s", shown)
    return removed


def _expired_files(store: BatchStore, now: int) -> int:
    rows = store.rows("SELECT id FROM files WHERE expires_at <= ?", (now,))
    # No call sees them any more. Contents first: on a full disk the database can only
    # be written once there is space.
    removed = _remove(store.file_path(row["id"]) for row in rows)
    with store.atomic() as db:
        db.executemany("DELETE FROM files WHERE id = ?", [(r["id"],) for r in rows])
    return removed


def _expired_uploads(store: BatchStore, now: int) -> int:
    """Drop the parts of expired uploads, and the rows of those that ended long ago."""
    uploads = UploadStore(store)
    expired = store.rows(
        "SELECT id FROM uploads WHERE status = ? AND expires_at <= ?", (PENDING, now)
    )
    _remove(uploads.directory(row["id"]) for row in expired)
    for row in expired:
        uploads.expire(row["id"])
    _delete_old(store, "uploads", "expires_at", now - UPLOAD_KEPT_S)
    return len(expired)


def _delete_old(store: BatchStore, table: str, column: str, before: int) -> int:
    with store.atomic() as db:
        query = f"DELETE FROM {table} WHERE {column} <= ?"
        return db.execute(query, (before,)).rowcount


def _orphans(store: BatchStore, config: OfflineBatchConfig, now: int) -> Iterator[Path]:
    """Paths that no row of the database names. They are listed before rows are read."""
    old = {name: _older(store.directory / name, now - ORPHAN_S) for name in _LOOKED_AT}
    yield from old["incoming"]
    files = {row["id"] for row in store.rows("SELECT id FROM files")}
    # Result files are written before they have rows. Their names contain the batch's.
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
    # The finished lines of a batch that failed through the server stay available.
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
    """Remove files and directories and return their number."""
    count = 0
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        count += 1
    return count
