"""Which answers a running job may learn from, and when it is worth a new plan.

The answers that are there at some moment of a run are its short ones, and their mean is
too small. So only complete beginnings are learnt from: of what was sent on one way, the
first so many requests, when all of them have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import numpy as np

from .planner.requests import Int32s, Int64s

# Plans made of answers in one job, at most; each has twice the answers of the last.
MAX_REPLANS = 8
# The first is made of so many answers, or of this share of the job.
_MIN_ANSWERS = 64
_MIN_SHARE = 0.01
_FAILED = -1


class Learning:
    """What was sent, and what has ended.

    What a plan is made of depends on the answers and their order only, not on how long
    the plan before it takes to make.

    Args:
        sample: numbers of the requests that the first new plan waits for; empty where
            there is no sample.
        num_unknown: requests of unknown output length; of none, nothing is learnt.
    """

    def __init__(self, sample: Int64s, num_unknown: int) -> None:
        self._sample = set(sample.tolist())
        self._waits_for_sample = bool(self._sample)
        self._learns = num_unknown > 0
        self._sent: dict[Hashable, deque[int]] = {}
        self._ended: dict[int, int] = {}
        # Of complete beginnings, not taken yet: number and tokens, _FAILED for none.
        self._complete: list[tuple[int, int]] = []
        self._num_complete = self._num_taken = 0
        self._wanted = max(_MIN_ANSWERS, int(_MIN_SHARE * num_unknown))
        self._num_plans = 0
        self._plan_at: deque[int] = deque()

    def sent(self, way: Hashable, number: int) -> None:
        """A request was sent, after all that were sent on the same way before."""
        if self._learns:
            self._sent.setdefault(way, deque()).append(number)

    def ended(self, way: Hashable, number: int, output_len: int | None) -> None:
        """A request has ended; its answer's tokens, None for one that failed."""
        self._sample.discard(number)
        if not self._learns:
            return
        self._ended[number] = _FAILED if output_len is None else output_len
        sent = self._sent[way]
        while sent and sent[0] in self._ended:
            first = sent.popleft()
            self._complete.append((first, self._ended.pop(first)))
            self._num_complete += 1
        self._look()

    def never_sent(self, number: int) -> None:
        """A request was answered without being sent."""
        self._sample.discard(number)
        self._look()

    @property
    def due(self) -> bool:
        """Whether there are answers enough for a new plan."""
        return bool(self._plan_at)

    def take(self) -> tuple[Int64s, Int32s]:
        """Numbers and tokens of the answers that are new to the plan that is due."""
        count = self._plan_at.popleft() - self._num_taken
        taken, self._complete = self._complete[:count], self._complete[count:]
        self._num_taken += count
        pairs = np.array(taken, np.int64).reshape(-1, 2)
        pairs = pairs[pairs[:, 1] != _FAILED]
        return pairs[:, 0], pairs[:, 1].astype(np.int32)

    def _look(self) -> None:
        """See whether what is complete now is to make a new plan."""
        if not self._learns:
            return
        if self._waits_for_sample:
            enough = not self._sample
        else:
            enough = self._num_complete >= self._wanted
        if not enough:
            return
        self._waits_for_sample = False
        self._wanted = max(self._wanted, 2 * self._num_complete)
        self._plan_at.append(self._num_complete)
        self._num_plans += 1
        if self._num_plans == MAX_REPLANS:
            self._learns = False
            self._sent.clear()
            self._ended.clear()
