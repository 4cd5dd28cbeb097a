"""The rows of a job on disk, until the order of their fields is found.

A table is read once. Its rows wait here as lines cut around their fields, and are then
written in the order that :mod:`.field_sample` finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

import msgspec
from tqdm import tqdm

from ..json_lines import json_line
from .field_sample import FieldSample, FieldSaving
from .template import RowRequests, SplitLine

# Fewer rows take no time worth a progress bar.
_QUIET_ROWS = 10_000


class SplitRows:
    """Lines cut around their fields, in a temporary file.

    Args:
        file: an empty file, open for reading and writing.
        requests: their template has a block.
        max_requests: the job is full at this many rows. None: never.
    """

    def __init__(
        self, file: BinaryIO, requests: RowRequests, max_requests: int | None
    ) -> None:
        template = requests.template
        assert template.block is not None
        self._file = file
        self._requests = requests
        self._max_requests = max_requests
        self._sample = FieldSample(len(template.block.fields), head=template.has_head)
        self._sources: list[tuple[str, int]] = []  # and the number of its first row
        self.num_requests = 0

    @property
    def full(self) -> bool:
        return self._max_requests is not None and (
            self.num_requests >= self._max_requests
        )

    def begin(self, title: str, *, rows: bool) -> None:
        """The rows that follow come from this source."""
        self._sources.append((title, self.num_requests))

    def add(self, line: SplitLine) -> None:
        """The next row."""
        self._file.write(json_line(line))
        self._sample.add(line.head, line.fields)
        self.num_requests += 1

    def write(
        self,
        begin: Callable[[str], None],
        add: Callable[[bytes], None],
        add_own: Callable[[bytes], object] | None = None,
    ) -> FieldSaving:
        """Find the order of the fields of each row, and write the lines.

        Args:
            begin: told the title of each source before its lines.
            add: given each line.
            add_own: given each line in the template's own order.
        """
        with tqdm(
            desc="Ordering fields",
            total=self.num_requests,
            unit="row",
            dynamic_ncols=True,
            disable=self.num_requests < _QUIET_ROWS,
        ) as bar:
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
