"""The database of a store: its tables, as numbered migrations, opened even on a full disk.

SQLite reads nothing before it has created an index of its write-ahead log, of about
32 KiB. The store keeps a spare file and deletes it to make space for that, so a server
starts even if its disk is full. Deletions use the same space.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ..errors import StoreError
from .files import in_turn

DATABASE = "batches.sqlite3"
# Enough for the index and for a schema migration.
SPARE_BYTES = 256 << 10
# Pages of 4 KiB that the write-ahead log holds before they are moved to the database.
# Few, because on a full disk the spare file's space must do for moving them.
_LOG_PAGES = 24

_T = TypeVar("_T")


def open_database(directory: Path, names: Iterable[str]) -> sqlite3.Connection:
    """Open or create the database of a directory, and subdirectories of these names.

    One process at a time: when two connections switch a new database to write-ahead
    logging at once, SQLite fails instead of waiting for its busy timeout. Raises
    StoreError if the directory cannot be written, or its disk is full.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with in_turn(directory / "open.lock"):
            try:
                db = _open(directory, names)
            except (OSError, sqlite3.OperationalError):
                if not _use_spare(directory):
                    raise
                return _open(directory, names)
            _keep_spare(directory)
            return db
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"cannot keep batches in {directory}: {error}; {_room(directory)}"
            "name a writable directory with --offline-batch-dir."
        ) from error


def with_spare_space(
    db: sqlite3.Connection, directory: Path, change: Callable[[], _T]
) -> _T:
    """Make a change to the database, with the spare file's space if the disk is full.

    Not for changes that grow the database. The write-ahead log is emptied after the
    change, so the space is there again for the next one.
    """
    try:
        return change()
    except sqlite3.OperationalError:
        with in_turn(directory / "open.lock"):
            if not _use_spare(directory):
                raise
            try:
                return change()
            finally:
                with suppress(sqlite3.OperationalError):
                    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                _keep_spare(directory)


def close_database(db: sqlite3.Connection, directory: Path) -> None:
    """Close the database, and use the space that is free then for the spare file."""
    with in_turn(directory / "open.lock"):
        db.close()
        _keep_spare(directory)


def _open(directory: Path, names: Iterable[str]) -> sqlite3.Connection:
    for name in names:
        (directory / name).mkdir(exist_ok=True)
    db = sqlite3.connect(
        directory / DATABASE,
        isolation_level=None,
        check_same_thread=False,
        timeout=30,
    )
    try:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        migrate(db)
    except BaseException:
        db.close()
        raise
    return db


def _keep_spare(directory: Path) -> None:
    """Create the spare file, as large as the free space allows."""
    path = directory / "spare"
    with suppress(OSError):
        if not path.exists() or path.stat().st_size < SPARE_BYTES:
            with open(path, "wb", buffering=0) as file:
                file.write(b"\0" * SPARE_BYTES)


def _use_spare(directory: Path) -> bool:
    """Delete the spare file. False if there is none."""
    try:
        (directory / "spare").unlink()
    except OSError:
        return False
    return True


def _room(directory: Path) -> str:
    """The free space for an error message, or nothing if it is enough."""
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free >= SPARE_BYTES:
        return ""
    return f"its disk has {free} bytes left: free {SPARE_BYTES}, or "


def _added(table: str, *columns: str) -> tuple[str, ...]:
    return tuple(f"ALTER TABLE {table} ADD COLUMN {column}" for column in columns)


def _noted_when_deleted(table: str, kind: str) -> str:
    return (
        f"CREATE TRIGGER {table}_deleted AFTER DELETE ON {table} BEGIN"
        " INSERT OR REPLACE INTO deleted (id, kind, seq, owner, deleted_at) VALUES"
        f" (OLD.id, {kind}, OLD.seq, OLD.owner, CAST(strftime('%s') AS INTEGER)); END"
    )


def _counts(*names: str) -> str:
    return ", ".join(f"{name} INTEGER NOT NULL DEFAULT 0" for name in names)


_TOKENS = ("input_tokens", "cached_tokens", "output_tokens")
_COUNTS = _counts("total", "completed", "failed", *_TOKENS, "reasoning_tokens")
_USED = _counts("batches", "lines", "calls", *_TOKENS)
# The statements of each migration by its name.
MIGRATIONS: dict[str, tuple[str, ...]] = {
    # Files as clients see them, and batches with every field of the OpenAI object.
    "m001_files_and_batches": (
        """
        CREATE TABLE files (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            purpose TEXT NOT NULL,
            filename TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            created_at INTEGER NOT NULL,
            expires_at INTEGER
        )
        """,
        f"""
        CREATE TABLE batches (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            status TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            input_file_id TEXT NOT NULL,
            completion_window TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            expires_at INTEGER NOT NULL,
            metadata TEXT,
            model TEXT,
            errors TEXT,
            output_file_id TEXT,
            error_file_id TEXT,
            in_progress_at INTEGER,
            finalizing_at INTEGER,
            completed_at INTEGER,
            failed_at INTEGER,
            cancelling_at INTEGER,
            cancelled_at INTEGER,
            {_COUNTS}
        )
        """,
        "CREATE INDEX batches_by_status ON batches (status)",
    ),
    # Share of a batch's prompt tokens that a perfect prefix cache would save.
    "m002_optimal_cached_share": _added("batches", "optimal_cached_share REAL"),
    # owner: name of the API key that made it, or empty if keys have no names.
    # api: the API that made the batch, ``openai`` or ``anthropic``.
    # output_expires_after: seconds that its result files are kept, NULL for the default.
    # paused_reason: why a batch in progress is paused, or NULL if it is not.
    # line_errors: JSON object, number of error lines by their code.
    "m003_service": (
        *_added(
            "batches",
            "owner TEXT NOT NULL DEFAULT ''",
            "api TEXT NOT NULL DEFAULT 'openai'",
            "priority INTEGER NOT NULL DEFAULT 0",
            "expired_at INTEGER",
            "output_expires_after INTEGER",
            "paused_reason TEXT",
            "line_errors TEXT",
        ),
        *_added("files", "owner TEXT NOT NULL DEFAULT ''"),
        """
        CREATE TABLE uploads (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            owner TEXT NOT NULL DEFAULT '',
            status TEXT NOT NULL,
            purpose TEXT NOT NULL,
            filename TEXT NOT NULL,
            mime_type TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            created_at INTEGER NOT NULL,
            expires_at INTEGER NOT NULL,
            file_expires_after INTEGER,
            file_id TEXT
        )
        """,
        """
        CREATE TABLE upload_parts (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            upload_id TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            created_at INTEGER NOT NULL
        )
        """,
        """
        CREATE TABLE idempotent_answers (
            owner TEXT NOT NULL,
            key TEXT NOT NULL,
            request_sha256 TEXT NOT NULL,
            status_code INTEGER NOT NULL,
            body BLOB NOT NULL,
            created_at INTEGER NOT NULL,
            PRIMARY KEY (owner, key)
        )
        """,
    ),
    # JSON list of the reasons of error lines: code, message and number of lines.
    "m004_error_reasons": _added("batches", "error_reasons TEXT"),
    # clients.models: JSON list of names, NULL for all.
    # clients.batches, lines, tokens: limits for a day, NULL for none.
    # usage.day: UTC, such as 2026-11-23.
    "m005_keys": (
        """
        CREATE TABLE clients (
            name TEXT PRIMARY KEY,
            role TEXT NOT NULL,
            models TEXT,
            batches INTEGER,
            lines INTEGER,
            tokens INTEGER
        )
        """,
        """
        CREATE TABLE keys (
            id TEXT NOT NULL UNIQUE,
            name TEXT NOT NULL REFERENCES clients,
            sha256 BLOB NOT NULL UNIQUE,
            hint TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            revoked_at INTEGER
        )
        """,
        f"""
        CREATE TABLE usage (
            day TEXT NOT NULL,
            name TEXT NOT NULL,
            {_USED},
            PRIMARY KEY (day, name)
        )
        """,
    ),
    # dedupe: the batch's own setting, NULL for the server's.
    # enough: the share of answers after which the batch ends, NULL for all.
    # merged: lines that got the answer of an equal one, ``merged_*`` their tokens.
    # engine_s: seconds of the engine, divided by the work that was done.
    "m006_costs": (
        *_added(
            "batches",
            "dedupe TEXT",
            "enough REAL",
            "merged INTEGER NOT NULL DEFAULT 0",
            "merged_input_tokens INTEGER NOT NULL DEFAULT 0",
            "merged_cached_tokens INTEGER NOT NULL DEFAULT 0",
            "merged_output_tokens INTEGER NOT NULL DEFAULT 0",
            "engine_s REAL NOT NULL DEFAULT 0",
        ),
        *_added(
            "usage",
            "merged_tokens INTEGER NOT NULL DEFAULT 0",
            "engine_s REAL NOT NULL DEFAULT 0",
        ),
    ),
    # deleted: lists continue after them, and a repeated deletion has the same answer.
    # deleted.kind: ``files``, or the API of a batch.
    # uploads.completed_with: JSON of the parts and the checksum of the call, NULL if not yet.
    "m007_deleted": (
        """
        CREATE TABLE deleted (
            id TEXT PRIMARY KEY,
            kind TEXT NOT NULL,
            seq INTEGER NOT NULL,
            owner TEXT NOT NULL,
            deleted_at INTEGER NOT NULL
        )
        """,
        _noted_when_deleted("files", "'files'"),
        _noted_when_deleted("batches", "OLD.api"),
        *_added("uploads", "completed_with TEXT"),
    ),
    # Answers of a batch that ended at their limit of tokens.
    "m008_truncated": _added("batches", "truncated INTEGER NOT NULL DEFAULT 0"),
    # endpoint: SHA-256 of its name and URL, which may contain a secret.
    # attempts: how many have begun. due_at: Unix time of the next one.
    "m009_webhooks": (
        """
        CREATE TABLE webhooks (
            id TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            type TEXT NOT NULL,
            batch_id TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            attempts INTEGER NOT NULL DEFAULT 0,
            due_at REAL NOT NULL,
            PRIMARY KEY (endpoint, id)
        )
        """,
    ),
}


def migrate(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY)")
        done = {name for (name,) in db.execute("SELECT name FROM migrations")}
        for name, statements in MIGRATIONS.items():
            if name not in done:
                for statement in statements:
                    db.execute(statement)
                db.execute("INSERT INTO migrations VALUES (?)", (name,))
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
