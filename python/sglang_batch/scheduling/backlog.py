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

    num_left: turns below it are the left side; the right scanner does not take them.
    """

    def __init__(self, num_left: int, *, both_ends: bool) -> None:
        self._num_left = num_left
        self._both_ends = both_ends
        self._lines: dict[int, Line] = {}  # by arrival
        self._first: list[tuple[int, int, Line]] = []
        self._last: list[tuple[int, int, Line]] = []
        self._arrivals = 0
        self.tokens = 0  # of all their prompts

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Line]:
        """Lines in the order of their arrival."""
        return iter(list(self._lines.values()))

    def add(self, line: Line) -> None:
        self._arrivals += 1
        line.waiting = True
        line.arrival = self._arrivals
        self._lines[line.arrival] = line
        self.tokens += line.input_len
        heapq.heappush(self._first, (line.turn, line.arrival, line))
        if self._both_ends:
            heapq.heappush(self._last, (-line.turn, line.arrival, line))

    def remove(self, line: Line) -> None:
        line.waiting = False
        del self._lines[line.arrival]
        self.tokens -= line.input_len
        line.arrival = -1

    def first(self) -> Line | None:
        """The line whose turn is first."""
        return self._top(self._first)

    def last(self) -> Line | None:
        """The line whose turn is last, if that is on the right side."""
        line = self._top(self._last)
        return None if line is None or line.turn < self._num_left else line

    def _top(self, heap: list[tuple[int, int, Line]]) -> Line | None:
        while heap:
            _, arrival, line = heap[0]
            if line.arrival == arrival and line.waiting:
                return line
            heapq.heappop(heap)  # it was taken from the other end, or left
        return None
