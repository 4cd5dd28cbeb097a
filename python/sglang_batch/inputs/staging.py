"""Stage a job's input: turn any sources into one local file of batch lines.

A single local file of batch lines is used in place. Any other input is copied to
``input.jsonl`` in the job's directory. ``input.json`` next to it records the sources, so
that a later run with the same sources fetches and reads nothing again.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from glob import escape
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import msgspec

from ..batch_api.lines import LineRules
from ..errors import InputError, StoreWriteError
from ..request import json_line
from ..store.files import atomic_write
from .field_sample import FieldSample, FieldSaving
from .job_input import JobInput, LocalFileSource
from .local_input import LocalInput, Part, late_bar
from .tables import Row
from .template import RowRequests, SplitLine


class Manifest(msgspec.Struct):
    """The record of a staged file and its sources.

    ``asked`` is the fingerprint of the input, ``sha256`` hexadecimal and ``size``
    in bytes.
    """

    asked: dict[str, Any]
    sha256: str
    size: int
    parts: list[Part]
    fields: FieldSaving | None = None


class Staging:
    """The staged input in a job's directory.

    If the order of fields is optimized, ``own_order`` gets the lines in the
    template's own order.
    """

    def __init__(self, directory: Path, own_order: Path | None = None) -> None:
        self.directory = directory
        self._own_order = own_order
        self.path = directory / "input.jsonl"
        self._manifest_path = directory / "input.json"

    def stage(self, job_input: JobInput, *, afresh: bool = False) -> LocalInput:
        """The input as a local file, staged now or, unless ``afresh``, by an earlier run.

        Raises InputError with source and line, ConfigError for an option or a
        missing package, StoreWriteError if the copy cannot be written.
        """
        if (plain_file := job_input.plain_file) is not None:
            return LocalInput(plain_file, job_input.sources[0].title)
        manifest = None if afresh else self._earlier(job_input)
        size = self.path.stat().st_size if self.path.is_file() else -1
        if manifest is None or manifest.size != size:
            manifest = self._make(job_input)
            with atomic_write(self._manifest_path) as file:
                file.write(msgspec.json.encode(manifest))
        return LocalInput(
            self.path,
            job_input.title,
            tuple(manifest.parts),
            manifest.sha256,
            manifest.fields,
        )

    def earlier_sha256(self, job_input: JobInput) -> str | None:
        """The digest of the file that an earlier run staged, and that may be gone. None: it
        had another input."""
        found = self._earlier(job_input)
        return None if found is None else found.sha256

    def _earlier(self, job_input: JobInput) -> Manifest | None:
        if not job_input.repeatable:
            return None  # the same name may give other content this time
        try:
            found = msgspec.json.decode(self._manifest_path.read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError):
            return None
        return found if found.asked == job_input.fingerprint() else None

    def drop_copy(self) -> None:
        self.path.unlink(missing_ok=True)

    def _make(self, job_input: JobInput) -> Manifest:
        for source in job_input.sources:
            source.check_exists()
        # Before reading, so that a change during the read is noticed next time.
        fingerprint = job_input.fingerprint()
        self._manifest_path.unlink(missing_ok=True)
        scratch = self.directory / "downloads"
        shutil.rmtree(scratch, ignore_errors=True)
        for half in self.directory.glob(f".{escape(self.path.name)}.*.tmp"):
            half.unlink()  # from a run that was killed
        scratch.mkdir()
        try:
            with atomic_write(self.path) as file:
                staged = _StagedFile(file, job_input.max_requests)
                saving = _copy_sources(job_input, staged, scratch, self._own_order)
        except OSError as error:
            raise StoreWriteError(f"cannot write {self.path}: {error}") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return Manifest(
            fingerprint, staged.digest.hexdigest(), staged.size, staged.parts, saving
        )


# Rows that show whether a mistake is the template's.
_FIRST_ROWS = 3


def check_template(job_input: JobInput, rules: LineRules) -> None:
    """Check the requests for the first rows of a local table, before all are read.

    Raises InputError if they are all bad for one reason, which is the template's.
    """
    source = job_input.sources[0]
    if job_input.template is None or not isinstance(source, LocalFileSource):
        return
    most = min(_FIRST_ROWS, job_input.max_requests or _FIRST_ROWS)
    few = JobInput((source,), job_input.template, job_input.endpoint, max_requests=most)
    with TemporaryDirectory(prefix="sglang-batch-") as scratch:
        local = Staging(Path(scratch)).stage(few)
        requests = local.requests(rules, skip_invalid=True)
        with requests.closing():
            errors = {(each.code, each.message) for each in requests.invalid.values()}
            bad = len(requests.invalid) == len(requests)
    if bad and len(errors) == 1 and (error := errors.pop())[0] != "model_not_found":
        endpoint = job_input.endpoint
        raise InputError(
            f"the template makes no valid request for --url {endpoint}: {error[1]}"
        )


class _Limited:
    """Takes requests until there are as many as the user wants. None: all."""

    def __init__(self, max_requests: int | None) -> None:
        self._max_requests = max_requests
        self.num_requests = 0

    @property
    def full(self) -> bool:
        most = self._max_requests
        return most is not None and self.num_requests >= most


class _StagedFile(_Limited):
    """The staged file as it is written: its size, digest, and parts by source."""

    def __init__(self, file: BinaryIO, max_requests: int | None) -> None:
        super().__init__(max_requests)
        self._file = file
        self.digest = hashlib.sha256()
        self._num_lines = 0
        self._is_blank = True
        self.size = 0
        self.parts: list[Part] = []

    def begin(self, title: str, *, rows: bool) -> None:
        self.parts.append(Part(title, self._num_lines + 1, rows))

    def add(self, line: bytes) -> None:
        """Append a line, or the next piece of one. Blank lines are no requests."""
        self._file.write(line)
        self.digest.update(line)
        self.size += len(line)
        self._is_blank = self._is_blank and line.isspace()
        if line.endswith(b"\n"):
            self._num_lines += 1
            self.num_requests += not self._is_blank
            self._is_blank = True


def _copy_sources(
    job_input: JobInput, staged: _StagedFile, scratch: Path, own_order: Path | None
) -> FieldSaving | None:
    if job_input.template is None:
        for source in job_input.sources:
            if staged.full:
                break
            staged.begin(source.title, rows=False)
            with closing(source.lines(scratch)) as lines:
                for line in lines:
                    staged.add(line)
                    if staged.full:
                        break
        return None
    requests = RowRequests(job_input.template, job_input.endpoint, job_input.id_column)
    if not job_input.optimize_fields:
        _copy_rows(
            job_input,
            requests.columns,
            staged,
            lambda row: staged.add(requests.line(row, staged.num_requests)),
            scratch,
        )
        return None
    with open(scratch / "rows", "w+b") as file:
        split = SplitRows(file, requests, job_input.max_requests)
        _copy_rows(job_input, requests.columns, split, split.add_row, scratch)
        begin = partial(staged.begin, rows=True)
        if own_order is None:
            return split.write(begin, staged.add)
        with open(own_order, "wb") as own:
            return split.write(begin, staged.add, own.write)


def _copy_rows(
    job_input: JobInput,
    columns: frozenset[str],
    into: _StagedFile | SplitRows,
    add: Callable[[Row], None],
    scratch: Path,
) -> None:
    for source in job_input.sources:
        if into.full:
            return
        title = source.title
        into.begin(title, rows=True)
        with closing(source.rows(columns, scratch)) as rows:
            # A table at a URL is fetched before its first row, with a bar of its own, and
            # an unusable table mostly fails there.
            first = list(islice(rows, 1))
            bar = late_bar(chain(first, rows), desc=f"Reading {title}", unit="row")
            for number, row in enumerate(bar):
                try:
                    add(row)
                except InputError as error:
                    raise InputError(f"{title}, row {number}: {error}") from None
                if into.full:
                    return


class SplitRows(_Limited):
    """Lines cut around the block of their template, in a temporary file."""

    def __init__(
        self, file: BinaryIO, requests: RowRequests, max_requests: int | None
    ) -> None:
        super().__init__(max_requests)
        template = requests.template
        assert template.block is not None
        self._file = file
        self._requests = requests
        self._sample = FieldSample(len(template.block.fields), head=template.has_head)
        self._sources: list[tuple[str, int]] = []  # and the number of its first row

    def begin(self, title: str, *, rows: bool) -> None:
        self._sources.append((title, self.num_requests))

    def add_row(self, row: Row) -> None:
        line = self._requests.split_line(row, self.num_requests)
        self._file.write(json_line(line))
        self._sample.add(line.head, line.fields)
        self.num_requests += 1

    def write(
        self,
        begin: Callable[[str], None],
        add: Callable[[bytes], None],
        add_own: Callable[[bytes], object] | None = None,
    ) -> FieldSaving:
        """Find and write the order of fields of each row, and the template's own."""
        total = self.num_requests
        with late_bar(desc="Ordering fields", total=total, unit="row") as bar:
            order_of, saving = self._sample.orders()
            decoder = msgspec.json.Decoder(SplitLine)
            sources = self._sources[::-1]
            self._file.seek(0)
            for number, encoded in enumerate(self._file):
                while sources and sources[-1][1] == number:
                    begin(sources.pop()[0])
                line = decoder.decode(encoded)
                order = order_of(number, line.head, line.fields)
                add(self._requests.joined(line, order))
                if add_own is not None:
                    add_own(self._requests.joined(line, range(len(order))))
                bar.update()
        for title, _ in reversed(sources):  # of no row
            begin(title)
        return saving
