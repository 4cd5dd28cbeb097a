"""Engine seconds, divided among the jobs that use an engine at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable


class EngineTime:
    """The seconds of an engine in which it has lines, an equal part for each of them.

    The parts of all lines add up to these seconds. Those of a line are the increase, between
    its coming and its going, of one sum: that of the seconds over the lines at each
    moment.

    Args:
        replicas: how many replicas the engine has now: each has seconds of its own.
    """

    def __init__(
        self, replicas: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._replicas = replicas
        self._clock = clock
        self._lines = 0
        self._per_line_s = 0.0
        self._last = clock()

    def enter(self) -> float:
        """A line comes. Returns what :meth:`leave` needs."""
        self._advance()
        self._lines += 1
        return self._per_line_s

    def leave(self, entered: float) -> float:
        """It goes. Returns its seconds."""
        self._advance()
        self._lines -= 1
        return self._per_line_s - entered

    def _advance(self) -> None:
        now = self._clock()
        if self._lines:
            self._per_line_s += (now - self._last) * self._replicas() / self._lines
        self._last = now
