"""One process at a time: an advisory lock on a file, released when its holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class FileLock:
    """An exclusive ``flock``. The file contains the name of its holder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, owner: str) -> str | None:
        """Take the lock without waiting.

        Returns:
            None if this object holds the lock now, else the name of its holder.
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
