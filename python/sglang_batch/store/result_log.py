"""Finished requests of one job: an append-only file that survives a crash.

Each record is one JSON line: the request's index, whether it is an answer or an
error, its token counts and the finished output line itself. A record is written
whole, in one call, the moment its request finishes; opening the log again reads
back what is there and drops a last line that a power cut tore. A request that is in
the log is never run again.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError, StoreWriteError
from ..request import Usage

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

    Needs no lock: what is not a whole record yet ends the lines.

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
            return
        if ok is None or record.ok is ok:
            yield bytes(record.line) + b"\n"


class ResultLog:
    """The results of a job of ``num_requests`` requests, in order of completion."""

    def __init__(self, path: Path, num_requests: int) -> None:
        """Open the log, reading back what an earlier run left.

        Raises:
            StoreError: a record in the middle of the file cannot be read.
        """
        self.path = path
        self.num_completed = 0
        self.num_failed = 0
        self.usage = Usage()
        self._offsets = array("q", [_MISSING]) * num_requests
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._end = self._recover()
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
        if self._fd >= 0:
            self.commit()
            os.close(self._fd)
            self._fd = -1

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
        size = os.fstat(self._fd).st_size
        with open(self.path, "rb") as log:
            for data in log:
                record = self._decode(data, offset, is_last=offset + len(data) == size)
                if record is None:
                    break
                self._account(record, offset)
                offset += len(data)
        os.ftruncate(self._fd, offset)
        return offset

    def _decode(self, data: bytes, offset: int, *, is_last: bool) -> _Record | None:
        try:
            if not data.endswith(b"\n"):
                raise ValueError
            record = _decoder.decode(data)
            if not 0 <= record.index < len(self):
                raise ValueError
            return record
        except (ValueError, msgspec.DecodeError):
            if is_last:
                return None
            raise StoreError(
                f"{self.path}: the record at byte {offset} cannot be read; the file was "
                "changed by something else. Remove it to start the job again."
            ) from None
