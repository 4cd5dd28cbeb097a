"""Files that clients send, in one body or as an upload in parts.

The length of a file in ``incoming/`` is the space that it has reserved. It is extended
before it is written, and cut to its contents at the end. So the directory itself is the
account, for all processes of a server, and one that dies leaves nothing to correct.

Each part of an upload is a plain file of its own::

    pending -> completed       its parts became one file
       |---> cancelled
       +---> expired           an hour after it was made

A pending upload past its time is shown as expired even before its row is updated.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import ApiError
from .batch_store import BatchStore, OnMade, Row, now
from .files import move_into_place, sync_file

# What is reserved at a time for a body.
STEP_BYTES = 8 << 20
# What is reserved at first for a body that announces its length. Not all of it: a slow
# body would keep space from others for hours.
AHEAD_BYTES = 2 * STEP_BYTES
_BLOCK_BYTES = 512  # the unit of st_blocks


@dataclass(eq=False)
class Room:
    """The space of a store for what clients send. Some of the disk stays free."""

    store: BatchStore
    storage_bytes: int | None
    min_free_bytes: int

    def check(self, num_bytes: int) -> None:
        """Check that this many more bytes may be stored.

        Raises ApiError: 413, the store would exceed ``storage_bytes``, or 507,
        the disk would have less than ``min_free_bytes`` left.
        """
        reserved = unwritten = 0  # the latter are bytes that are not on the disk yet
        for entry in os.scandir(self.store.incoming):
            with suppress(FileNotFoundError):
                found = entry.stat()
                reserved += found.st_size
                unwritten += max(0, found.st_size - found.st_blocks * _BLOCK_BYTES)
        if self.storage_bytes is not None:
            used = self.store.bytes_stored() + reserved
            if used + num_bytes > self.storage_bytes:
                message = (
                    f"No room for {num_bytes} bytes: {used} of the {self.storage_bytes} "
                    "bytes that this server keeps (storage_bytes) are used. Delete files "
                    "that are no longer needed with DELETE /v1/files/{file_id}, or let "
                    "them expire with expires_after."
                )
                raise ApiError(413, message, code="storage_full", retry=False)
        free = shutil.disk_usage(self.store.directory).free - unwritten
        if free - num_bytes < self.min_free_bytes:
            message = (
                f"No room for {num_bytes} bytes: the disk of this server has "
                f"{max(free, 0)} bytes left, and {self.min_free_bytes} of them are for "
                "the results of batches (min_free_bytes). Delete files that are no longer "
                "needed with DELETE /v1/files/{file_id}."
            )
            raise ApiError(507, message, code="disk_full", retry=False)

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
        with self.store.atomic():
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


class IncomingFile:
    """A file that is being written in ``incoming/``."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._fd, path = tempfile.mkstemp(dir=room.store.incoming)
        self.path = Path(path)
        self.num_bytes = 0
        self._reserved = 0

    def reserve(self, num_bytes: int) -> None:
        """Make room for contents of this size. Raises as :meth:`Room.check`."""
        if num_bytes > self._reserved:
            self._reserved = self._room.reserve(self._fd, self._reserved, num_bytes)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append data. Raises ApiError as :meth:`Room.check`, or OSError."""
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


PENDING = "pending"
COMPLETED = "completed"
CANCELLED = "cancelled"
EXPIRED = "expired"

LIFETIME_S = 3600
_CHUNK = 1 << 20


class UploadStore:
    def __init__(self, store: BatchStore) -> None:
        self.store = store

    def directory(self, upload_id: str) -> Path:
        """The directory of an upload's parts. It exists once it has a part."""
        return self.store.directory / "uploads" / upload_id

    def add(self, row: Row) -> None:
        expires_at = row["created_at"] + LIFETIME_S
        self.store.insert(
            "uploads", {**row, "status": PENDING, "expires_at": expires_at}
        )

    def get(self, upload_id: str, owner: str | None = None) -> Row | None:
        """An upload as it is now, of this owner if one is named."""
        row = self.store.get_row("uploads", upload_id, owner)
        if row is None:
            return None
        if row["status"] == PENDING and row["expires_at"] <= now():
            row["status"] = EXPIRED
        return row

    def parts(self, upload_id: str) -> dict[str, Row]:
        """The parts of an upload by id, in order of arrival."""
        rows = self.store.rows(
            "SELECT * FROM upload_parts WHERE upload_id = ? ORDER BY seq", (upload_id,)
        )
        return {row["id"]: row for row in rows}

    def add_part(
        self,
        upload_id: str,
        part_id: str,
        source: Path,
        check: Callable[[], None],
        on_made: OnMade | None = None,
    ) -> Row | None:
        """Move a file in ``incoming/`` to the parts of an upload.

        ``check`` is called in the transaction and may raise. Returns the part's
        row, or None if the upload is no longer pending.
        """
        path = self.directory(upload_id) / part_id
        path.parent.mkdir(exist_ok=True)
        sync_file(source)
        row = {
            "id": part_id,
            "upload_id": upload_id,
            "bytes": source.stat().st_size,
            "created_at": now(),
        }
        added = False
        try:
            with self.store.atomic():
                if not self._pending(upload_id):
                    return None
                check()
                move_into_place(source, path)
                self.store.insert("upload_parts", row)
                if on_made is not None:
                    on_made(row)
            added = True
        finally:
            if not added:
                path.unlink(missing_ok=True)
        return row

    def assemble(
        self, upload_id: str, part_ids: Iterable[str], whole: IncomingFile
    ) -> str:
        """Concatenate parts into a file.

        Returns its MD5 in hexadecimal. Raises FileNotFoundError if they were
        removed meanwhile.
        """
        digest = hashlib.md5(usedforsecurity=False)
        for part_id in part_ids:
            with open(self.directory(upload_id) / part_id, "rb") as part:
                while data := part.read(_CHUNK):
                    digest.update(data)
                    whole.write(data)
        whole.close()
        return digest.hexdigest()

    def complete(
        self,
        upload_id: str,
        source: Path,
        file_id: str,
        kept_s: int | None,
        completed_with: str,
        on_made: OnMade,
    ) -> None:
        """Make the assembled contents a file that expires after ``kept_s``.

        File and status change in one transaction: if the server dies before it,
        the upload can be completed again. ``completed_with`` tells this call
        from others that would complete it. Does nothing if it is no longer pending.
        """
        sync_file(source)
        with self.store.atomic():
            if not self._pending(upload_id):
                return
            upload = self.get(upload_id)
            assert upload is not None
            move_into_place(source, self.store.file_path(file_id))
            file = self.store.record_file(
                file_id,
                upload["filename"],
                upload["purpose"],
                kept_s,
                upload["owner"],
            )
            ended = {"file_id": file_id, "completed_with": completed_with}
            self.store.update("uploads", upload_id, {"status": COMPLETED, **ended})
            on_made(file)
        self.remove_parts(upload_id)

    def cancel(self, upload_id: str) -> bool:
        """Cancel an upload and delete its parts. False if it is not pending."""
        with self.store.atomic():
            if not self._pending(upload_id):
                return False
            self.store.update("uploads", upload_id, {"status": CANCELLED})
        self.remove_parts(upload_id)
        return True

    def expire(self, upload_id: str) -> None:
        """Record that a pending upload has expired, and delete its parts."""
        self.store.update("uploads", upload_id, {"status": EXPIRED}, (PENDING,))
        self.remove_parts(upload_id)

    def remove_parts(self, upload_id: str) -> None:
        with self.store.atomic() as db:
            db.execute("DELETE FROM upload_parts WHERE upload_id = ?", (upload_id,))
        shutil.rmtree(self.directory(upload_id), ignore_errors=True)

    def _pending(self, upload_id: str) -> bool:
        row = self.get(upload_id)
        return row is not None and row["status"] == PENDING
