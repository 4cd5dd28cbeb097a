"""Named jobs of frontend programs, which keep results between runs."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from ..errors import ConfigError, StoreError
from ..store.files import FileLock
from .program_log import ProgramLog

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
