"""Requests of a job that have arrived and wait for their turn.

Taken from either end of the order. A hundred thousand of them cost a scheduling pass
nothing: adding and taking one is logarithmic.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .line import Line


class Backlog:
    """Waiting lines by turn. Lines of one turn come in the order of their arrival.

    A line that joined and was put back has its first arrival still.

    num_left: turns below it are the left side; the right scanner does not take them,
        nor what is not planned.

    Attributes:
        count: lines that wait; asked for in every step.
        tokens: of all their prompts.
    """

    def __init__(self, num_left: int, *, both_ends: bool) -> None:
        self._num_left = num_left
        self._both_ends = both_ends
        self._lines: dict[int, Line] = {}  # by entry
        self._first: list[tuple[int, int, int, Line]] = []
        self._last: list[tuple[int, int, int, Line]] = []
        self._arrivals = 0
        self._entries = 0
        self.count = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Line]:
        """Lines in the order in which they were added."""
        return iter(list(self._lines.values()))

    def add(self, line: Line) -> None:
        if line.arrival < 0:
            self._arrivals += 1
            line.arrival = self._arrivals
        self._entries += 1
        line.waiting = True
        line.entry = self._entries
        self._lines[line.entry] = line
        self.count += 1
        self.tokens += line.input_len
        self._push(line)

    def _push(self, line: Line) -> None:
        heapq.heappush(self._first, (line.turn, line.arrival, line.entry, line))
        if self._both_ends and line.leaf >= 0:
            heapq.heappush(self._last, (-line.turn, line.arrival, line.entry, line))

    def remove(self, line: Line) -> None:
        line.waiting = False
        del self._lines[line.entry]
        self.count -= 1
        self.tokens -= line.input_len
        line.entry = -1

    def reorder(self, num_left: int, *, both_ends: bool) -> None:
        """The lines' turns have changed."""
        self._num_left = num_left
        self._both_ends = both_ends
        self._first.clear()
        self._last.clear()
        for line in self._lines.values():
            self._push(line)

    def first(self) -> Line | None:
        """The line whose turn is first."""
        return self._top(self._first)

    def last(self) -> Line | None:
        """The line whose turn is last, if that is on the right side."""
        line = self._top(self._last)
        return None if line is None or line.turn < self._num_left else line

    def _top(self, heap: list[tuple[int, int, int, Line]]) -> Line | None:
        while heap:
            _, _, entry, line = heap[0]
            if line.entry == entry:
                return line
            heapq.heappop(heap)  # it was taken from the other end, or left
        return None
