"""Backups of a store, taken while a server works with it, and their restoration.

For a moment nothing can be added, ended or deleted: the database is copied, and every
file gets a second name. The copies to the backup are made afterwards, at leisure. Logs
of results grow meanwhile, which does no harm: a batch goes on after the last result that
its log has.

A backup is a tar file of the store's directory, with the database as its last member.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from glob import iglob
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from ..errors import ConfigError, InputError, StoreError
from .database import DATABASE, known_migrations
from .files import in_turn, sync_file

# All else is made anew by a server, and names that begin with a dot are temporary.
_KEPT = ("*.json", "epoch", "files/*", "uploads/*/*", "batches/*/*.json*")


def write_backup(directory: Path, out: BinaryIO) -> int:
    """Write a backup of the store in ``directory``. Returns the number of files.

    Raises ConfigError if there is none, StoreError if it cannot be read or written.
    """
    if not (directory / DATABASE).is_file():
        raise ConfigError(
            f"{directory} has no batches ({DATABASE} is missing); name the directory of "
            "a server with --offline-batch-dir."
        )
    try:
        with _snapshot(directory) as copy, tarfile.open(fileobj=out, mode="w|") as tar:
            names = [*_kept_in(copy), DATABASE]
            for name in names:
                tar.add(copy / name, name)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot back up {directory}: {error}.") from error
    return len(names)


def restore_backup(directory: Path, source: BinaryIO, title: str = "this") -> int:
    """Make a store of a backup, in a new or empty directory. Returns the number of files.

    Nothing gets its name before everything is on disk and the database is known to be
    whole. ``title`` names ``source`` in errors.

    Raises ConfigError if the directory has files, InputError if ``source`` is no backup,
    ends too early, or has a database that this release cannot use, StoreError if the
    directory cannot be written.
    """
    number, name = 0, ""
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if found := {path.name for path in directory.iterdir()} - {"lost+found"}:
            raise ConfigError(
                f"{directory} is not empty ({min(found)!r}); name a new directory with "
                "--offline-batch-dir."
            )
        with TemporaryDirectory(prefix="restored-", dir=directory) as new:
            with tarfile.open(fileobj=source, mode="r|") as tar:
                for member in tar:
                    number += 1
                    name = member.name
                    tar.extract(member, new, filter="data")
            if name != DATABASE:
                raise tarfile.ReadError(f"it has no {DATABASE} at its end")
            with closing(_connect(Path(new))) as db:
                [(found,)] = db.execute("PRAGMA quick_check(1)").fetchall()
                if found != "ok":
                    raise sqlite3.DatabaseError(f"its {DATABASE} is damaged: {found}")
                known_migrations(db)
            os.sync()
            for each in sorted(os.listdir(new), key=DATABASE.__eq__):
                os.rename(f"{new}/{each}", directory / each)
        sync_file(directory)
    except (tarfile.TarError, sqlite3.DatabaseError, StoreError) as error:
        raise InputError(
            f"{title} is no whole backup that this release can restore: {error}."
        ) from None
    except OSError as error:
        raise StoreError(f"cannot restore to {directory}: {error}.") from error
    finally:
        if is_new:
            with suppress(OSError):  # it has files, unless this has failed
                directory.rmdir()
    return number


@contextmanager
def _snapshot(directory: Path) -> Iterator[Path]:
    """A directory with the store as it is at one moment, until the block ends."""
    copy = directory / "backup"
    with in_turn(directory / "backup.lock"):
        shutil.rmtree(copy, ignore_errors=True)  # of a backup that was killed
        copy.mkdir()
        try:
            with closing(_connect(directory)) as writer:
                # Whoever wants to write waits. Contents exist before a row names them,
                # and go after it.
                writer.execute("BEGIN IMMEDIATE")
                for name in _kept_in(directory):
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    with suppress(FileNotFoundError):  # deleted, after its row
                        os.link(directory / name, copy / name)
                with closing(_connect(directory)) as db, closing(_connect(copy)) as new:
                    db.backup(new)
            yield copy
        finally:
            shutil.rmtree(copy, ignore_errors=True)


def _connect(directory: Path) -> sqlite3.Connection:
    return sqlite3.connect(directory / DATABASE, isolation_level=None, timeout=30)


def _kept_in(directory: Path) -> Iterator[str]:
    for pattern in _KEPT:
        yield from iglob(pattern, root_dir=directory)
