"""Finished requests of one job, in an append-only file that survives a crash.

Each record is one JSON line: the request's index, whether it is an answer or an
error, its token counts and the finished output line itself. A request that is in the
log never runs again, unless its record was damaged: see :mod:`.files`.
"""

from __future__ import annotations

import logging
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..request import Cuts, RequestOutput, Usage, as_one_line, json_line
from .files import AppendLog, whole_lines

logger = logging.getLogger(__name__)

_MISSING = -1
NO_CUTS = Cuts()


class _Record(msgspec.Struct, array_like=True):
    index: int
    ok: bool
    usage: Annotated[tuple[int, ...], msgspec.Meta(min_length=4, max_length=4)]
    line: msgspec.Raw
    # Absent in logs of earlier releases.
    merged: bool = False
    cuts: tuple[int, ...] = ()


class _Response(msgspec.Struct):
    status_code: int


class _ErrorLine(msgspec.Struct):
    custom_id: str | None = None
    response: _Response | None = None


_decoder = msgspec.json.Decoder(_Record)
_error_decoder = msgspec.json.Decoder(_ErrorLine)
# Not the fault of a request: timeouts, and a server with too much to do.
_TRANSIENT = (408, 425, 429, 499)


def finished_lines(
    log: BinaryIO, end: int, *, ok: bool | None = None
) -> Iterator[bytes]:
    """Result lines of a log that may still grow, in the order of completion.

    They begin at its position and end at the size that it had when the caller
    looked. ``ok`` asks for answers or for error lines only. It needs no lock:
    reading stops at the first record that is not complete. Damaged records are
    skipped, and so are the blank lines that replace them.
    """
    for data in whole_lines(log, end):
        try:
            record = _decoder.decode(data)
        except (ValueError, msgspec.DecodeError):
            continue
        if ok is None or record.ok is ok:
            yield _result_line(record)


def _result_line(record: _Record) -> bytes:
    # Logs of earlier releases have raw line ends of Unicode.
    return as_one_line(bytes(record.line)) + b"\n"


class ResultLog:
    """The results of a job of ``num_requests`` requests, in order of completion.

    ``num_refused`` are those of ``num_failed`` that were no valid requests, but
    have an id: their status is 4xx. For ``merged_usage``, the share of merged
    requests in ``usage``, nothing was computed. ``cuts`` are answers that stop
    rules or their limits have ended.
    """

    def __init__(self, path: Path, num_requests: int) -> None:
        """Read back earlier results. StoreWriteError: a damaged one cannot be kept."""
        self.path = path
        self.num_completed = 0
        self.num_failed = 0
        self.num_refused = 0
        self.usage = Usage()
        self.num_merged = 0
        self.merged_usage = Usage()
        self.cuts = Cuts()
        self._offsets = array("q", [_MISSING]) * num_requests
        self._log = AppendLog(path, self._read, _keep_damaged)

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def num_done(self) -> int:
        return self.num_completed + self.num_failed

    def unfinished(self) -> NDArray[np.int64]:
        """Indices of the requests that have no result yet, ascending."""
        offsets = np.array(self._offsets, dtype=np.int64)
        return np.flatnonzero(offsets == _MISSING).astype(np.int64)

    def put(
        self,
        index: int,
        line: bytes,
        *,
        ok: bool,
        usage: Usage,
        merged: bool = False,
        cuts: Cuts = NO_CUTS,
    ) -> None:
        """Append a result, which from here on survives a crash of this process.

        A second result of the same request is dropped, so a reader of the
        growing log sees each request once. Raises StoreWriteError if nothing of
        the result was written.
        """
        if self._offsets[index] != _MISSING:
            return
        record = _Record(
            index, ok, usage.counts(), msgspec.Raw(line), merged, cuts.counts()
        )
        offset = self._log.append(json_line(record))
        self._account(record, offset)

    def put_output(self, index: int, line: bytes, output: RequestOutput) -> None:
        """Append what an engine or a cache answered, as :meth:`put`."""
        merged = not output.is_computed
        self.put(
            index,
            line,
            ok=output.ok,
            usage=output.usage,
            merged=merged,
            cuts=output.cuts,
        )

    def commit(self) -> None:
        """Make everything put so far survive a power cut, or raise StoreWriteError."""
        self._log.commit()

    def write_ordered(
        self,
        outputs: BinaryIO,
        errors: BinaryIO,
        unrun_line: Callable[[int], bytes] | None = None,
    ) -> tuple[int, int]:
        """Write answers and errors in the order of the input. Returns their numbers.

        Both may go to one file. ``unrun_line`` makes the line of a request
        without a result, which is left out without it.
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
                (outputs if record.ok else errors).write(_result_line(record))
                num_outputs += record.ok
                num_errors += not record.ok
        return num_outputs, num_errors

    def close(self) -> None:
        """Commit and close the file, also if the commit fails with a StoreWriteError."""
        self._log.close()

    def _account(self, record: _Record, offset: int) -> None:
        if self._offsets[record.index] != _MISSING:
            return
        self._offsets[record.index] = offset
        if record.ok:
            self.num_completed += 1
        else:
            self.num_failed += 1
            self.num_refused += _is_refused(record.line)
        self.usage += Usage(*record.usage)
        if any(record.cuts):
            self.cuts += Cuts(*record.cuts)
        if record.merged:
            self.num_merged += 1
            self.merged_usage += Usage(*record.usage)

    def _read(self, offset: int, data: bytes) -> bool:
        """Count a record of this job. False if the line is not one."""
        if data.isspace():
            return True  # it replaces a damaged record
        try:
            record = _decoder.decode(data)
        except (ValueError, msgspec.DecodeError):
            return False
        if not 0 <= record.index < len(self):
            return False
        self._account(record, offset)
        return True


def _is_refused(error_line: msgspec.Raw) -> bool:
    try:
        found = _error_decoder.decode(error_line)
    except msgspec.DecodeError:
        return False
    if found.custom_id is None or found.response is None:
        return False
    status = found.response.status_code
    return 400 <= status < 500 and status not in _TRANSIENT


def _keep_damaged(log: AppendLog, offset: int, data: bytes) -> None:
    kept_in = log.move_damaged(offset, data)
    logger.error(
        "%s: the record at byte %d (%d bytes) is damaged and cannot be read. Its bytes "
        "are kept in %s, and its request runs again.",
        log.path,
        offset,
        len(data),
        kept_in,
    )


# One of this many line offsets is kept. The lines in between are read.
EVERY = 64


class LineIndex:
    """Line offsets of one append-only file. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inode = -1
        self._start_over()

    def seek(self, file: BinaryIO, line: int) -> tuple[int, int]:
        """Seek to the beginning of a line, or to the end of the last whole one.

        Lines are counted from 0. Returns the present number of whole lines, and
        the offset of their end.
        """
        with self._lock:
            self._read_more(file)
            num_lines, end = self._num_lines, self._end
            line = min(line, num_lines)
            offset = self._offsets[line // EVERY]
        file.seek(offset)
        for _ in range(line % EVERY):
            file.readline()
        return num_lines, end

    def _start_over(self) -> None:
        self._offsets = array("q", [0])
        self._num_lines = 0
        self._end = 0

    def _read_more(self, file: BinaryIO) -> None:
        now = os.fstat(file.fileno())
        if now.st_ino != self._inode or now.st_size < self._end:
            self._start_over()
            self._inode = now.st_ino
        file.seek(self._end)
        for line in file:
            if not line.endswith(b"\n"):
                return
            self._num_lines += 1
            self._end += len(line)
            if self._num_lines % EVERY == 0:
                self._offsets.append(self._end)


@lru_cache(maxsize=256)
def line_index(path: Path) -> LineIndex:
    """This process's index of a file. The most recently used ones are kept."""
    return LineIndex()
