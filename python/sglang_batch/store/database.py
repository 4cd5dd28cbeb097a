"""The database of a store: its tables, by the scripts in ``migrations/``, opened even on a full disk.

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
    StoreError if the directory cannot be written, its disk is full, or a newer release
    has made the database.
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


def _statements(script: str) -> tuple[str, ...]:
    found, statement = [], ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            found.append(statement)
            statement = ""
    return tuple(found)


# The statements of each migration by its name.
MIGRATIONS: dict[str, tuple[str, ...]] = {
    path.stem: _statements(path.read_text())
    for path in sorted(Path(__file__).with_name("migrations").glob("*.sql"))
}


def known_migrations(db: sqlite3.Connection) -> set[str]:
    """The migrations that a database has. Raises StoreError if a newer release made it."""
    done = {name for (name,) in db.execute("SELECT name FROM migrations")}
    if newer := done - MIGRATIONS.keys():
        said = "of a newer release of sglang-batch, to install instead: it has"
        raise StoreError(f"the database is {said} {min(newer)}")
    return done


def migrate(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY)")
        done = known_migrations(db)
        for name, statements in MIGRATIONS.items():
            if name not in done:
                for statement in statements:
                    db.execute(statement)
                db.execute("INSERT INTO migrations VALUES (?)", (name,))
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
