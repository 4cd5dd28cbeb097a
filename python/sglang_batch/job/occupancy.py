"""The tail of a job: the time at its end in which engines are less than half full.

A few long answers can hold an engine for as long as all others together took, at steps that
cost almost as much as a full engine's. As long as requests wait for room, an engine is full.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Most requests of a tail that are named: the last to end.
NAMED = 10


@dataclass(frozen=True, slots=True)
class Tail:
    """The tail of a job, over all replicas of the engine.

    engine_s: seconds of each replica, summed, after the last moment in which at least half as
        many requests ran in it as when the last of all joined them, until it is gone.
    requests: how many ended in the tail.
    last: numbers of the last of them to end, the very last one first.
    """

    engine_s: float = 0.0
    requests: int = 0
    last: tuple[int, ...] = ()


class Occupancy:
    """Follows how many requests run in one replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full = 0  # when the last of all joined
        self._half_full = 0.0
        self._changed = 0.0
        self._gone = math.inf
        self._requests = 0
        self._last: deque[tuple[float, int]] = deque(maxlen=NAMED)

    def runs(self, running: int) -> None:
        """So many requests run now, after some have started."""
        self._gone = math.inf
        if running:
            self._full = running
            self._note(running, self._clock())

    def ended(self, number: int, running: int) -> None:
        """A request ended, and ``running`` ran until then, this one included."""
        now = self._clock()
        self._note(running, now)
        if 2 * running < self._full:
            self._requests += 1
            self._last.append((now, number))

    def gone(self) -> None:
        """The replica is there no longer."""
        self._gone = self._clock()

    def _note(self, running: int, now: float) -> None:
        self._changed = now
        if 2 * running >= self._full:
            self._half_full = now
            self._requests = 0
            self._last.clear()

    @staticmethod
    def tail(replicas: Sequence[Occupancy]) -> Tail:
        """The tail of a job that ended with the last request of these replicas."""
        ran = [each for each in replicas if each._full]
        if not ran:
            return Tail()
        now = max(each._changed for each in ran)
        last = sorted((found for each in ran for found in each._last), reverse=True)
        return Tail(
            engine_s=sum(min(now, each._gone) - each._half_full for each in ran),
            requests=sum(each._requests for each in ran),
            last=tuple(number for _, number in last[:NAMED]),
        )
