"""The directory of a ``sglang-batch run`` job: its lock, its record, its results."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from ..errors import (
    ConfigError,
    InputError,
    SGLangBatchError,
    StoreError,
    StoreWriteError,
)
from ..fleet.head_state import CRASHES
from ..inputs.job_input import JobInput
from ..inputs.local_input import LocalInput, describe_change
from ..inputs.urls import location
from ..request import named_job_id
from ..store.files import NAME as EPOCH
from ..store.files import FileLock, atomic_write, next_epoch
from ..store.result_log import ResultLog, finished_lines
from .answer_table import NO_OBJECT
from .model_place import served_name
from .outputs import OutputFile, Outputs
from .shared_state import PLACE, RECORD, RESULTS, SharedState, StateUrl
from .summary import Summary

ANSWER_LINES = "answers.jsonl"


class JobRecord(msgspec.Struct, kw_only=True):
    """The identity of a job, which a later run must match, and its outcome.

    input_sha256: of the batch lines, in hexadecimal.
    model: path or name of the model, as the user gave it.
    served_model: its name in requests. Empty if an earlier version began the job.
    uploaded: whether the results are at their URLs.
    summary: of a complete job.
    rows: the options that made its requests from rows, by name. None if an earlier version
        began the job.
    """

    input_sha256: str
    model: str
    num_requests: int
    served_model: str = ""
    complete: bool = False
    uploaded: bool = False
    summary: dict[str, Any] | None = None
    rows: dict[str, Any] | None = None

    def changed_options(self, job_input: JobInput) -> list[str]:
        """The options that make other requests from rows now, such as ``--template``."""
        now = job_input.row_options()
        before = now if self.rows is None else self.rows
        names = sorted(now.keys() | before.keys())
        return [name for name in names if now.get(name) != before.get(name)]


class JobDirectory:
    """A job's directory, locked against other runs for the length of a ``with`` block.

    The block removes the directory at its end if no job began, no input was staged,
    and SGLang's log explains no error, so that nothing in it is worth keeping.

    Attributes:
        path: ``<output>.job``.
        digests_path: where a run keeps the digests of its lines, to name those that change.
        earlier: the record that :meth:`restore` found.
        record: of the job, after :meth:`begin`, or that one.
        shared: its state at a URL, if it has one.
    """

    record: JobRecord

    def __init__(self, outputs: Outputs, state: StateUrl | None = None) -> None:
        self.outputs = outputs
        self.path = outputs.job_directory
        self.shared = None if state is None else SharedState(state, self.path)
        self._state = state
        self._record_path = self.path / RECORD
        self._log_path = self.path / RESULTS
        self.digests_path = self.path / "input.digests"
        self._lock = FileLock(self.path / "lock")
        self._afresh = False
        self.earlier: JobRecord | None = None
        self._log: ResultLog | None = None

    def __enter__(self) -> JobDirectory:
        remote = self.outputs.output.is_remote
        try:
            self.path.mkdir(exist_ok=True, parents=remote)
            holder = self._lock.acquire("another sglang-batch run")
        except OSError as error:
            raise StoreWriteError(f"cannot write {self.path}: {error}") from None
        if holder is not None:
            raise StoreError(f"{self.path} is in use by {holder}.")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._log is not None:
            self._log.close()
        staged = (self.path / "input.json").exists()
        began = self._record_path.exists()
        explained = isinstance(error, SGLangBatchError) and self.engine_log.exists()
        # A bad input is staged again next time, since it will have changed.
        if not began and (isinstance(error, InputError) or not (staged or explained)):
            self._remove(staged=staged)
        self._lock.release()

    @property
    def job_id(self) -> str:
        """The id of the job, the same whenever and wherever it runs."""
        place = self.outputs.output.path if self._state is None else self._state.url
        return named_job_id(str(place))

    @property
    def engine_log(self) -> Path:
        return self.path / "engine.log"

    def restore(self) -> JobRecord | None:
        """The record of an earlier job, from where ``--state`` has it. None: there is none.

        Raises:
            InputError: this directory has another job than ``--state``, or the job is
                complete and one of its files is elsewhere.
            ConfigError: the output was not written by a job, or the record cannot be
                read.
            StoreError: the state cannot be read.
        """
        if self.shared is not None:
            self.shared.restore()
        found = self.earlier = self._recorded()
        if found is not None:
            self.record = found
        for file in self.outputs.files if found is None else ():
            if file.path.exists():
                raise ConfigError(
                    f"{file.path} exists and was not written by this command; remove it, "
                    "choose another output, or pass --overwrite."
                )
        missing = self._missing(found) if found and found.complete else []
        # A job of this machine whose output was deleted starts again.
        if missing and (self.shared or self.outputs.output not in missing):
            raise InputError(
                f"the job is complete, and its output is not here: there is no {missing[0]}. "
                "Look for it on the machine that ended the job, or under the --error-file "
                "that was named then, or pass --overwrite to start again."
            )
        return found

    def is_complete(self, found: JobRecord) -> bool:
        """Whether a job is complete, and its output exists."""
        return found.complete and self.outputs.output not in self._missing(found)

    def _missing(self, found: JobRecord) -> list[OutputFile]:
        """The files of a complete job that are neither here nor uploaded."""
        files = self.outputs.files
        uploaded = [each for each in files if each.is_remote and found.uploaded]
        return [e for e in files if not (e in uploaded or e.path.exists())]

    def has_answers(self, found: JobRecord) -> bool:
        """Whether any request of a job was answered other than with an error."""
        if found.complete:
            return bool((found.summary or {}).get("completed", 1))
        if not self._has_results():
            return False
        with open(self._log_path, "rb") as log:
            end = self._log_path.stat().st_size
            return any(finished_lines(log, end, ok=True))

    def check_model(self, found: JobRecord, known: argparse.Namespace) -> None:
        """Raises InputError if a job began with another model, or name of it.

        Args:
            known: SGLang's arguments, as far as they are known without SGLang.
        """
        if not found.complete and not self._has_results():
            return  # the engine did not start, perhaps for its model
        before, now = found.model, known.model_path
        if location(before) != location(now):
            raise self.another(f"--model-path: it was {before}, now it is {now}")
        # Lines that were refused for naming another model have their answers already.
        served = found.served_model, served_name(known)
        # By default the name is the path, which may be spelled in another way.
        if served[0] and served[0] != served[1] and served != (before, now):
            raise self.another(
                f"--served-model-name: it was {served[0]}, now it is {served[1]}"
            )

    def check_input(self, found: JobRecord, local: LocalInput) -> None:
        """Raises InputError if a job began with another input; names its lines."""
        if found.input_sha256 != local.sha256():
            change = describe_change(self.digests_path, local)
            raise self.another(f"input: {change}" if change else "input")

    def another(self, difference: str) -> InputError:
        """The error of a job that began with another input, model or option."""
        return InputError(
            f"{self.outputs.output} was begun with another {difference}. Restore it to "
            "resume the job, or pass --overwrite to start again."
        )

    def epoch(self) -> int:
        """A number for this run, higher than that of all earlier ones."""
        if self.shared is None:
            return next_epoch(self.path)
        return self.shared.epoch

    def begin(self, record: JobRecord, *, overwrite: bool) -> None:
        """Resume the job that :meth:`restore` found, or begin a new one.

        With ``overwrite``, an earlier job with this output is discarded.
        """
        if overwrite:
            begun = (self._record_path, self._log_path, self.path / CRASHES)
            for path in (*begun, self.outputs.output.path):
                path.unlink(missing_ok=True)
        self.record = record
        self._afresh = overwrite
        found = None if overwrite else self.earlier
        # A finished job whose output was deleted starts again.
        if found is not None and (not found.complete or self.is_complete(found)):
            self.record = found
            found.model, found.served_model = record.model, record.served_model

    def open_log(self) -> ResultLog:
        """Write the record, and open the results. Other runs of the job end."""
        if self.shared is not None:
            self.shared.claim(afresh=self._afresh)
        self._write_record()
        self._log = ResultLog(self._log_path, self.record.num_requests)
        if self.shared is not None:
            self.shared.share()
        return self._log

    def finish(
        self, summary: Summary, unrun_line: Callable[[int], bytes] | None = None
    ) -> Summary:
        """Write the output files in input order. Only then is the job complete.

        unrun_line: see :meth:`.ResultLog.write_ordered`.

        Returns the summary, in which rows with an error in a table have failed.
        """
        assert self._log is not None, "open_log() comes first"
        with ExitStack() as stack:
            output = stack.enter_context(self.outputs.output.writing())
            errors = output
            if self.outputs.errors is not None:
                errors = stack.enter_context(self.outputs.errors.writing())
            if self.outputs.table is not None:
                lines = self.path / ANSWER_LINES  # they stay, beside the table
                with atomic_write(lines) as file:
                    self._log.write_ordered(file, file, unrun_line)
                rows = self.outputs.table.write(lines, len(self._log), output)
                summary = summary.with_failed(rows, NO_OBJECT)
            else:
                self._log.write_ordered(output, errors, unrun_line)
        self.record.complete = True
        self.record.summary = summary.as_dict()
        self._write_record()
        self._log.close()
        self._log_path.unlink()
        return summary

    def upload(self) -> None:
        """Upload the outputs that are URLs, unless an earlier run did.

        Only then is the job complete for other machines.

        Raises StoreError if an upload failed. The results stay on this machine.
        """
        if not self.record.uploaded and any(f.is_remote for f in self.outputs.files):
            for file in self.outputs.files:
                file.upload()
            self.record.uploaded = True
            self._write_record()
            for file in self.outputs.files:
                file.drop_copy()
        if self.shared is not None:
            self.shared.finish()

    def _remove(self, *, staged: bool) -> None:
        """Remove the files of a job that did not begin, and nobody else's files."""
        names = ["lock", "engine.log", "input.digests", "input.json"]
        names += ["input.jsonl"] if staged else []
        for name in (*names, EPOCH, CRASHES, PLACE):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            self.path.rmdir()
            if self.outputs.output.is_remote:  # the parent serves this output alone
                self.path.parent.rmdir()

    def _recorded(self) -> JobRecord | None:
        try:
            return msgspec.json.decode(self._record_path.read_bytes(), type=JobRecord)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{self._record_path} cannot be read ({error}); pass --overwrite to "
                "start again."
            ) from None

    def _has_results(self) -> bool:
        return self._log_path.exists() and self._log_path.stat().st_size > 0

    def _write_record(self) -> None:
        with atomic_write(self._record_path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.record)))
