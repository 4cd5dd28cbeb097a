"""Uploads in parts: rows in the database, each part a plain file of its own.

::

    pending -> completed       its parts became one file
       |---> cancelled
       +---> expired           an hour after it was made

A pending upload past its time is shown as expired even before its row is updated.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from .batch_store import BatchStore, OnMade, Row, now
from .files import move_into_place, sync_file
from .incoming import IncomingFile

PENDING = "pending"
COMPLETED = "completed"
CANCELLED = "cancelled"
EXPIRED = "expired"

LIFETIME_S = 3600
_CHUNK = 1 << 20


class UploadStore:
    """The uploads of a store."""

    def __init__(self, store: BatchStore) -> None:
        self.store = store

    def directory(self, upload_id: str) -> Path:
        """The directory of an upload's parts. It exists once it has a part."""
        return self.store.directory / "uploads" / upload_id

    def add(self, row: Row) -> None:
        """Record a new upload, pending and without parts."""
        row = {**row, "status": PENDING, "expires_at": row["created_at"] + LIFETIME_S}
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        with self.store.atomic() as db:
            db.execute(
                f"INSERT INTO uploads ({names}) VALUES ({marks})", list(row.values())
            )

    def get(self, upload_id: str, owner: str | None = None) -> Row | None:
        """An upload as it is now, of this owner if one is named."""
        found = self.store.rows(
            "SELECT * FROM uploads WHERE id = ? AND owner = COALESCE(?, owner)",
            (upload_id, owner),
        )
        if not found:
            return None
        row = found[0]
        if row["status"] == PENDING and row["expires_at"] <= now():
            row["status"] = EXPIRED
        return row

    def parts(self, upload_id: str) -> dict[str, Row]:
        """The parts of an upload by id, in order of arrival."""
        rows = self.store.rows(
            "SELECT * FROM upload_parts WHERE upload_id = ? ORDER BY seq", (upload_id,)
        )
        return {row["id"]: row for row in rows}

    def add_part(
        self,
        upload_id: str,
        part_id: str,
        source: Path,
        check: Callable[[], None],
        on_made: OnMade | None = None,
    ) -> Row | None:
        """Move a received file to the parts of an upload.

        Args:
            source: in ``incoming/``.
            check: called in the transaction that adds the part. May raise.
            on_made: see :data:`OnMade`.

        Returns:
            The part's row, or None if the upload is no longer pending.
        """
        num_bytes = source.stat().st_size
        path = self.directory(upload_id) / part_id
        path.parent.mkdir(exist_ok=True)
        sync_file(source)
        row = {
            "id": part_id,
            "upload_id": upload_id,
            "bytes": num_bytes,
            "created_at": now(),
        }
        added = False
        try:
            with self.store.atomic() as db:
                if not self._pending(upload_id):
                    return None
                check()
                move_into_place(source, path)
                db.execute(
                    "INSERT INTO upload_parts (id, upload_id, bytes, created_at)"
                    " VALUES (:id, :upload_id, :bytes, :created_at)",
                    row,
                )
                if on_made is not None:
                    on_made(row)
            added = True
        finally:
            if not added:
                path.unlink(missing_ok=True)
        return row

    def assemble(
        self, upload_id: str, part_ids: Iterable[str], whole: IncomingFile
    ) -> str:
        """Concatenate parts into a file and return its MD5 in hexadecimal.

        Raises:
            FileNotFoundError: the parts were removed meanwhile.
        """
        digest = hashlib.md5(usedforsecurity=False)
        for part_id in part_ids:
            with open(self.directory(upload_id) / part_id, "rb") as part:
                while data := part.read(_CHUNK):
                    digest.update(data)
                    whole.write(data)
        whole.close()
        return digest.hexdigest()

    def complete(
        self,
        upload_id: str,
        source: Path,
        file_id: str,
        kept_s: int | None,
        completed_with: str,
        on_made: OnMade,
    ) -> bool:
        """Make the assembled contents a file. False if it is no longer pending.

        The file and the status change in one transaction. If the server dies before
        that, the upload is still pending and can be completed again.

        Args:
            source: the contents, in ``incoming/``.
            kept_s: seconds until the file expires, None for never.
            completed_with: tells this call from others that would complete the upload.
            on_made: called with the file's row, see :data:`OnMade`.
        """
        sync_file(source)
        with self.store.atomic() as db:
            if not self._pending(upload_id):
                return False
            upload = self.get(upload_id)
            assert upload is not None
            move_into_place(source, self.store.file_path(file_id))
            file = self.store.record_file(
                file_id,
                upload["filename"],
                upload["purpose"],
                kept_s,
                upload["owner"],
            )
            db.execute(
                "UPDATE uploads SET status = ?, file_id = ?, completed_with = ?"
                " WHERE id = ?",
                (COMPLETED, file_id, completed_with, upload_id),
            )
            on_made(file)
        self.remove_parts(upload_id)
        return True

    def cancel(self, upload_id: str) -> bool:
        """Cancel an upload and delete its parts. False if it is not pending."""
        with self.store.atomic() as db:
            if not self._pending(upload_id):
                return False
            db.execute(
                "UPDATE uploads SET status = ? WHERE id = ?", (CANCELLED, upload_id)
            )
        self.remove_parts(upload_id)
        return True

    def expire(self, upload_id: str, at: int) -> None:
        """Record that an upload has expired, and delete its parts."""
        with self.store.atomic() as db:
            db.execute(
                "UPDATE uploads SET status = ?"
                " WHERE id = ? AND status = ? AND expires_at <= ?",
                (EXPIRED, upload_id, PENDING, at),
            )
        self.remove_parts(upload_id)

    def remove_parts(self, upload_id: str) -> None:
        """Delete the parts of an upload."""
        with self.store.atomic() as db:
            db.execute("DELETE FROM upload_parts WHERE upload_id = ?", (upload_id,))
        shutil.rmtree(self.directory(upload_id), ignore_errors=True)

    def _pending(self, upload_id: str) -> bool:
        row = self.get(upload_id)
        return row is not None and row["status"] == PENDING
