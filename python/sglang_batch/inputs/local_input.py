"""A job's input once it is here: one local file of batch lines."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from tqdm import tqdm

from ..batch_api.jsonl import BatchFile, FileErrors, validate
from ..batch_api.line_checks import LineError, LineRules
from ..errors import InputError
from .field_sample import FieldSaving
from .file_format import format_hint

# A pass that takes longer shows a progress bar.
_QUIET_S = 2.0


class Part(msgspec.Struct, frozen=True):
    """The lines that came from one source.

    name: title of the source.
    first: number of its first line in the staged file, from 1.
    rows: whether messages count rows from 0, or else lines from 1.
    """

    name: str
    first: int
    rows: bool


@dataclass(frozen=True, slots=True)
class LocalInput:
    """A job's input as one local file of batch lines.

    path: the file. After a finished job a staged file is gone.
    title: the input in messages.
    parts: sources of a staged file, by line. Empty for the user's own file.
    staged_sha256: digest of a staged file, in hexadecimal. None for the user's own.
    fields: what the order of fields saves, if it was optimized.
    """

    path: Path
    title: str
    parts: tuple[Part, ...] = ()
    staged_sha256: str | None = None
    fields: FieldSaving | None = None

    def requests(
        self, rules: LineRules, *, skip_invalid: bool = False, way_out: str = ""
    ) -> BatchFile:
        """The requests of the file, all validated.

        Args:
            skip_invalid: keep bad lines as such, see :func:`~.jsonl.validate`.
            way_out: ends the message of the error, unless the file is empty.

        Raises:
            InputError: lines are bad. The message has the first errors and the number
                of all.
        """
        with tqdm(
            desc=f"Checking {self.title}",
            total=self.path.stat().st_size,
            unit="B",
            unit_scale=True,
            dynamic_ncols=True,
            delay=_QUIET_S,
            leave=False,
        ) as bar:
            result = validate(
                self.path,
                replace(rules, line_name=self.line_name),
                skip_invalid=skip_invalid,
                on_read=lambda num_bytes: bar.update(num_bytes - bar.n),
            )
        if isinstance(result, BatchFile):
            return result
        refusal = self._refusal(result)
        if way_out and result.num_lines:
            refusal.append(way_out)
        raise InputError("\n".join(refusal))

    def sha256(self) -> str:
        """Digest of the file, in hexadecimal."""
        if self.staged_sha256 is not None:
            return self.staged_sha256
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def line_name(self, line: int) -> str:
        """A line in messages, by its number from 1: source and number there."""
        if not self.parts:
            return f"line {line}"
        position = bisect_right(self.parts, line, key=lambda part: part.first) - 1
        part = self.parts[position]
        number = line - part.first
        where = f"row {number}" if part.rows else f"line {number + 1}"
        return f"{part.name}, {where}"

    def described(self, error: LineError) -> str:
        """The message of an error, with the line."""
        where = "" if error.line is None else f"{self.line_name(error.line)}: "
        return where + error.message

    def _refusal(self, errors: FileErrors) -> list[str]:
        shown = [f"  {self._listed(error)}" for error in errors.listed]
        if (more := errors.total - len(errors.listed)) > 0:
            counts = ", ".join(f"{n:,} {code}" for code, n in errors.by_code.items())
            shown.append(f"  ... and {more:,} more; in all {counts}")
        if errors.listed[0].code == "invalid_json_line" and (
            hint := format_hint(self.path)
        ):
            shown.append(hint)
        if "model_not_found" in errors.by_code:
            shown.append("Name the model of these lines with --served-model-name.")
        if not errors.num_lines:
            return [f"{self.title} cannot be run:", *shown]
        title = (
            f"{self.title} cannot be run: {errors.num_bad_lines:,} of "
            f"{errors.num_lines:,} lines cannot be used."
        )
        return [title, *shown]

    def _listed(self, error: LineError) -> str:
        where = "" if error.line is None else f"{self.line_name(error.line)}: "
        return f"{where}{replace(error, line=None)}"
