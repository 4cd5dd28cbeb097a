"""The database of a store: opened with the newest schema, also on a full disk.

SQLite reads nothing before it has made an index of its write-ahead log, some 32 KiB. So
that a server starts whose disk is full, the store keeps a spare file, which gives up its
room for that.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..errors import StoreError
from .lock import in_turn
from .schema import migrate

# Enough for the index, and for a new schema on top.
SPARE_BYTES = 256 << 10


def open_database(directory: Path, names: Iterable[str]) -> sqlite3.Connection:
    """Open or create the database of a directory.

    One process at a time: SQLite does not wait for its busy timeout when two
    connections switch a new database to write-ahead logging at once, it fails.

    Args:
        names: directories in it that are made, too.

    Raises:
        StoreError: the directory cannot be made or written, or has no room.
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


def close_database(db: sqlite3.Connection, directory: Path) -> None:
    """Close it; what SQLite needed beside it is spare again."""
    with in_turn(directory / "open.lock"):
        db.close()
        _keep_spare(directory)


def _open(directory: Path, names: Iterable[str]) -> sqlite3.Connection:
    for name in names:
        (directory / name).mkdir(exist_ok=True)
    db = sqlite3.connect(
        directory / "batches.sqlite3",
        isolation_level=None,
        check_same_thread=False,
        timeout=30,
    )
    try:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        migrate(db)
    except BaseException:
        db.close()
        raise
    return db


def _keep_spare(directory: Path) -> None:
    """Have a spare file, of as much room as there is."""
    path = directory / "spare"
    with suppress(OSError):
        if not path.exists() or path.stat().st_size < SPARE_BYTES:
            with open(path, "wb", buffering=0) as file:
                file.write(b"\0" * SPARE_BYTES)


def _use_spare(directory: Path) -> bool:
    """Give the room of the spare file up; False if there is none."""
    try:
        (directory / "spare").unlink()
    except OSError:
        return False
    return True


def _room(directory: Path) -> str:
    """Says how much room there is, where it may be too little."""
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free >= SPARE_BYTES:
        return ""
    return f"its disk has {free} bytes left: free {SPARE_BYTES}, or "
