"""Files that survive a crash: whole files, append-only logs, locks and epochs.

A file that is replaced is the old or the new one, never half of it. A record of a log is
written whole, in one call, so it survives the end of the process by any means.
:meth:`AppendLog.commit` makes it survive a power cut as well. Opening a log reads its
records back and drops a torn last one. Any other damaged record is for the caller to
handle: :meth:`AppendLog.move_damaged` keeps its bytes elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from ..errors import ConfigError, StoreError, StoreWriteError


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name only if the block ends without an error.

    A device or a pipe is written to, and not replaced by a file.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with open(path, "wb") as device:
            yield device
        return
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
        """Take the lock without waiting. Returns the name of another holder, or None."""
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


def check_writable(directory: Path, option: str) -> None:
    """Raises ConfigError if a directory, which may not be there yet, cannot have files."""
    places = (directory.absolute(), *directory.absolute().parents)
    try:
        TemporaryFile(dir=next(filter(Path.exists, places))).close()
    except OSError as error:
        raise ConfigError(
            f"{option} {directory} is not a directory that can be written: {error}."
        ) from None


def check_directory(directory: Path) -> None:
    """Check that a server can use a directory, before its engine is loaded.

    Raises:
        ConfigError: it cannot be written.
        StoreError: another server uses it.
    """
    check_writable(directory, "--offline-batch-dir")
    path = directory / "lock"
    if not path.exists():
        return
    lock = FileLock(path)
    try:
        holder = lock.acquire("a server that starts")
    finally:
        lock.release()
    if holder is not None:
        raise StoreError(
            f"{directory} is in use by another server ({holder}); choose another "
            "--offline-batch-dir."
        )


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
    path = directory / NAME
    last = int(path.read_bytes()) if path.exists() else 0
    epoch = epoch_after(last)
    with atomic_write(path) as file:
        file.write(str(epoch).encode())
    return epoch


def whole_lines(log: BinaryIO, end: int) -> Iterator[bytes]:
    """The records of a log that may still grow, from its position up to the offset ``end``.

    It needs no lock: reading stops at the first record that is not complete.
    """
    offset = log.tell()
    for data in log:
        offset += len(data)
        if offset > end or not data.endswith(b"\n"):
            return
        yield data


class AppendLog:
    """A log that one process writes.

    ``append`` and ``commit`` may run in two threads. When it is opened, ``read``
    gets the offset and the bytes of each line, and returns False if it is not a
    record. ``damaged`` gets those, except the last of the file.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[int, bytes], bool],
        damaged: Callable[[AppendLog, int, bytes], None],
    ) -> None:
        self.path = path
        is_new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._end = self._recover(read, damaged)
            if is_new:
                sync_file(path.parent)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = self._end

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def append(self, data: bytes) -> int:
        """Write a record with its newline. Returns its offset.

        Raises:
            StoreWriteError: the disk is full or fails. Nothing was added.
        """
        start = self._end
        try:
            written = os.pwrite(self._fd, data, start)
        except OSError as error:
            raise self._write_error(error) from error
        if written != len(data):
            os.ftruncate(self._fd, start)
            raise StoreWriteError(
                f"{self.path}: wrote {written} of {len(data)} bytes: the disk is full"
            )
        self._end = start + len(data)
        return start

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def commit(self) -> None:
        """Make what was appended survive a power cut, or raise StoreWriteError."""
        end = self._end
        if end == self._synced or self.closed:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._write_error(error) from error
        self._synced = end

    def close(self) -> None:
        """Commit and close the file, also if the commit fails with a StoreWriteError."""
        try:
            self.commit()
        finally:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def move_damaged(self, offset: int, data: bytes) -> Path:
        """Move a damaged record to ``<log>.damaged`` and return the path of that file.

        A blank line of the same length takes its place, so no other record
        moves. Raises StoreWriteError if there is no space for it, and leaves
        the log as it is.
        """
        path = self.path.with_name(f"{self.path.name}.damaged")
        blank = b" " * (len(data) - 1) + b"\n"
        try:
            with open(path, "ab") as kept:
                kept.write(data)
                kept.flush()
                os.fsync(kept.fileno())
            # Only now: a crash in between leaves the record twice, not nowhere.
            os.pwrite(self._fd, blank, offset)
            os.fdatasync(self._fd)
        except OSError as error:
            raise StoreWriteError(f"{path}: {error.strerror}") from error
        return path

    def _recover(
        self,
        read: Callable[[int, bytes], bool],
        damaged: Callable[[AppendLog, int, bytes], None],
    ) -> int:
        """Read the file back and return the offset of its end."""
        offset = 0
        unread: tuple[int, bytes] | None = None
        with open(self.path, "rb") as log:
            for data in log:
                if unread is not None:
                    damaged(self, *unread)
                is_record = data.endswith(b"\n") and read(offset, data)
                unread = None if is_record else (offset, data)
                offset += len(data)
        # A power cut tears the last record. If it destroyed the newline between two,
        # they are one damaged line, and both are lost.
        if unread is not None:
            offset, _ = unread
            os.ftruncate(self._fd, offset)
        return offset

    def _write_error(self, error: OSError) -> StoreWriteError:
        return StoreWriteError(f"{self.path}: {error.strerror}")
