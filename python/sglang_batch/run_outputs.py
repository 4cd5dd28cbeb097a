"""Where ``sglang-batch run`` writes: files here, or URLs by way of files here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import platformdirs

from .errors import ConfigError, InputError, StoreError
from .inputs import remote
from .inputs.compression import compressing
from .inputs.sources import InputOptions, is_local_file, plain_suffix
from .store.files import atomic_write


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file of results.

    name: a path or a URL, as the user wrote it.
    path: where it is written; for a URL, what is uploaded from.
    """

    name: str
    path: Path

    @property
    def is_remote(self) -> bool:
        return remote.is_url(self.name)

    def __str__(self) -> str:
        return remote.shown(self.name) if self.is_remote else self.name

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """What writes it, compressed as its name asks; it appears when all is written."""
        with (
            atomic_write(self.path) as file,
            compressing(file, self.path.name) as writer,
        ):
            yield writer

    def upload(self) -> None:
        """Bring it to its URL, if it has one; raises StoreError."""
        if self.is_remote:
            remote.upload(self.path, self.name)

    def drop_copy(self) -> None:
        """Remove what was uploaded."""
        if self.is_remote:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The output and, if errors go elsewhere, the error file."""

    output: OutputFile
    errors: OutputFile | None

    @classmethod
    def of(cls, output: str, errors: str | None, staging: Path | None) -> Outputs:
        """The outputs of these names.

        Args:
            output: path or URL.
            errors: path or URL; None where error lines go to the output.
            staging: directory for what is uploaded; None is the user's cache.
        """
        for name in (output, errors):
            if name == "-":
                raise ConfigError(
                    "results cannot go to standard output: a job is continued by its "
                    "output file. Name a file."
                )
        base = staging or platformdirs.user_cache_path("sglang-batch") / "run"
        path = Path(output)
        if remote.is_url(output):
            directory = base / remote.fingerprint(output)
            path = directory / f"output{plain_suffix(output)}"
        found = cls(OutputFile(output, path), None)
        if errors is None:
            return found
        error_path = Path(errors)
        if remote.is_url(errors):
            error_path = found.job_directory / f"errors{plain_suffix(errors)}"
        return cls(found.output, OutputFile(errors, error_path))

    @property
    def files(self) -> list[OutputFile]:
        return [self.output] if self.errors is None else [self.output, self.errors]

    @property
    def job_directory(self) -> Path:
        """Where the job's state is while it runs."""
        return self.output.path.with_name(self.output.path.name + ".job")

    def check(self, inputs: InputOptions) -> None:
        """Look for what is wrong with the names, before anything runs.

        Raises:
            InputError: a file is both input and output.
            StoreError: a file cannot be written where it should be.
            ConfigError: a URL's scheme cannot be used here.
        """
        inputs_here = {_same(name) for name in inputs.names if is_local_file(name)}
        for file in self.files:
            if file.name in inputs.names or _same(file.name) in inputs_here:
                raise InputError(f"{file} is both input and output.")
        if len({_same(file.name) for file in self.files}) < len(self.files):
            raise InputError(f"{self.output} is both output and error file.")
        for file in self.files:
            if file.is_remote:
                remote.check_scheme(file.name)
            elif (path := file.path).is_dir() or not path.parent.is_dir():
                why = "is a directory" if path.is_dir() else "has no directory to be in"
                raise StoreError(f"cannot write {path}: it {why}.")


def _same(name: str) -> str:
    return name if remote.is_url(name) else str(Path(name).resolve())
