"""Finished frontend programs of a named job: an append-only file.

Each record is one JSON line: the program's key, its name and version, whether it
failed, and its result. A line is written whole, in one call, the moment its program
ends, so it survives the end of this process by any means; about once a second what was
written is made to survive a power cut. Opening the file again reads back what is
there and drops a last line that was torn.
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

from .errors import ConfigError, StoreError
from .store.files import sync_directory
from .store.lock import FileLock

COMMIT_EVERY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class Record(msgspec.Struct):
    """One finished program.

    Attributes:
        key: says which program this was, see :mod:`.program_key`.
        program: its name.
        version: digest of its code.
        ok: False where it failed.
        result: what it left, as JSON.
    """

    key: str
    program: str
    version: str
    ok: bool
    result: msgspec.Raw


class _Place(NamedTuple):
    offset: int
    length: int
    ok: bool
    program: tuple[str, str]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class ProgramLog:
    """The records of one job. Any thread may call any method.

    Raises:
        StoreError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._sync_error = ""
        self._places: dict[str, _Place] = {}
        self._programs: dict[tuple[str, str], tuple[str, str]] = {}
        is_new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._end = self._recover()
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = self._end
        self._synced_at = time.monotonic()
        if is_new:
            sync_directory(path.parent)

    def outcome(self, key: str) -> bool | None:
        """True for a program that succeeded, False for one that failed, else None."""
        place = self._places.get(key)
        return None if place is None else place.ok

    def versions(self, program: str) -> dict[str, int]:
        """How many programs of that name are here, by version."""
        counts: dict[str, int] = {}
        with self._lock:
            for place in self._places.values():
                name, version = place.program
                if name == program:
                    counts[version] = counts.get(version, 0) + 1
        return counts

    def result(self, key: str) -> bytes:
        """The result of a program that is here."""
        place = self._places[key]
        data = os.pread(self._fd, place.length, place.offset)
        return bytes(self._decode(data, place.offset).result)

    def put(self, record: Record) -> None:
        """Append a record, which replaces an earlier one of the same key.

        After close() it does nothing: a program that was left behind came too late.
        """
        if self._sync_error:
            raise StoreError(self._sync_error)
        data = _encoder.encode(record) + b"\n"
        with self._lock:
            if self._fd < 0:
                return
            try:
                written = os.pwrite(self._fd, data, self._end)
            except OSError as error:
                raise StoreError(f"{self.path}: {error.strerror}") from error
            if written != len(data):
                os.ftruncate(self._fd, self._end)
                raise StoreError(
                    f"{self.path}: wrote {written} of {len(data)} bytes; is the disk "
                    "full?"
                )
            self._account(record, self._end, len(data))
            self._end += len(data)

    def commit_sometimes(self) -> None:
        """Commit, unless the last time was less than a second ago."""
        if time.monotonic() - self._synced_at >= COMMIT_EVERY_S:
            self.commit()

    def commit(self) -> None:
        """Make everything put so far survive a power cut.

        Where the disk fails at this, put() and close() raise from then on: the system
        tells of lost data only once.
        """
        with self._sync_lock:
            end = self._end
            if end != self._synced and self._fd >= 0:
                try:
                    os.fdatasync(self._fd)
                except OSError as error:
                    self._sync_error = f"{self.path}: {error.strerror}"
                self._synced = end
            self._synced_at = time.monotonic()

    def close(self) -> None:
        self.commit()
        with self._sync_lock, self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
        if self._sync_error:
            raise StoreError(self._sync_error)

    def _account(self, record: Record, offset: int, length: int) -> None:
        program = (record.program, record.version)
        # One tuple for all records of a program: there may be very many.
        program = self._programs.setdefault(program, program)
        self._places[record.key] = _Place(offset, length, record.ok, program)

    def _recover(self) -> int:
        """Read the file back; return the offset of its end."""
        offset = 0
        size = os.fstat(self._fd).st_size
        with open(self.path, "rb") as log:
            for data in log:
                try:
                    record = self._decode(data, offset)
                except StoreError:
                    if offset + len(data) == size:
                        break
                    raise
                self._account(record, offset, len(data))
                offset += len(data)
        os.ftruncate(self._fd, offset)
        return offset

    def _decode(self, data: bytes, offset: int) -> Record:
        try:
            if not data.endswith(b"\n"):
                raise ValueError
            return _decoder.decode(data)
        except (ValueError, msgspec.DecodeError):
            raise StoreError(
                f"{self.path}: the record at byte {offset} cannot be read; the file was "
                "changed by something else. Remove it to start the job again."
            ) from None


class ProgramJob:
    """A job of programs that has a name, so that it can be gone on with.

    Args:
        name: letters, digits, ``.``, ``_`` and ``-``.
        directory: where its log is kept; None for the user's data directory.
        retry_failed: whether programs that failed are run again.

    Raises:
        ConfigError: the name cannot be that of a file.
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
        """The job's log, shared by all who hold it in this process at a time.

        Raises:
            StoreError: another process works on this job, or its log is unusable.
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
                    "wait until that has ended, or give this run another job name."
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
