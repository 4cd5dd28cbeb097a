"""Files and batches of a server: rows in SQLite, contents in plain files beside it.

::

    <directory>/
      batches.sqlite3          what the API says of files and batches
      files/<file id>          contents of uploaded and of result files
      batches/<batch id>/      a batch at work: its input and its results so far
      open.lock                held while a process opens or closes the database
      lock                     held by the server process that runs the batches

Every change of a batch's status is one transaction that names the statuses it may
come from, so two processes that race (a cancel and a completion, say) cannot both
win. The database uses write-ahead logging, which does not work on NFS.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .lock import in_turn
from .schema import migrate

Row = dict[str, Any]


def now() -> int:
    """Unix time in whole seconds, as the API gives it."""
    return int(time.time())


class BatchStore:
    """Opened by every process of a server; safe to call from any thread."""

    def __init__(self, directory: Path) -> None:
        """Open or create the store.

        Raises:
            StoreError: the directory cannot be created or written.
        """
        self.directory = directory
        try:
            for name in ("files", "batches"):
                (directory / name).mkdir(parents=True, exist_ok=True)
            with in_turn(directory / "open.lock"):
                self._db = self._open(directory / "batches.sqlite3")
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"cannot keep batches in {directory}: {error}; "
                "name a writable directory with --offline-batch-dir."
            ) from error
        self._lock = threading.RLock()

    @staticmethod
    def _open(path: Path) -> sqlite3.Connection:
        """The database with the newest schema.

        One process at a time: SQLite does not wait for its busy timeout when two
        connections switch a new database to write-ahead logging at once, it fails.
        """
        db = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=30
        )
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        migrate(db)
        return db

    def close(self) -> None:
        with self._lock, in_turn(self.directory / "open.lock"):
            self._db.close()

    @contextmanager
    def atomic(self) -> Iterator[sqlite3.Connection]:
        """One transaction; nested blocks join the outer one."""
        with self._lock:
            if self._db.in_transaction:
                yield self._db
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def file_path(self, file_id: str) -> Path:
        return self.directory / "files" / file_id

    def work_dir(self, batch_id: str) -> Path:
        return self.directory / "batches" / batch_id

    # Files ------------------------------------------------------------------

    def add_file(self, row: Row) -> None:
        """Record a file whose contents are in place at :meth:`file_path`."""
        self._insert("files", row)

    def record_file(
        self, file_id: str, filename: str, purpose: str, expires_at: int | None
    ) -> Row:
        """Make the contents at :meth:`file_path` a file of the API; returns its row."""
        row = {
            "id": file_id,
            "purpose": purpose,
            "filename": filename,
            "bytes": self.file_path(file_id).stat().st_size,
            "created_at": now(),
            "expires_at": expires_at,
        }
        self.add_file(row)
        return row

    def get_file(self, file_id: str) -> Row | None:
        return self._get("files", file_id)

    def delete_file(self, file_id: str) -> bool:
        """Forget a file and remove its contents; False if there is none."""
        with self.atomic() as db:
            deleted = db.execute("DELETE FROM files WHERE id = ?", (file_id,)).rowcount
        self.file_path(file_id).unlink(missing_ok=True)
        return deleted > 0

    def list_files(
        self, *, after: str | None, limit: int, descending: bool, purpose: str | None
    ) -> list[Row]:
        """Files in order of creation; up to ``limit`` after the one named."""
        return self._page("files", after, limit, descending, purpose=purpose)

    # Batches ----------------------------------------------------------------

    def add_batch(self, row: Row) -> None:
        self._insert("batches", row)

    def get_batch(self, batch_id: str) -> Row | None:
        return self._get("batches", batch_id)

    def list_batches(self, *, after: str | None, limit: int) -> list[Row]:
        """Batches, newest first; up to ``limit`` after the one named."""
        return self._page("batches", after, limit, descending=True)

    def batches_in(self, statuses: tuple[str, ...]) -> list[Row]:
        """Batches in one of these statuses, oldest first."""
        marks = ", ".join("?" * len(statuses))
        query = f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY seq"
        with self._lock:
            return [dict(row) for row in self._db.execute(query, statuses)]

    def update_batch(self, batch_id: str, **fields: Any) -> None:
        """Set fields that are not the status."""
        assert "status" not in fields, "use transition() to change a status"
        self._update(batch_id, fields, None)

    def transition(
        self, batch_id: str, from_statuses: tuple[str, ...], status: str, **fields: Any
    ) -> bool:
        """Move a batch to another status; False if it is in none of the first."""
        return self._update(batch_id, {"status": status, **fields}, from_statuses)

    # ------------------------------------------------------------------------

    def _update(
        self, batch_id: str, fields: Row, from_statuses: tuple[str, ...] | None
    ) -> bool:
        assignments = ", ".join(f"{name} = ?" for name in fields)
        query = f"UPDATE batches SET {assignments} WHERE id = ?"
        values = [*fields.values(), batch_id]
        if from_statuses is not None:
            query += f" AND status IN ({', '.join('?' * len(from_statuses))})"
            values += from_statuses
        with self.atomic() as db:
            return db.execute(query, values).rowcount > 0

    def _insert(self, table: str, row: Row) -> None:
        names = ", ".join(row)
        marks = ", ".join("?" * len(row))
        with self.atomic() as db:
            db.execute(
                f"INSERT INTO {table} ({names}) VALUES ({marks})", list(row.values())
            )

    def _get(self, table: str, row_id: str) -> Row | None:
        with self._lock:
            row = self._db.execute(
                f"SELECT * FROM {table} WHERE id = ?", (row_id,)
            ).fetchone()
        return None if row is None else dict(row)

    def _page(
        self,
        table: str,
        after: str | None,
        limit: int,
        descending: bool,
        purpose: str | None = None,
    ) -> list[Row]:
        conditions, values = ["1"], []
        if after is not None:
            sign = "<" if descending else ">"
            conditions.append(f"seq {sign} (SELECT seq FROM {table} WHERE id = ?)")
            values.append(after)
        if purpose is not None:
            conditions.append("purpose = ?")
            values.append(purpose)
        query = (
            f"SELECT * FROM {table} WHERE {' AND '.join(conditions)} "
            f"ORDER BY seq {'DESC' if descending else 'ASC'} LIMIT ?"
        )
        with self._lock:
            return [dict(row) for row in self._db.execute(query, [*values, limit])]
