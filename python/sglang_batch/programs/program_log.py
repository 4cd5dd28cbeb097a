"""Finished frontend programs of a named job, in an append-only file.

Each record is one JSON line: the program's key, name and version, whether it succeeded,
and its result. It is written when its program ends, and from then on survives the end of
this process. It survives a power failure from the next commit, about a second later.
:mod:`sglang_batch.store.append_log` describes how records are written and recovered.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import StoreError, StoreWriteError
from ..json_lines import json_line
from ..store.append_log import AppendLog

COMMIT_EVERY_S = 1.0


class ProgramRecord(msgspec.Struct):
    """One finished program.

    Attributes:
        key: identifies the program, see :mod:`.program_key`.
        program: its name.
        version: digest of its code.
        ok: whether it succeeded.
        result: JSON, see :mod:`.program_results`.
    """

    key: str
    program: str
    version: str
    ok: bool
    result: msgspec.Raw


class _RecordEntry(NamedTuple):
    """The parts of a record that are kept in memory, and its place in the file."""

    offset: int
    length: int
    ok: bool
    program: tuple[str, str]


_decoder = msgspec.json.Decoder(ProgramRecord)


class ProgramLog:
    """The records of one job. Any thread may call any method.

    Raises:
        StoreError: a record of the file is damaged.
        StoreWriteError: the disk failed to store a record.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._sync_error = ""
        self._entries: dict[str, _RecordEntry] = {}
        self._programs: dict[tuple[str, str], tuple[str, str]] = {}
        self._log = AppendLog(path, self._read, _refuse)
        self._synced_at = time.monotonic()

    def outcome(self, key: str) -> bool | None:
        """Whether a program succeeded. None: it is not in the log."""
        entry = self._entries.get(key)
        return None if entry is None else entry.ok

    def versions(self, program: str) -> dict[str, int]:
        """Number of programs of this name in the log, by version."""
        counts: dict[str, int] = {}
        with self._lock:
            for entry in self._entries.values():
                name, version = entry.program
                if name == program:
                    counts[version] = counts.get(version, 0) + 1
        return counts

    def result(self, key: str) -> bytes:
        """The result of a program in the log, as JSON."""
        entry = self._entries[key]
        data = self._log.read(entry.offset, entry.length)
        try:
            return bytes(_decoder.decode(data).result)
        except (ValueError, msgspec.DecodeError):
            raise _unreadable(self._log.path, entry.offset) from None

    def put(self, record: ProgramRecord) -> None:
        """Append a record, which replaces an earlier one with the same key.

        Does nothing after close(): only an abandoned program can end that late.
        """
        if self._sync_error:
            raise StoreWriteError(self._sync_error)
        data = json_line(record)
        with self._lock:
            if self._log.closed:
                return
            offset = self._log.append(data)
            self._account(record, offset, len(data))

    def commit_sometimes(self) -> None:
        """Commit, unless the last commit was less than a second ago."""
        if time.monotonic() - self._synced_at >= COMMIT_EVERY_S:
            self.commit()

    def commit(self) -> None:
        """Make all records put so far survive a power failure.

        If the disk fails, put() and close() raise from then on, because the operating
        system reports lost data only once.
        """
        with self._sync_lock:
            try:
                self._log.commit()
            except StoreWriteError as error:
                self._sync_error = str(error)
            self._synced_at = time.monotonic()

    def close(self) -> None:
        self.commit()
        with self._sync_lock, self._lock:
            try:
                self._log.close()
            except StoreWriteError as error:
                self._sync_error = str(error)
        if self._sync_error:
            raise StoreWriteError(self._sync_error)

    def _account(self, record: ProgramRecord, offset: int, length: int) -> None:
        program = (record.program, record.version)
        # One tuple for all records of a program, of which there may be very many.
        program = self._programs.setdefault(program, program)
        self._entries[record.key] = _RecordEntry(offset, length, record.ok, program)

    def _read(self, offset: int, data: bytes) -> bool:
        try:
            record = _decoder.decode(data)
        except (ValueError, msgspec.DecodeError):
            return False
        self._account(record, offset, len(data))
        return True


def _refuse(log: AppendLog, offset: int, data: bytes) -> None:
    raise _unreadable(log.path, offset)


def _unreadable(path: Path, offset: int) -> StoreError:
    return StoreError(
        f"{path}: the record at byte {offset} cannot be read; the file was changed by "
        "something else. Remove it to start the job again."
    )
