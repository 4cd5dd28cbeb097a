"""Offsets of the lines of a growing file, found by reading each part of it once."""

from __future__ import annotations

import os
import threading
from array import array
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

# One of this many line offsets is kept. The lines in between are read.
EVERY = 64
_BLOCK = 1 << 18
_NEWLINE = 10


class LineIndex:
    """Line offsets of one append-only file. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inode = -1
        self._start_over()

    def seek(self, file: BinaryIO, line: int) -> tuple[int, int]:
        """Seek to the beginning of a line, or to the end of the last whole one.

        Args:
            file: opened for reading, and used by the caller only.
            line: number of the line, from 0.

        Returns:
            The present number of whole lines, and the offset of their end.
        """
        with self._lock:
            self._read_more(file)
            num_lines, end = self._num_lines, self._end
            line = min(line, num_lines)
            offset = self._offsets[line // EVERY]
        file.seek(offset)
        for _ in range(line % EVERY):
            file.readline()
        return num_lines, end

    def _start_over(self) -> None:
        self._offsets = array("q", [0])
        self._num_lines = 0
        self._end = 0

    def _read_more(self, file: BinaryIO) -> None:
        now = os.fstat(file.fileno())
        if now.st_ino != self._inode or now.st_size < self._end:
            self._start_over()
            self._inode = now.st_ino
        at = self._end
        file.seek(at)
        while block := file.read(min(_BLOCK, now.st_size - at)):
            newlines = np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE)
            begins = newlines + (at + 1)
            first = -(self._num_lines + 1) % EVERY
            self._offsets.extend(begins[first::EVERY].tolist())
            if len(begins):
                self._num_lines += len(begins)
                self._end = int(begins[-1])
            at += len(block)


@lru_cache(maxsize=256)
def line_index(path: Path) -> LineIndex:
    """This process's index of a file. The most recently used ones are kept."""
    return LineIndex()
