"""Files that survive a crash: the old or the new one, never half a file; locks and epochs."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name only if the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_file(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def move_into_place(source: Path, path: Path) -> None:
    """Move a file on the same disk to its final name, which survives a power cut."""
    sync_file(source)
    os.replace(source, path)
    sync_file(path.parent)


def sync_file(path: Path) -> None:
    """Make the contents of a file, or the names in a directory, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class FileLock:
    """An exclusive ``flock``. The file contains the name of its holder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, owner: str) -> str | None:
        """Take the lock without waiting.

        Returns the name of its holder unless that is this object.
        """
        if self._fd is not None:
            return None
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 256).decode(errors="replace")
            os.close(fd)
            return holder or "another process"
        self._fd = fd
        with suppress(OSError):  # a full disk: the name is only for messages
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner.encode(), 0)
        return None

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Wait for an exclusive ``flock`` and hold it during the block."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


NAME = "epoch"


def epoch_after(last: int) -> int:
    """An epoch above ``last``, and above those of heads that began earlier elsewhere.

    It is by the clock, in milliseconds, so two heads that know nothing of each
    other differ.
    """
    return max(last + 1, time.time_ns() // 1_000_000)


def next_epoch(directory: Path) -> int:
    """The epoch of a head that keeps its state in ``directory``, written there."""
    path = directory / NAME
    last = int(path.read_bytes()) if path.exists() else 0
    epoch = epoch_after(last)
    with atomic_write(path) as file:
        file.write(str(epoch).encode())
    return epoch
