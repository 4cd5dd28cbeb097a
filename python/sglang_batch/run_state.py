"""The state of a ``sglang-batch run`` job: its directory, its record, its results."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from .errors import InputError, StoreError
from .run_outputs import Outputs
from .store.files import atomic_write
from .store.lock import FileLock
from .store.result_log import ResultLog
from .summary import Summary


class JobRecord(msgspec.Struct, kw_only=True):
    """What a job is; a later run must be the same job to continue it."""

    input_sha256: str
    model: str
    num_requests: int
    complete: bool = False
    uploaded: bool = False
    summary: dict[str, Any] | None = None


class JobState:
    """The job's directory, held against other runs for the length of the block.

    At its end the directory is removed again where nothing in it is of use: no job
    began, and no input that was costly to fetch lies there.

    Attributes:
        directory: ``<output>.job``.
        record: of the job, once :meth:`begin` was called.
        log: what is finished; open after :meth:`open_log`.
    """

    record: JobRecord
    log: ResultLog

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs
        self.directory = outputs.job_directory
        self._record_path = self.directory / "job.json"
        self._log_path = self.directory / "results.jsonl"
        self._lock = FileLock(self.directory / "lock")
        self._log_open = False

    def __enter__(self) -> JobState:
        remote = self.outputs.output.is_remote
        try:
            self.directory.mkdir(exist_ok=True, parents=remote)
            holder = self._lock.acquire("another sglang-batch run")
        except OSError as error:
            raise StoreError(f"cannot write {self.directory}: {error}") from None
        if holder is not None:
            raise StoreError(f"{self.directory} is in use by {holder}.")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._log_open:
            self.log.close()
        staged = (self.directory / "input.json").exists()
        began = self._record_path.exists()
        # An input found bad is read again next time: it was changed by then.
        if not began and (isinstance(error, InputError) or not staged):
            shutil.rmtree(self.directory, ignore_errors=True)
            if self.outputs.output.is_remote:
                with suppress(OSError):  # of this output alone, and empty now
                    self.directory.parent.rmdir()
        self._lock.release()

    def is_finished(self, input_sha256: str) -> bool:
        """Whether a job on this input ended, with nothing left to do."""
        try:
            found = self._found()
        except StoreError:
            return False
        return (
            found is not None
            and found.complete
            and found.input_sha256 == input_sha256
            and self._output_is_there(found)
        )

    def check_output(self) -> None:
        """Raises StoreError where the output is there and no job of ours wrote it."""
        path = self.outputs.output.path
        if self._found() is None and path.exists():
            raise StoreError(
                f"{path} exists and no job of ours wrote it; remove it, choose another "
                "output, or pass --overwrite."
            )

    def check_input(self, sha256: Callable[[], str]) -> None:
        """Raises InputError where a job was begun with another input than this one.

        Args:
            sha256: hashes the input; called only where a job was begun.
        """
        found = self._found()
        if found is not None:
            self._check_same("input file", found.input_sha256, sha256())

    def begin(self, asked: JobRecord, *, overwrite: bool) -> None:
        """Take up the job that is recorded, or begin one.

        Raises:
            InputError: the job recorded is another one.
            StoreError: the output is not ours, or the record cannot be read.
        """
        if overwrite:
            self._forget()
        self.record = self._resumed(asked)

    def _found(self) -> JobRecord | None:
        try:
            return msgspec.json.decode(self._record_path.read_bytes(), type=JobRecord)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StoreError(
                f"{self._record_path} cannot be read ({error}); "
                "pass --overwrite to start again."
            ) from None

    def _resumed(self, asked: JobRecord) -> JobRecord:
        self.check_output()
        found = self._found()
        if found is None:
            return asked
        self._check_same("input file", found.input_sha256, asked.input_sha256)
        self._check_same("--model-path", found.model, asked.model)
        # A finished job whose output is gone has nothing left: it starts again.
        return asked if found.complete and not self._output_is_there(found) else found

    def _check_same(self, what: str, before: str, now: str) -> None:
        if before != now:
            raise InputError(
                f"{self.outputs.output} was begun with another {what}: it was {before}, "
                f"now it is {now}. Restore it to continue, or pass --overwrite to start "
                "again."
            )

    def _output_is_there(self, found: JobRecord) -> bool:
        output = self.outputs.output
        return output.path.exists() or (output.is_remote and found.uploaded)

    def _forget(self) -> None:
        for path in (self._record_path, self._log_path, self.outputs.output.path):
            path.unlink(missing_ok=True)

    def open_log(self) -> None:
        """Write down what the job is, and open its results."""
        self._write_record()
        self.log = ResultLog(self._log_path, self.record.num_requests)
        self._log_open = True

    def finish(self, summary: Summary) -> None:
        """Write the output files in input order; only then is the job complete."""
        with ExitStack() as stack:
            output = stack.enter_context(self.outputs.output.writing())
            errors = output
            if self.outputs.errors is not None:
                errors = stack.enter_context(self.outputs.errors.writing())
            self.log.write_ordered(output, errors)
        self.record.complete = True
        self.record.summary = summary.as_dict()
        self._write_record()
        self.log.close()
        self.log.path.unlink()

    def upload(self) -> None:
        """Upload what goes to URLs and was not uploaded yet.

        Raises:
            StoreError: it did not work; the results stay where they are.
        """
        if self.record.uploaded or not any(f.is_remote for f in self.outputs.files):
            return
        for file in self.outputs.files:
            file.upload()
        self.record.uploaded = True
        self._write_record()
        for file in self.outputs.files:
            file.drop_copy()

    def _write_record(self) -> None:
        with atomic_write(self._record_path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.record)))
