"""A job's input once it is here: one local file of batch lines, and its digests."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..batch_api.jsonl import BatchFile, FileErrors, validate
from ..batch_api.lines import LineError, LineRules
from ..errors import InputError
from ..store.files import atomic_write
from .field_sample import FieldSaving

# A progress bar of what takes longer than two seconds.
late_bar = partial(tqdm, dynamic_ncols=True, delay=2.0)


class Part(msgspec.Struct, frozen=True):
    """The lines from one source, from line ``first`` of the staged file on.

    Messages count rows from 0, and lines from 1.
    """

    name: str
    first: int
    rows: bool


@dataclass(frozen=True, slots=True)
class LocalInput:
    """A job's input as one local file of batch lines.

    A staged one, which is gone after a finished job, has parts by source, a SHA-256 in hexadecimal, and the saving by the
    order of fields if that was optimized.
    """

    path: Path
    title: str
    parts: tuple[Part, ...] = ()
    staged_sha256: str | None = None
    fields: FieldSaving | None = None

    def requests(
        self, rules: LineRules, *, skip_invalid: bool = False, way_out: str = ""
    ) -> BatchFile:
        """The validated requests of the file, with ``skip_invalid`` some of them bad.

        Raises InputError with the first errors, the number of all and, unless
        the file is empty, the ``way_out``.
        """
        with late_bar(
            desc=f"Checking {self.title}",
            total=self.path.stat().st_size,
            unit="B",
            unit_scale=True,
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
        return self._where(error) + error.message

    def _refusal(self, errors: FileErrors) -> list[str]:
        shown = []
        for error, number in errors.alike:
            others = f" (and {number - 1:,} more)" if number > 1 else ""
            shown.append(f"  {self._where(error, others)}{replace(error, line=None)}")
        if (more := errors.total - sum(number for _, number in errors.alike)) > 0:
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

    def _where(self, error: LineError, others: str = "") -> str:
        return "" if error.line is None else f"{self.line_name(error.line)}{others}: "


_HEAD_BYTES = 4096
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# By the first bytes of a file. gzip and zstd are read, but not one inside the other.
_FORMATS = {
    b"\x1f\x8b": "compressed twice: decompress it once",
    b"\x28\xb5\x2f\xfd": "compressed twice: decompress it once",
    b"BZh": "compressed by bzip2: decompress it, or use gzip or zstd",
    b"\xfd7zXZ\0": "compressed by xz: decompress it, or use gzip or zstd",
    b"PK\x03\x04": "a zip archive or a workbook: name the files in it, or save it as CSV",
    b"\xd0\xcf\x11\xe0": "a workbook: save it as CSV",
    b"%PDF": "a PDF",
}


def format_hint(path: Path) -> str | None:
    """A sentence on the format of a file whose lines are not JSON, if it is known."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    for start, description in _FORMATS.items():
        if head.startswith(start):
            return f"The file seems to be {description}."
    if head.startswith(_UTF_16) or head.count(0) > len(head) // 3:
        return "The file seems to be UTF-16: save it as UTF-8."
    first = head.lstrip().partition(b"\n")[0]
    if first.startswith(b"["):
        return (
            "The file seems to be one JSON array: write one object per line, as "
            "`jq -c '.[]'` does."
        )
    if first.strip() == b"{":
        return (
            "The file seems to have objects over several lines: write one object per "
            "line, as `jq -c .` does."
        )
    if b"}\r{" in first:
        return "The lines seem to end with a carriage return alone: use \\n."
    try:
        head.decode()
    except UnicodeDecodeError as error:
        if error.end < len(head):  # else a character may be cut
            return "The file is not UTF-8: save it as UTF-8."
    return None


_DIGEST_BYTES = 8
_PIECE_BYTES = 1 << 20

Digests = NDArray[np.uint64]


def write_digests(path: Path, local: LocalInput) -> None:
    with atomic_write(path) as file:
        file.write(_digests(local.path).tobytes())


def describe_change(path: Path, local: LocalInput) -> str | None:
    """A phrase such as ``line 17 changed``, or None if nothing is known to have."""
    try:
        before = np.frombuffer(path.read_bytes(), dtype=np.uint64)
    except (OSError, ValueError):
        return None
    now = _digests(local.path)
    if len(before) == len(now):
        changed = np.flatnonzero(before != now)
        if not len(changed):
            return None
        others = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
        return f"{local.line_name(int(changed[0]) + 1)}{others} changed"
    same = _num_equal(before, now)
    same_at_end = _num_equal(before[same:][::-1], now[same:][::-1])
    gone, added = (len(each) - same - same_at_end for each in (before, now))
    where = f"after {local.line_name(same)}" if same else "at the beginning"
    if not gone:
        return f"{_lines(added)} added {where}"
    if not added:
        return f"{_lines(gone)} gone {where}"
    return f"{_lines(gone)} {where} replaced by {_lines(added)}"


def _digests(path: Path) -> Digests:
    found = bytearray()
    line = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with open(path, "rb") as file:
        piece = b"\n"
        for piece in iter(partial(file.readline, _PIECE_BYTES), b""):
            line.update(piece.removesuffix(b"\n"))
            if piece.endswith(b"\n"):
                found += line.digest()
                line = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        # A newline added to the last line is no change of it.
        if not piece.endswith(b"\n"):
            found += line.digest()
    return np.frombuffer(found, dtype=np.uint64)


def _num_equal(first: Digests, second: Digests) -> int:
    """How many items two arrays have in common before the first that differs."""
    most = min(len(first), len(second))
    differing = np.flatnonzero(first[:most] != second[:most])
    return int(differing[0]) if len(differing) else most


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"
