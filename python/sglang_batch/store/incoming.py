"""Bodies that are being received: their space is reserved before it is written.

The length of a file in ``incoming/`` is the space that it has reserved. It is extended
before it is written, and cut to its contents at the end. So the directory itself is the
account, for all processes of a server, and one that dies leaves nothing to correct.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ApiError
from .batch_store import BatchStore

# What is reserved at a time for a body.
STEP_BYTES = 8 << 20
# What is reserved at first for a body that announces its length. Not all of it: a slow
# body would keep space from others for hours.
AHEAD_BYTES = 2 * STEP_BYTES
_BLOCK_BYTES = 512  # the unit of st_blocks


class Room:
    """The space of a store for what clients send.

    Args:
        storage_bytes: most bytes in the store, None for any number.
        min_free_bytes: bytes of the disk that stay free.
    """

    def __init__(
        self, store: BatchStore, storage_bytes: int | None, min_free_bytes: int
    ) -> None:
        self._store = store
        self._storage_bytes = storage_bytes
        self._min_free_bytes = min_free_bytes

    def check(self, num_bytes: int) -> None:
        """Check that this many more bytes may be stored.

        Raises:
            ApiError: 413, the store would exceed ``storage_bytes``, or 507, the disk
                would have less than ``min_free_bytes`` left.
        """
        reserved, unwritten = self._incoming_bytes()
        if self._storage_bytes is not None:
            used = self._store.bytes_stored() + reserved
            if used + num_bytes > self._storage_bytes:
                raise _store_is_full(num_bytes, used, self._storage_bytes)
        free = shutil.disk_usage(self._store.directory).free - unwritten
        if free - num_bytes < self._min_free_bytes:
            raise _disk_is_full(num_bytes, max(free, 0), self._min_free_bytes)

    def reserve(self, fd: int, reserved: int, num_bytes: int) -> int:
        """Extend a file in ``incoming/`` to hold ``num_bytes``, or more.

        Args:
            reserved: the file's length.

        Returns:
            The file's new length.

        Raises:
            ApiError: see :meth:`check`.
        """
        # The database's lock is that of the account, too.
        with self._store.atomic():
            wanted = max(num_bytes, reserved + STEP_BYTES if reserved else 0)
            try:
                self.check(wanted - reserved)
            except ApiError:
                wanted = num_bytes
                self.check(wanted - reserved)
            os.ftruncate(fd, wanted)
        return wanted

    @contextmanager
    def receive(self, num_bytes: int = 0) -> Iterator[IncomingFile]:
        """A new file in ``incoming/``, removed at the end unless it was moved.

        Args:
            num_bytes: its size if it is known. Reserved at once.

        Raises:
            ApiError: see :meth:`check`. Also from writing to the file.
        """
        file = IncomingFile(self)
        try:
            if num_bytes:
                file.reserve(num_bytes)
            yield file
        finally:
            file.discard()

    @property
    def directory(self) -> Path:
        return self._store.incoming

    def _incoming_bytes(self) -> tuple[int, int]:
        """Bytes that are reserved, and how many of them are not on the disk yet."""
        reserved = unwritten = 0
        for entry in os.scandir(self.directory):
            with suppress(FileNotFoundError):
                found = entry.stat()
                reserved += found.st_size
                unwritten += max(0, found.st_size - found.st_blocks * _BLOCK_BYTES)
        return reserved, unwritten


class IncomingFile:
    """A file that is being written in ``incoming/``."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._fd, path = tempfile.mkstemp(dir=room.directory)
        self.path = Path(path)
        self.num_bytes = 0
        self._reserved = 0

    def reserve(self, num_bytes: int) -> None:
        """Make room for contents of this size.

        Raises:
            ApiError: there is none.
        """
        if num_bytes > self._reserved:
            self._reserved = self._room.reserve(self._fd, self._reserved, num_bytes)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append data.

        Raises:
            ApiError: there is no room for it.
            OSError: the disk does not take it.
        """
        view = memoryview(data)
        self.reserve(self.num_bytes + len(view))
        while view:
            written = os.pwrite(self._fd, view, self.num_bytes)
            self.num_bytes += written
            view = view[written:]
        return len(data)

    def close(self) -> None:
        """End the contents, and return the room that they did not need."""
        if self._fd >= 0:
            os.ftruncate(self._fd, self.num_bytes)
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Close and remove the file, if it is still there."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.path.unlink(missing_ok=True)


def _store_is_full(num_bytes: int, used: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"No room for {num_bytes} bytes: {used} of the {limit} bytes that this server "
        "keeps (storage_bytes) are used. Delete files that are no longer needed with "
        "DELETE /v1/files/{file_id}, or let them expire with expires_after.",
        code="storage_full",
        retry=False,
    )


def _disk_is_full(num_bytes: int, free: int, min_free: int) -> ApiError:
    return ApiError(
        507,
        f"No room for {num_bytes} bytes: the disk of this server has {free} bytes left, "
        f"and {min_free} of them are for the results of batches (min_free_bytes). "
        "Delete files that are no longer needed with DELETE /v1/files/{file_id}.",
        code="disk_full",
        retry=False,
    )
