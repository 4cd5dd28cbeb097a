"""Finished requests of one job: an append-only file that survives a crash.

Each record is one JSON line: the request's index, whether it is an answer or an
error, its token counts and the finished output line itself. A record is written
whole, in one call, the moment its request finishes; opening the log again reads
back what is there and drops a last line that a power cut tore. A request that is in
the log is never run again.

A record that was damaged later is set aside: its bytes go to ``<log>.damaged``, a blank
line of the same length takes its place, so that no other record moves, and its request
has no result again.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import StoreWriteError
from ..request import Usage

logger = logging.getLogger(__name__)

_MISSING = -1


class _Record(msgspec.Struct, array_like=True):
    index: int
    ok: bool
    usage: tuple[int, int, int, int]
    line: msgspec.Raw


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Record)


def finished_lines(
    log: BinaryIO, end: int, *, ok: bool | None = None
) -> Iterator[bytes]:
    """Result lines of a log that may still grow, in the order of completion.

    Needs no lock: what is not a whole record yet ends the lines. A damaged record is
    left out, and the blank line that stands for one.

    Args:
        log: the log, opened by its reader, at the beginning of a record.
        end: offset in the file up to which to read; its size when it was looked at.
        ok: answers (True) or error lines (False) alone; None is both.
    """
    offset = log.tell()
    for data in log:
        offset += len(data)
        if offset > end or not data.endswith(b"\n"):
            return
        try:
            record = _decoder.decode(data)
        except (ValueError, msgspec.DecodeError):
            continue
        if ok is None or record.ok is ok:
            yield bytes(record.line) + b"\n"


class ResultLog:
    """The results of a job of ``num_requests`` requests, in order of completion."""

    def __init__(self, path: Path, num_requests: int) -> None:
        """Open the log, reading back what an earlier run left.

        Raises:
            StoreWriteError: a damaged record cannot be set aside for want of room.
        """
        self.path = path
        self.num_completed = 0
        self.num_failed = 0
        self.usage = Usage()
        self._offsets = array("q", [_MISSING]) * num_requests
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._end = self._recover()
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = self._end

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def num_done(self) -> int:
        return self.num_completed + self.num_failed

    def unfinished(self) -> NDArray[np.int64]:
        """Indices of the requests that have no result yet, ascending."""
        offsets = np.array(self._offsets, dtype=np.int64)
        return np.flatnonzero(offsets == _MISSING).astype(np.int64)

    def put(self, index: int, line: bytes, *, ok: bool, usage: Usage) -> None:
        """Append a result. It survives a crash of this process from here on.

        A second result of the same request is dropped, so who reads the log while it
        grows sees each request once.
        """
        if self._offsets[index] != _MISSING:
            return
        counts = (
            usage.input_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            usage.reasoning_tokens,
        )
        record = _Record(index, ok, counts, msgspec.Raw(line))
        data = _encoder.encode(record) + b"\n"
        try:
            written = os.pwrite(self._fd, data, self._end)
        except OSError as error:
            raise StoreWriteError(f"{self.path}: {error.strerror}") from error
        if written != len(data):
            os.ftruncate(self._fd, self._end)
            raise StoreWriteError(
                f"{self.path}: wrote {written} of {len(data)} bytes; is the disk full?"
            )
        self._account(record, self._end)
        self._end += len(data)

    def commit(self) -> None:
        """Make everything put so far survive a power cut."""
        end = self._end
        if end != self._synced:
            os.fdatasync(self._fd)
            self._synced = end

    def write_ordered(
        self,
        outputs: BinaryIO,
        errors: BinaryIO,
        unrun_line: Callable[[int], bytes] | None = None,
    ) -> tuple[int, int]:
        """Write all results in the order of the input.

        Args:
            outputs: where answers go.
            errors: where error lines go; may be the same file.
            unrun_line: makes the error line of a request without a result; None
                leaves such requests out.

        Returns:
            Number of lines written to ``outputs`` and to ``errors``.
        """
        num_outputs = num_errors = 0
        with open(self.path, "rb") as log:
            for index, offset in enumerate(self._offsets):
                if offset == _MISSING:
                    if unrun_line is not None:
                        errors.write(unrun_line(index) + b"\n")
                        num_errors += 1
                    continue
                log.seek(offset)
                record = _decoder.decode(log.readline())
                (outputs if record.ok else errors).write(bytes(record.line) + b"\n")
                num_outputs += record.ok
                num_errors += not record.ok
        return num_outputs, num_errors

    def close(self) -> None:
        """Commit and let go of the file, of the file also where the commit fails.

        Raises:
            OSError: the commit failed.
        """
        if self._fd >= 0:
            try:
                self.commit()
            finally:
                fd, self._fd = self._fd, -1
                os.close(fd)

    def _account(self, record: _Record, offset: int) -> None:
        if self._offsets[record.index] != _MISSING:
            return
        self._offsets[record.index] = offset
        if record.ok:
            self.num_completed += 1
        else:
            self.num_failed += 1
        self.usage += Usage(*record.usage)

    def _recover(self) -> int:
        """Read the log back; return the offset of its end."""
        offset = 0
        damaged: list[tuple[int, bytes]] = []
        with open(self.path, "rb") as log:
            for data in log:
                record = self._decode(data)
                if record is not None:
                    self._account(record, offset)
                elif not (data.isspace() and data.endswith(b"\n")):
                    damaged.append((offset, data))
                offset += len(data)
        # A power cut tears the last one. Two may be damaged as one line, where what is
        # lost is the end of the line between them: then both are without a result.
        if damaged and damaged[-1][0] + len(damaged[-1][1]) == offset:
            offset, _ = damaged.pop()
            os.ftruncate(self._fd, offset)
        for at, data in damaged:
            self._set_aside(at, data)
        return offset

    def _set_aside(self, offset: int, data: bytes) -> None:
        """Keep a damaged record elsewhere, and put a blank line where it was."""
        path = self.path.with_name(f"{self.path.name}.damaged")
        blank = b" " * (len(data) - 1) + b"\n"
        try:
            with open(path, "ab") as kept:
                kept.write(data)
                kept.flush()
                os.fsync(kept.fileno())
            # Never before: a crash here leaves it twice, not nowhere.
            os.pwrite(self._fd, blank, offset)
            os.fdatasync(self._fd)
        except OSError as error:
            raise StoreWriteError(f"{path}: {error.strerror}") from error
        logger.error(
            "%s: the record at byte %d (%d bytes) cannot be read, something else damaged "
            "it. It is kept in %s, and its request runs again.",
            self.path,
            offset,
            len(data),
            path,
        )

    def _decode(self, data: bytes) -> _Record | None:
        """A record of this job; None if it is none, or not whole."""
        try:
            record = _decoder.decode(data)
        except (ValueError, msgspec.DecodeError):
            return None
        whole = data.endswith(b"\n") and 0 <= record.index < len(self)
        return record if whole else None
