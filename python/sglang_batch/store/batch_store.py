"""Files and batches of a server: rows in SQLite, contents in plain files beside it.

::

    <directory>/
      batches.sqlite3          what the API says of files and batches
      files/<file id>          contents of uploaded and of result files
      uploads/<upload id>/     parts of an upload that is not a file yet
      incoming/                bodies of calls that are still being received
      keys/                    held while a call with an idempotency key is executed
      batches/<batch id>/      a batch at work: its input and its results so far
      spare                    room to open the database in when the disk is full
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .database import close_database, open_database

Row = dict[str, Any]
# Called with a row in the transaction that makes it; if it raises, nothing is made.
OnMade = Callable[[Row], None]

DIRECTORIES = ("files", "batches", "uploads", "incoming", "keys")
# A file past its time is gone at once; its bytes go when somebody collects them.
_NOT_EXPIRED = "(expires_at IS NULL OR expires_at > ?)"


def now() -> int:
    """Unix time in whole seconds, as the API gives it."""
    return int(time.time())


class BatchStore:
    """Opened by every process of a server; safe to call from any thread."""

    def __init__(self, directory: Path) -> None:
        """Open or create the store; raises StoreError where that cannot be."""
        self.directory = directory
        self._db = open_database(directory, DIRECTORIES)
        self._lock = threading.RLock()
        self._paused: dict[str, str | None] = {}

    def close(self) -> None:
        with self._lock:
            close_database(self._db, self.directory)

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

    def rows(self, query: str, values: Iterable[Any] = ()) -> list[Row]:
        """What a query finds."""
        with self._lock:
            found = [dict(row) for row in self._db.execute(query, list(values))]
        if self._paused:
            for row in found:
                if row.get("id") in self._paused:
                    row["paused_reason"] = self._paused[row["id"]]
        return found

    @property
    def incoming(self) -> Path:
        """Where bodies of calls are put while they are received."""
        return self.directory / "incoming"

    def file_path(self, file_id: str) -> Path:
        return self.directory / "files" / file_id

    def work_dir(self, batch_id: str) -> Path:
        return self.directory / "batches" / batch_id

    def bytes_stored(self) -> int:
        """Bytes of all files, of parts of uploads and of results not finished."""
        [row] = self.rows(
            "SELECT (SELECT COALESCE(SUM(bytes), 0) FROM files)"
            " + (SELECT COALESCE(SUM(bytes), 0) FROM upload_parts) AS total"
        )
        results = 0
        for path in self.directory.glob("batches/*/results.jsonl"):
            with suppress(FileNotFoundError):
                results += path.stat().st_size
        return int(row["total"]) + results

    # Files ------------------------------------------------------------------

    def add_file(self, row: Row) -> None:
        """Record a file whose contents are in place at :meth:`file_path`."""
        self._insert("files", row)

    def record_file(
        self,
        file_id: str,
        filename: str,
        purpose: str,
        expires_at: int | None,
        owner: str = "",
    ) -> Row:
        """Make the contents at :meth:`file_path` a file of the API; returns its row."""
        row = {
            "id": file_id,
            "purpose": purpose,
            "filename": filename,
            "bytes": self.file_path(file_id).stat().st_size,
            "created_at": now(),
            "expires_at": expires_at,
            "owner": owner,
        }
        self.add_file(row)
        return row

    def get_file(self, file_id: str, owner: str | None = None) -> Row | None:
        """A file that has not expired; of this owner, where one is named."""
        row = self._get("files", file_id, owner)
        if row is None:
            return None
        expires_at = row["expires_at"]
        return row if expires_at is None or expires_at > now() else None

    def delete_file(self, file_id: str, owner: str | None = None) -> bool:
        """Forget a file and remove its contents; False if there is none."""
        # The id, a client's, names something of the store only if there is a row of it.
        if self.get_file(file_id, owner) is None:
            return False
        try:
            deleted = self._forget_file(file_id)
        except sqlite3.OperationalError:
            # A disk that is too full to write down what is to make room on it.
            self.file_path(file_id).unlink(missing_ok=True)
            deleted = self._forget_file(file_id)
        self.file_path(file_id).unlink(missing_ok=True)
        return deleted

    def _forget_file(self, file_id: str) -> bool:
        with self.atomic() as db:
            query = "DELETE FROM files WHERE id = ?"
            return db.execute(query, (file_id,)).rowcount > 0

    def list_files(
        self,
        *,
        after: str | None,
        limit: int,
        descending: bool,
        purpose: str | None,
        owner: str | None = None,
    ) -> list[Row]:
        """Files in order of creation; up to ``limit`` after the one named."""
        return self._page(
            "files",
            after,
            limit,
            descending,
            {"purpose = ?": purpose, "owner = ?": owner, _NOT_EXPIRED: now()},
        )

    # Batches ----------------------------------------------------------------

    def add_batch(self, row: Row) -> None:
        self._insert("batches", row)

    def get_batch(self, batch_id: str, owner: str | None = None) -> Row | None:
        """A batch; of this owner, where one is named."""
        return self._get("batches", batch_id, owner)

    def list_batches(
        self,
        *,
        after: str | None,
        limit: int,
        owner: str | None = None,
        api: str | None = None,
        before: str | None = None,
    ) -> list[Row]:
        """Batches, newest first; up to ``limit`` after the one named, or before it."""
        mine = {"owner = ?": owner, "api = ?": api}
        if before is not None:
            return self._page("batches", before, limit, False, mine)[::-1]
        return self._page("batches", after, limit, True, mine)

    def delete_batch(self, batch_id: str, statuses: tuple[str, ...]) -> bool:
        """Forget a batch in one of these statuses; False if it is not. Files stay."""
        marks = ", ".join("?" * len(statuses))
        query = f"DELETE FROM batches WHERE id = ? AND status IN ({marks})"
        with self.atomic() as db:
            return db.execute(query, (batch_id, *statuses)).rowcount > 0

    def find_batch(self, since: int, fields: Row) -> Row | None:
        """The newest batch made at ``since`` or later with exactly these fields."""
        same = "".join(f" AND {name} IS ?" for name in fields)
        found = self.rows(
            f"SELECT * FROM batches WHERE created_at >= ?{same} ORDER BY seq DESC LIMIT 1",
            [since, *fields.values()],
        )
        return found[0] if found else None

    def batches_in(self, statuses: tuple[str, ...]) -> list[Row]:
        """Batches in one of these statuses, oldest first."""
        marks = ", ".join("?" * len(statuses))
        return self.rows(
            f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY seq", statuses
        )

    def update_batch(self, batch_id: str, **fields: Any) -> None:
        """Set fields that are not the status."""
        assert "status" not in fields, "use transition() to change a status"
        self._update(batch_id, fields, None)

    def pause(self, batch_id: str, reason: str | None) -> None:
        """Say why a batch does not go on; None if it does.

        Known in this process even where the disk is too full to write it down.
        """
        self._paused[batch_id] = reason
        with suppress(sqlite3.OperationalError):
            self.update_batch(batch_id, paused_reason=reason)
            del self._paused[batch_id]

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

    def _get(self, table: str, row_id: str, owner: str | None) -> Row | None:
        found = self.rows(
            f"SELECT * FROM {table} WHERE id = ? AND owner = COALESCE(?, owner)",
            (row_id, owner),
        )
        return found[0] if found else None

    def _page(
        self,
        table: str,
        after: str | None,
        limit: int,
        descending: bool,
        conditions: dict[str, Any],
    ) -> list[Row]:
        sign = "<" if descending else ">"
        after_it = f"seq {sign} (SELECT seq FROM {table} WHERE id = ?)"
        asked = {
            condition: value
            for condition, value in {after_it: after, **conditions}.items()
            if value is not None
        }
        query = (
            f"SELECT * FROM {table} WHERE {' AND '.join(asked) or '1'} "
            f"ORDER BY seq {'DESC' if descending else 'ASC'} LIMIT ?"
        )
        return self.rows(query, [*asked.values(), limit])
