"""The log of a job of frontend programs, and named jobs, which keep it between runs.

Each record is one JSON line: the program's key, name and version, whether it succeeded,
and its result. It is written when its program ends, and from then on survives the end of
this process. It survives a power failure from the next commit, about a second later.
:mod:`sglang_batch.store.files` describes how records are written and recovered.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import platformdirs

from ..errors import ConfigError, StoreError, StoreWriteError
from ..request import json_line
from ..store.files import AppendLog, FileLock

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


# Named jobs of frontend programs, which keep results between runs.

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class ProgramJob:
    """A named job of programs, which a later run can resume.

    Args:
        name: letters, digits, ``.``, ``_`` and ``-``.
        directory: of the job's log. None: ``sglang-batch/programs`` in the user's data
            directory.
        retry_failed: whether failed programs run again.

    Raises:
        ConfigError: the name cannot be a file name.
    """

    def __init__(
        self, name: str, directory: str | Path | None = None, retry_failed: bool = True
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"job={name!r} must be a name of letters, digits, '.', '_' and '-', "
                "such as night-1."
            )
        self.name = name
        self.directory = (
            platformdirs.user_data_path("sglang-batch") / "programs"
            if directory is None
            else Path(directory)
        )
        self.retry_failed = retry_failed
        self._mutex = threading.Lock()
        self._file_lock = FileLock(self.directory / f"{name}.lock")
        self._log: ProgramLog | None = None
        self._holders = 0

    @contextmanager
    def open(self) -> Iterator[ProgramLog]:
        """The job's log, shared by all blocks of this process that have it open.

        Raises:
            StoreError: another process runs the job, or its log cannot be used.
        """
        with self._mutex:
            if self._log is None:
                self._log = self._open()
            log = self._log
            self._holders += 1
        try:
            yield log
        finally:
            with self._mutex:
                self._holders -= 1
                if not self._holders:
                    self._log = None
                    try:
                        log.close()
                    finally:
                        self._file_lock.release()

    def _open(self) -> ProgramLog:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            holder = self._file_lock.acquire(f"pid {os.getpid()}")
            if holder is not None:
                raise StoreError(
                    f"job {self.name!r} in {self.directory} is being run by {holder}; "
                    "wait until that ends, or give this run another job name."
                )
            return ProgramLog(self.directory / f"{self.name}.jsonl")
        except BaseException as error:
            self._file_lock.release()
            if isinstance(error, OSError):
                raise StoreError(
                    f"{error.filename or self.directory}: {error.strerror}; job_dir= "
                    "names another directory."
                ) from error
            raise
