"""Bring a job's input into one local file of batch lines, and know where each is from.

A single local file of batch lines is used where it lies. Anything else becomes
``input.jsonl`` in a directory of the job, beside ``input.json``, which says what it was
made of: while that is what the user names, nothing is fetched or read again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from tqdm import tqdm

from ..errors import InputError, StoreError
from ..store.files import atomic_write
from . import remote
from .compression import DAMAGED, open_plain
from .datasets import rows_of_dataset
from .sources import (
    STDIN,
    InputOptions,
    check_kind,
    identity,
    is_dataset,
    is_stream,
    is_used_in_place,
    plain_suffix,
    shown,
)
from .tables import Row, rows_of_file
from .template import Template
from .values import NotJson, text_of

_BOM = b"\xef\xbb\xbf"


class Part(msgspec.Struct, frozen=True):
    """The lines that one input became.

    first: number of its first line in the whole, from 1.
    rows: whether they were rows, counted from 0, not lines, counted from 1.
    """

    name: str
    first: int
    rows: bool


class Manifest(msgspec.Struct):
    """What a staged input was made of, and what came of it."""

    asked: dict[str, Any]
    sha256: str
    size: int
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class LocalInput:
    """A job's input as one local file of batch lines.

    path: the file; of a finished job it may be gone.
    title: what messages call the input as a whole.
    parts: where lines are from; none where the file is the user's own.
    staged_sha256: of the file, where it is a copy; None where it is the user's own.
    """

    path: Path
    title: str
    parts: tuple[Part, ...] = ()
    staged_sha256: str | None = None

    def line_name(self, line: int) -> str:
        """What messages call a line, by its number from 1."""
        if not self.parts:
            return f"line {line}"
        place = bisect_right(self.parts, line, key=lambda part: part.first) - 1
        part = self.parts[place]
        number = line - part.first
        where = f"row {number}" if part.rows else f"line {number + 1}"
        return f"{part.name}, {where}"

    def sha256(self) -> str:
        """Of the file's content, in hexadecimal."""
        if self.staged_sha256 is not None:
            return self.staged_sha256
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class Staging:
    """The directory into which an input is brought."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "input.jsonl"
        self._manifest_path = directory / "input.json"

    def bring(self, options: InputOptions, *, afresh: bool = False) -> LocalInput:
        """The input as a local file, made now or found from an earlier run.

        Args:
            options: what the user names; was checked.
            afresh: take nothing from an earlier run.

        Raises:
            InputError: an input cannot be read; the message names file and place.
            ConfigError: an option or a missing package stands in the way.
        """
        if is_used_in_place(options):
            return LocalInput(Path(options.names[0]), options.names[0])
        found = None if afresh else self.found(options)
        if found is not None and self._is_whole(found):
            return self._as_local(options, found)
        manifest = self._make(options)
        with atomic_write(self._manifest_path) as file:
            file.write(msgspec.json.encode(manifest))
        return self._as_local(options, manifest)

    def found(self, options: InputOptions) -> Manifest | None:
        """What an earlier run made of the same input; its file may be gone."""
        if any(map(is_stream, options.names)):
            return None  # the same name, but who knows what comes this time
        try:
            found = msgspec.json.decode(self._manifest_path.read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError):
            return None
        return found if found.asked == _asked(options) else None

    def drop_copy(self) -> None:
        """Remove the copied input, and keep what it was made of."""
        self.path.unlink(missing_ok=True)

    def _is_whole(self, manifest: Manifest) -> bool:
        return self.path.is_file() and self.path.stat().st_size == manifest.size

    def _as_local(self, options: InputOptions, manifest: Manifest) -> LocalInput:
        return LocalInput(
            self.path, options.title, tuple(manifest.parts), manifest.sha256
        )

    def _make(self, options: InputOptions) -> Manifest:
        asked = _asked(options)  # before reading: a change meanwhile must be noticed
        self._manifest_path.unlink(missing_ok=True)
        downloads = self.directory / "downloads"
        shutil.rmtree(downloads, ignore_errors=True)
        for half in self.directory.glob(f".{self.path.name}.*.tmp"):
            half.unlink()  # of a run that was killed
        downloads.mkdir()
        try:
            with atomic_write(self.path) as file:
                lines = _Lines(file, options.max_requests)
                for number, name in enumerate(options.names):
                    if lines.full:
                        break
                    _add(lines, number, name, options, downloads)
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error}") from None
        finally:
            shutil.rmtree(downloads, ignore_errors=True)
        return Manifest(asked, lines.sha256(), lines.size, lines.parts)


def _asked(options: InputOptions) -> dict[str, Any]:
    """What decides the content of the copy, as the manifest has it."""
    asked = {
        "inputs": [identity(name) for name in options.names],
        "template": options.template.body if options.template else None,
        "url": options.url,
        "id_column": options.id_column,
        "max_requests": options.max_requests,
    }
    found: dict[str, Any] = json.loads(json.dumps(asked))
    return found


class _Lines:
    """The copy while it is written: counts, hashes, and notes where lines are from."""

    def __init__(self, file: BinaryIO, most: int | None) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._left = most
        self._num_lines = 0
        self.size = 0
        self.num_requests = 0
        self.parts: list[Part] = []

    @property
    def full(self) -> bool:
        """Whether there are as many requests as asked for."""
        return self._left is not None and self._left <= 0

    def begin(self, name: str, *, rows: bool) -> None:
        """What follows is from the input ``name``."""
        self.parts.append(Part(name, self._num_lines + 1, rows))

    def add(self, line: bytes) -> None:
        """Another line; it ends with a newline."""
        self._file.write(line)
        self._hash.update(line)
        self.size += len(line)
        self._num_lines += 1
        if not line.isspace():
            self.num_requests += 1
            if self._left is not None:
                self._left -= 1

    def sha256(self) -> str:
        return self._hash.hexdigest()


def _add(
    lines: _Lines, number: int, name: str, options: InputOptions, downloads: Path
) -> None:
    """Add what one input holds."""
    if is_dataset(name):
        assert options.template is not None, "checked before"
        rows = rows_of_dataset(name, _columns(options.template, options.id_column))
        _add_rows(lines, name, rows, options)
        return
    path = Path(name)
    if remote.is_url(name):
        path = downloads / f"{number}{plain_suffix(name)}"
        remote.fetch(name, path)
    elif is_stream(name):
        path = downloads / f"{number}"
        _copy_stream(name, path)
    check_kind(name, path, options)
    try:
        if options.template is None:
            _add_lines(lines, shown(name), path)
        else:
            columns = _columns(options.template, options.id_column)
            rows = rows_of_file(shown(name), path, columns)
            _add_rows(lines, shown(name), rows, options)
    except DAMAGED as error:
        raise InputError(f"{shown(name)} is damaged: {error}.") from None
    finally:
        if path.parent == downloads:
            path.unlink(missing_ok=True)


def _copy_stream(name: str, path: Path) -> None:
    with open(path, "wb") as file:
        if name == STDIN:
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        else:
            with open(name, "rb") as stream:
                shutil.copyfileobj(stream, file, 1 << 20)


def _add_lines(lines: _Lines, name: str, path: Path) -> None:
    """Copy batch lines as they are; blank ones too, so that numbers stay right."""
    lines.begin(name, rows=False)
    with open_plain(path) as file:
        for number, line in enumerate(file):
            if number == 0:
                line = line.removeprefix(_BOM)
            lines.add(line if line.endswith(b"\n") else line + b"\n")
            if lines.full:
                return


def _add_rows(
    lines: _Lines, name: str, rows: Iterator[Row], options: InputOptions
) -> None:
    template = options.template
    assert template is not None, "checked before"
    lines.begin(name, rows=True)
    start = f'{{"method": "POST", "url": {json.dumps(options.url)}, "custom_id": '
    # Not at once: what is wrong with a table mostly shows at its first row.
    with tqdm(desc=f"Reading {name}", unit="row", dynamic_ncols=True, delay=1) as bar:
        for number, row in enumerate(rows):
            try:
                custom_id = _custom_id(row, options.id_column, lines.num_requests)
                body = template.fill(row)
            except InputError as error:
                raise InputError(f"{name}, row {number}: {error}") from None
            line = f'{start}{json.dumps(custom_id)}, "body": {body}}}\n'
            lines.add(line.encode())
            bar.update()
            if lines.full:
                break
    with suppress(AttributeError):
        rows.close()  # type: ignore[attr-defined]


def _custom_id(row: Row, column: str | None, number: int) -> str:
    """The id column as text, else the row's number over all inputs, from 0."""
    if column is None:
        return str(number)
    try:
        found = text_of(row[column])
    except NotJson as error:
        raise InputError(f"column {column!r} holds {error}") from None
    if not found:
        raise InputError(f"column {column!r} is empty; --id-column needs a value.")
    return found


def _columns(template: Template, id_column: str | None) -> frozenset[str]:
    return template.columns | ({id_column} if id_column is not None else set())
