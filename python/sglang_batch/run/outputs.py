"""The result files of ``sglang-batch run``: local, or written here and then uploaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import platformdirs

from ..errors import ConfigError, InputError
from ..inputs import urls
from ..inputs.compression import compressing
from ..inputs.job_input import JobInput
from ..store.files import atomic_write
from .answer_table import AnswerTable, check_holds_lines, is_table


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A result file.

    name: path or URL, as the user wrote it.
    path: where results are written. Those of a URL are uploaded from here in the end.
    """

    name: str
    path: Path

    def __str__(self) -> str:
        return urls.named(self.name).encode(errors="backslashreplace").decode()

    @property
    def is_remote(self) -> bool:
        """Whether the file is uploaded in the end."""
        return urls.is_url(self.name)

    def check(self, *, resumes: bool = True) -> None:
        """Raises ConfigError if the file cannot be created, or the URL not be used.

        resumes: whether it names a job, as no pipe or device can.
        """
        if self.is_remote:
            return urls.check_scheme(self.name)
        reason = None
        if os.path.isdir(self.path):
            reason = "it is a directory" if self.name else "its name is empty"
        elif resumes and os.path.exists(self.path) and not os.path.isfile(self.path):
            reason = "it is not a file, so no later run could resume the job"
        elif not self.path.parent.is_dir():
            reason = "its directory does not exist"
        elif not os.access(self.path.parent, os.W_OK):
            reason = "its directory is not writable"
        if reason is not None:
            raise ConfigError(f"cannot write {self.path}: {reason}.")

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """A writer, compressed by the suffix of the name.

        The file appears only when the block ends without an error.
        """
        with (
            atomic_write(self.path) as file,
            compressing(file, self.path.name) as writer,
        ):
            yield writer

    def upload(self) -> None:
        """Upload the file if it is for a URL; raises StoreError."""
        if self.is_remote:
            urls.upload(self.path, self.name)

    def drop_copy(self) -> None:
        """Remove the local copy of an uploaded file."""
        if self.is_remote:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The result files of a job.

    errors: the file for lines answered with an error. None: they are in ``output``.
    table: how to write ``output``, if it is a table.
    """

    output: OutputFile
    errors: OutputFile | None
    table: AnswerTable | None = None

    @classmethod
    def of(cls, output: str, errors: str | None, upload_dir: Path | None) -> Outputs:
        """The outputs of these paths or URLs.

        Args:
            upload_dir: directory for jobs with a URL as output. None: in the user's
                cache.
        """
        if "-" in (output, errors):
            raise ConfigError(
                "results cannot go to standard output: a job is resumed by the "
                "name of its output file. Name a file."
            )
        parent = upload_dir or platformdirs.user_cache_path("sglang-batch") / "run"
        found = cls(_file(output, parent / urls.fingerprint(output), "output"), None)
        if errors is None:
            return found
        return cls(found.output, _file(errors, found.job_directory, "errors"))

    def of_input(self, job_input: JobInput) -> Outputs:
        """The outputs with a table, if their name asks for one. Raises ConfigError if the
        input has no columns for it."""
        if not is_table(self.output.path):
            for file in self.files:
                check_holds_lines(file.path)
            return self
        if self.errors is not None:
            raise ConfigError(
                f"{self.output} has the errors in a column: drop --error-file."
            )
        return replace(self, table=AnswerTable.of(job_input, self.output.path))

    @property
    def files(self) -> list[OutputFile]:
        return [self.output] if self.errors is None else [self.output, self.errors]

    @property
    def job_directory(self) -> Path:
        return self.output.path.with_name(self.output.path.name + ".job")

    def check(self, job_input: JobInput) -> None:
        """Look for errors in the names, before anything runs.

        Raises:
            InputError: two of the inputs and outputs are the same file, or the columns of an
                input cannot be read.
            ConfigError: a file cannot be created, a scheme of a URL cannot be used, or a
                column of a table would be there twice.
        """
        locations = [urls.location(file.name) for file in self.files]
        for file, location in zip(self.files, locations, strict=True):
            if location in job_input.locations:
                raise InputError(f"{file} is both input and output.")
        if len({*locations}) < len(self.files):
            raise InputError(f"{self.output} is both output and error file.")
        for file in self.files:
            file.check()
        if self.table is not None:
            self.table.check()


def _file(name: str, upload_from: Path, stem: str) -> OutputFile:
    name = urls.as_path(name)
    if urls.is_url(name):
        return OutputFile(name, upload_from / f"{stem}{urls.file_suffix(name)}")
    return OutputFile(name, Path(name))
