"""Files and batches of a server: rows in SQLite, contents in plain files.

::

    <directory>/
      batches.sqlite3          the fields of files and batches
      files/<file id>          contents of uploaded and of result files
      uploads/<upload id>/     parts of an upload that is not a file yet
      incoming/                bodies of calls that are still being received
      keys/                    held while a call with an idempotency key is executed
      batches/<batch id>/      an active batch: its input and its results so far
      spare                    space to open the database with when the disk is full
      open.lock                held while a process opens or closes the database
      lock                     held by the server process that runs the batches

A batch changes its status in one transaction that names the allowed earlier statuses,
so two processes that race (a cancellation and a completion, say) cannot both win. The
database uses write-ahead logging, which does not work on NFS.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .database import close_database, open_database, with_spare_space

Row = dict[str, Any]
# Called with a row in the transaction that inserts it, which is rolled back if it raises.
OnMade = Callable[[Row], None]
# Executes a query with its values and returns the rows, see :meth:`BatchStore.rows`.
Query = Callable[[str, Iterable[Any]], list[Row]]

DIRECTORIES = ("files", "batches", "uploads", "incoming", "keys")
# An expired file is invisible at once. Its bytes are removed later.
_NOT_EXPIRED = "(expires_at IS NULL OR expires_at > ?)"
_DELETED = "FROM deleted WHERE id = ? AND kind = ? AND owner = COALESCE(?, owner)"


def now() -> int:
    """Unix time in whole seconds, as the API gives it."""
    return int(time.time())


def _containing(text: str) -> str:
    """The pattern of LIKE, with ! as the escape, for values that contain ``text``."""
    for special in "!%_":
        text = text.replace(special, f"!{special}")
    return f"%{text}%"


class BatchStore:
    """The store of one directory, for every process and thread of a server."""

    def __init__(self, directory: Path) -> None:
        """Open or create the store. Raises StoreError if that is not possible."""
        self.directory = directory
        self._db = open_database(directory, DIRECTORIES)
        self._lock = threading.RLock()
        self._paused: dict[str, str | None] = {}
        # Called with a batch and its new status, in the transaction that changes it.
        self.on_status: Callable[[str, str], None] | None = None

    def close(self) -> None:
        with self._lock:
            close_database(self._db, self.directory)

    @contextmanager
    def atomic(self) -> Iterator[sqlite3.Connection]:
        """A block that is one transaction. Nested blocks join the outer one."""
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
        with self._lock:
            found = [dict(row) for row in self._db.execute(query, list(values))]
        if self._paused:
            for row in found:
                if row.get("id") in self._paused:
                    row["paused_reason"] = self._paused[row["id"]]
        return found

    @property
    def incoming(self) -> Path:
        """The directory for bodies of calls while they are received."""
        return self.directory / "incoming"

    def file_path(self, file_id: str) -> Path:
        return self.directory / "files" / file_id

    def work_dir(self, batch_id: str) -> Path:
        return self.directory / "batches" / batch_id

    def bytes_stored(self) -> int:
        """Bytes of files, parts, results so far, and inputs whose file was deleted."""
        [row] = self.rows(
            "SELECT (SELECT COALESCE(SUM(bytes), 0) FROM files)"
            " + (SELECT COALESCE(SUM(bytes), 0) FROM upload_parts) AS total"
        )
        kept = 0
        for path in self.directory.glob("batches/*/*.jsonl"):
            with suppress(FileNotFoundError):
                found = path.stat()
                # An input is a hard link to its file, while that exists.
                if path.name == "results.jsonl" or found.st_nlink == 1:
                    kept += found.st_size
        return int(row["total"]) + kept

    def record_file(
        self,
        file_id: str,
        filename: str,
        purpose: str,
        kept_s: int | None,
        owner: str = "",
    ) -> Row:
        """Record the contents at :meth:`file_path` as a file, for ``kept_s`` seconds."""
        created_at = now()
        row = {
            "id": file_id,
            "purpose": purpose,
            "filename": filename,
            "bytes": self.file_path(file_id).stat().st_size,
            "created_at": created_at,
            "expires_at": None if kept_s is None else created_at + kept_s,
            "owner": owner,
        }
        self.insert("files", row)
        return row

    def get_file(self, file_id: str, owner: str | None = None) -> Row | None:
        """A file that has not expired, of this owner if one is named."""
        row = self.get_row("files", file_id, owner)
        if row is None:
            return None
        expires_at = row["expires_at"]
        return row if expires_at is None or expires_at > now() else None

    def delete_file(self, file_id: str, owner: str | None = None) -> bool:
        """Delete a file and its contents. False if there is none."""
        # The id comes from a client: it is a path only if it names a file of the store.
        if self.get_row("files", file_id, owner) is None:
            return False
        deleted = self.forget("DELETE FROM files WHERE id = ?", (file_id,))
        self.file_path(file_id).unlink(missing_ok=True)
        return deleted

    def forget(self, query: str, values: tuple[str, ...]) -> bool:
        """Delete rows, even on a full disk. False if there were none."""

        def forget() -> bool:
            with self.atomic() as db:
                return db.execute(query, values).rowcount > 0

        with self._lock:
            if self._db.in_transaction:
                return forget()
            return with_spare_space(self._db, self.directory, forget)

    def was_deleted(self, row_id: str, kind: str, owner: str | None = None) -> bool:
        """Whether a file or batch was there. ``kind``: ``files`` or the batch's API."""
        return bool(self.rows(f"SELECT 1 {_DELETED}", (row_id, kind, owner)))

    def place(self, row_id: str, kind: str, owner: str | None = None) -> int | None:
        """The place at which a list continues after a file or batch, even a deleted one, or None."""
        table, own = ("files", "") if kind == "files" else ("batches", " AND api = ?")
        found = self.rows(
            f"SELECT seq FROM {table} WHERE id = ? AND owner = COALESCE(?, owner){own}"
            f" UNION ALL SELECT seq {_DELETED}",
            [row_id, owner, *[kind] * bool(own), row_id, kind, owner],
        )
        return found[0]["seq"] if found else None

    def list_files(
        self,
        *,
        after: int | None,
        limit: int,
        descending: bool,
        purpose: str | None,
        owner: str | None = None,
    ) -> list[Row]:
        """Up to ``limit`` files in order of creation, after this :meth:`place`."""
        return self._page(
            "files",
            after,
            limit,
            descending,
            {"purpose = ?": purpose, "owner = ?": owner, _NOT_EXPIRED: now()},
        )

    def get_batch(self, batch_id: str, owner: str | None = None) -> Row | None:
        return self.get_row("batches", batch_id, owner)

    def list_batches(
        self,
        *,
        after: int | None,
        limit: int,
        owner: str | None = None,
        api: str | None = None,
        before: int | None = None,
    ) -> list[Row]:
        """Up to ``limit`` batches, newest first, after or before this :meth:`place`."""
        mine = {"owner = ?": owner, "api = ?": api}
        if before is not None:
            return self._page("batches", before, limit, False, mine)[::-1]
        return self._page("batches", after, limit, True, mine)

    def search_batches(
        self, text: str, *, limit: int, owner: str | None = None
    ) -> list[Row]:
        """Up to ``limit`` batches, newest first, that contain ``text``.

        Their ids, those of their files, names of input files, models,
        endpoints, metadata and errors are searched. ASCII letters match in
        either case.
        """
        plain = ("b.id", "b.input_file_id", "b.output_file_id", "b.error_file_id",
                 "b.model", "b.endpoint", "f.filename")  # fmt: skip
        # JSON has its own way to write characters beyond ASCII.
        as_json = ("b.metadata", "b.errors", "b.error_reasons")
        found = " OR ".join(f"{name} LIKE ? ESCAPE '!'" for name in (*plain, *as_json))
        return self.rows(
            "SELECT b.* FROM batches b"
            # A batch may name a file of another client, on which it fails.
            " LEFT JOIN files f ON f.id = b.input_file_id AND f.owner = b.owner "
            f"WHERE b.owner = COALESCE(?, b.owner) AND ({found}) "
            "ORDER BY b.seq DESC LIMIT ?",
            [
                owner,
                *[_containing(text)] * len(plain),
                *[_containing(json.dumps(text)[1:-1])] * len(as_json),
                limit,
            ],
        )

    def delete_batch(
        self, batch_id: str, statuses: tuple[str, ...], file_ids: Iterable[str] = ()
    ) -> bool:
        """Delete a batch if it is in one of these statuses, and these files with it."""
        marks = ", ".join("?" * len(statuses))
        query = f"DELETE FROM batches WHERE id = ? AND status IN ({marks})"
        if not self.forget(query, (batch_id, *statuses)):
            return False
        for file_id in file_ids:
            self.delete_file(file_id)
        # The finished lines of a batch that failed through the server.
        shutil.rmtree(self.work_dir(batch_id), ignore_errors=True)
        return True

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

    def changed_batches(
        self, statuses: tuple[str, ...], newest: int | None, seqs: Iterable[int]
    ) -> tuple[list[Row], int]:
        """Batches in these statuses, of ``seqs``, and newer than ``newest``, oldest first.

        Without ``newest``, none are newer. Also returns the newest ``seq``.
        """
        if newest is None:
            [found] = self.rows("SELECT coalesce(max(seq), 0) AS seq FROM batches")
            newest = int(found["seq"])
        marks = ", ".join("?" * len(statuses))
        rows = self.rows(
            f"SELECT * FROM batches WHERE status IN ({marks}) OR seq > ? "
            f"OR seq IN ({', '.join(map(str, seqs))}) ORDER BY seq",
            (*statuses, newest),
        )
        # Of these rows: a batch created meanwhile is among the next.
        return rows, max([newest, *(row["seq"] for row in rows)])

    def update_batch(self, batch_id: str, **fields: Any) -> None:
        """Set fields that are not the status."""
        assert "status" not in fields, "use transition() to change a status"
        self.update("batches", batch_id, fields)

    def pause(
        self, batch_id: str, reason: str | None, statuses: tuple[str, ...]
    ) -> None:
        """Set the reason for which a batch in one of these statuses is paused, or clear it.

        If the disk is too full to write it, this process still returns it.
        """
        self._paused[batch_id] = reason
        with suppress(sqlite3.OperationalError):
            self.update("batches", batch_id, {"paused_reason": reason}, statuses)
            self._paused.pop(batch_id, None)

    def transition(
        self, batch_id: str, from_statuses: tuple[str, ...], status: str, **fields: Any
    ) -> bool:
        """Move a batch to another status. False if it is in none of the first ones."""
        fields["status"] = status
        with self.atomic():
            moved = self.update("batches", batch_id, fields, from_statuses)
            if moved and self.on_status is not None:
                self.on_status(batch_id, status)
        return moved

    def update(
        self,
        table: str,
        row_id: str,
        fields: Row,
        from_statuses: tuple[str, ...] | None = None,
    ) -> bool:
        """Set fields of a row, if it is in one of these statuses. False if it is not."""
        assignments = ", ".join(f"{name} = ?" for name in fields)
        query = f"UPDATE {table} SET {assignments} WHERE id = ?"
        values = [*fields.values(), row_id]
        if from_statuses is not None:
            query += f" AND status IN ({', '.join('?' * len(from_statuses))})"
            values += from_statuses
        with self.atomic() as db:
            return db.execute(query, values).rowcount > 0

    def insert(self, table: str, row: Row) -> None:
        names = ", ".join(row)
        marks = ", ".join("?" * len(row))
        with self.atomic() as db:
            db.execute(
                f"INSERT INTO {table} ({names}) VALUES ({marks})", list(row.values())
            )

    def get_row(self, table: str, row_id: str, owner: str | None = None) -> Row | None:
        """The row of a table with this id, of this owner if one is named."""
        found = self.rows(
            f"SELECT * FROM {table} WHERE id = ? AND owner = COALESCE(?, owner)",
            (row_id, owner),
        )
        return found[0] if found else None

    def _page(
        self,
        table: str,
        after: int | None,
        limit: int,
        descending: bool,
        conditions: dict[str, Any],
    ) -> list[Row]:
        sign = "<" if descending else ">"
        after_it = f"seq {sign} ?"
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
