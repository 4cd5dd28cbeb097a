"""Batch input files: one pass that checks every line, then random access by line.

Lines end at ``\\n`` only (JSON allows a bare ``\\r`` as white space), a leading
UTF-8 byte order mark is dropped, and blank lines are skipped. The pass streams:
memory grows by about 70 bytes per line, however long the lines are, and by about 200
per bad line that is kept.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..request import BatchRequestInput
from .lines import (
    InvalidLine,
    LineError,
    LineRules,
    check_line,
    decode_envelope,
    is_custom_id,
    model_of,
)
from .protocol import MAX_LINE_BYTES, canonical_url

_BOM = b"\xef\xbb\xbf"
_DIGEST_BYTES = 16
# Lines between two reports of progress.
_REPORT_EVERY = 512
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileErrors:
    """Why a file cannot run: its first errors, and the number of each code.

    alike: the first errors that differ in more than the line, and the number of each.
    """

    listed: list[LineError]
    by_code: Counter[str]
    alike: list[tuple[LineError, int]] = field(default_factory=list)
    num_bad_lines: int = 0
    num_lines: int = 0

    @classmethod
    def of(cls, code: str, message: str, param: str | None = None) -> FileErrors:
        """One error of the file as a whole."""
        error = LineError(code, message, None, param)
        return cls([error], Counter([code]), [(error, 1)])

    @property
    def total(self) -> int:
        """The number of errors, listed or not."""
        return self.by_code.total()


class BatchFile:
    """A checked input file: its requests by index, read from disk on demand.

    ``invalid`` has the first error of each bad line, if these were to be kept.
    """

    def __init__(
        self,
        path: Path,
        starts: array[int],
        ends: array[int],
        invalid: dict[int, LineError] | None = None,
    ) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._starts = starts
        self._ends = ends
        self.invalid = invalid or {}

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> BatchRequestInput:
        found = decode_envelope(self._line(index))
        url = canonical_url(found["url"])
        return BatchRequestInput(index, found["custom_id"], url, found["body"])

    def custom_id(self, index: int) -> str | None:
        """The ``custom_id`` of a line that may be bad, or None if it has none."""
        try:
            found = decode_envelope(self._line(index)).get("custom_id")
        except InvalidLine:
            return None
        return found if is_custom_id(found) else None

    def model(self) -> str | None:
        """The model that the first request names."""
        if not len(self):
            return None
        first = self[0]
        model = model_of(first.url, first.body)
        return model if isinstance(model, str) else None

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close the file when the block ends."""
        try:
            yield
        finally:
            os.close(self._fd)

    def _line(self, index: int) -> bytes:
        start, end = self._starts[index], self._ends[index]
        return os.pread(self._fd, end - start, start)


def validate(
    path: Path,
    rules: LineRules,
    *,
    skip_invalid: bool = False,
    on_read: Callable[[int], object] = lambda _: None,
) -> BatchFile | FileErrors:
    """Check every line of a file, in one pass.

    One bad line rejects the whole file, as at OpenAI, and so does an empty file,
    unless bad lines are kept with ``skip_invalid``. ``on_read`` is called now and
    then with the number of bytes read so far.
    """
    checked = _CheckedLines(rules, skip_invalid)
    with open(path, "rb") as file:
        for number, start, line in read_lines(file):
            checked.add(number, start, line)
            if number % _REPORT_EVERY == 0:
                on_read(start + len(line))
    checked.check_duplicates()
    if skip_invalid:
        return BatchFile(path, checked.starts, checked.ends, checked.invalid)
    if not checked.starts:
        return FileErrors.of(
            "empty_file",
            "The input file is empty. Please ensure that the batch contains at least "
            "one request.",
        )
    if checked.by_code:
        return checked.errors()
    return BatchFile(path, checked.starts, checked.ends)


class _CheckedLines:
    """The lines of a file as they are checked: where they are, and their errors."""

    def __init__(self, rules: LineRules, skip_invalid: bool) -> None:
        self._rules = rules
        self._skip_invalid = skip_invalid
        self.starts, self.ends = array("q"), array("q")
        self._numbers = array("q")
        self._digests = bytearray()
        self._bad = bytearray()
        self._listed: list[LineError] = []
        self._duplicates: list[LineError] = []
        self._alike: dict[LineError, tuple[LineError, int]] = {}
        self.by_code: Counter[str] = Counter()
        self.invalid: dict[int, LineError] = {}

    def add(self, number: int, start: int, line: bytes) -> None:
        errors: list[LineError] = []
        found = check_line(number, line, self._rules, errors)
        self.starts.append(start)
        self.ends.append(start + len(line))
        self._numbers.append(number)
        # A bad line that is kept as such leaves its id to a good one.
        custom_id = None if errors and self._skip_invalid else found.get("custom_id")
        name = f"id {custom_id}" if is_custom_id(custom_id) else f"line {number}"
        digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES)
        self._digests += digest.digest()
        self._bad.append(bool(errors))
        for error in errors:
            self._count(len(self.starts) - 1, error, self._listed)

    def check_duplicates(self) -> None:
        """Add an error for every line with the custom_id of an earlier line."""
        for index, earlier in _repeated(self._digests):
            earlier_name = self._rules.line_name(self._numbers[earlier])
            error = LineError(
                "duplicate_custom_id",
                f"The custom_id of this request is that of {earlier_name} too; "
                "custom ids must be unique in a batch.",
                self._numbers[index],
                "custom_id",
            )
            self._bad[index] = True
            self._count(index, error, self._duplicates)

    def errors(self) -> FileErrors:
        in_order = heapq.merge(
            self._listed, self._duplicates, key=lambda error: error.line or 0
        )
        listed = list(islice(in_order, self._rules.max_errors))
        alike = sorted(self._alike.values(), key=lambda found: found[0].line or 0)
        num_bad, num_lines = sum(self._bad), len(self.starts)
        return FileErrors(listed, self.by_code, alike, num_bad, num_lines)

    def _count(self, index: int, error: LineError, listed: list[LineError]) -> None:
        self.by_code[error.code] += 1
        if self._skip_invalid:
            self.invalid.setdefault(index, error)
            return
        if len(listed) < self._rules.max_errors:
            listed.append(error)
        anywhere = replace(error, line=None)
        first, number = self._alike.get(anywhere, (error, 0))
        if number or len(self._alike) < self._rules.max_errors:
            self._alike[anywhere] = first, number + 1


def read_lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, offset, bytes) of every line that is not blank.

    A line that is too long is cut one byte behind the limit, so that it is known as one.
    """
    offset = 0
    read_line = partial(file.readline, MAX_LINE_BYTES + 1)
    for number, line in enumerate(iter(read_line, b""), start=1):
        start = offset
        offset += len(line)
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            for rest in iter(partial(file.readline, _BLOCK_BYTES), b""):
                offset += len(rest)
                if rest.endswith(b"\n"):
                    break
        if number == 1 and line.startswith(_BOM):
            start += len(_BOM)
            line = line[len(_BOM) :]
        if line.strip():
            yield number, start, line.rstrip(b"\n")


def count_lines(file: BinaryIO) -> int:
    """The number of lines that are not blank. Takes a few MB, however long they are."""
    count = 0
    begun = False  # whether the present line has more than white space so far
    while block := file.read(_BLOCK_BYTES):
        *ended, rest = block.split(b"\n")
        for line in ended:
            count += begun or bool(line.strip())
            begun = False
        begun = begun or bool(rest.strip())
    return count + begun


def _repeated(digests: bytearray) -> Iterator[tuple[int, int]]:
    """The positions of every digest that came before, and of its first occurrence."""
    if not digests:
        return
    ids = np.frombuffer(digests, dtype=f"V{_DIGEST_BYTES}")
    in_order = np.sort(ids)
    if not (in_order[1:] == in_order[:-1]).any():
        return  # the usual case: finding the lines takes three times the memory
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    for position in np.flatnonzero(first[inverse] != np.arange(len(ids))):
        yield int(position), int(first[inverse[position]])
