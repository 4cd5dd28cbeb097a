"""Which answers a running job may learn from, and when it is worth a new plan.

At any moment of a run, the answers that have arrived are the short ones, so their mean
is too small. A plan therefore only uses answers without a gap: of each stream of
requests that are sent one after another, those before the first unanswered one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import numpy as np

from ..planner.requests import Int32s, Int64s

# The most new plans of one job. Each uses at least twice the answers of the last one.
MAX_REPLANS = 8
# Answers for the first one: this many, or this share of the job if that is more.
_MIN_ANSWERS = 64
_MIN_SHARE = 0.01
_FAILED = -1


class AnswerFeedback:
    """Collects the answers for new plans.

    The answers of a plan depend only on their own order and lengths, not on how long
    the previous plan takes to make.

    Args:
        sample: numbers of the requests that the first new plan waits for. Empty if
            there is no sample.
        num_unknown: requests of unknown output length. With none, no plan is due.
        grows: whether :meth:`grow` will be called. Answers are collected until then.
    """

    def __init__(
        self, sample: Int64s, num_unknown: int, *, grows: bool = False
    ) -> None:
        self._sample = set(sample.tolist())
        self._waits_for_sample = bool(self._sample)
        self._num_unknown = num_unknown
        self._learns = grows or num_unknown > 0
        # Without an answer, or with unanswered requests before them in their stream.
        self._unanswered: dict[Hashable, deque[int]] = {}
        self._early: dict[int, int] = {}
        # Number and output length of each usable answer, _FAILED for an error.
        self._usable: list[tuple[int, int]] = []
        self._num_usable = self._num_popped = 0
        self._wanted = _first_wanted(num_unknown)
        self._num_plans = 0
        # Usable answers at which each due plan was found to be due.
        self._due_at: deque[int] = deque()

    @property
    def has_learned(self) -> bool:
        """Whether a plan was due."""
        return self._num_plans > 0

    def grow(self, sample: Int64s, num_unknown: int, *, grows: bool) -> None:
        """The job has more requests.

        Args:
            sample: numbers of unanswered requests to wait for, unless a plan was due
                before.
            num_unknown, grows: as for the constructor.
        """
        self._num_unknown = num_unknown
        if not self.has_learned:
            self._sample = set(sample.tolist())
            self._waits_for_sample = bool(self._sample)
            self._wanted = _first_wanted(num_unknown)
        if not grows and not num_unknown:
            self._stop_learning()
        self._check_due()

    def add_sent(self, stream: Hashable, number: int) -> None:
        """Add a request that was sent, to the end of its stream."""
        if self._learns:
            self._unanswered.setdefault(stream, deque()).append(number)

    def add_answer(self, stream: Hashable, number: int, output_len: int | None) -> None:
        """Add an answer's length in tokens, or None for an error."""
        self._sample.discard(number)
        if not self._learns:
            return
        self._early[number] = _FAILED if output_len is None else output_len
        unanswered = self._unanswered[stream]
        while unanswered and unanswered[0] in self._early:
            first = unanswered.popleft()
            self._usable.append((first, self._early.pop(first)))
            self._num_usable += 1
        self._check_due()

    def skip(self, number: int) -> None:
        """Stop waiting for a request that was answered without being sent."""
        self._sample.discard(number)
        self._check_due()

    @property
    def is_due(self) -> bool:
        """Whether there are enough answers for a new plan."""
        return bool(self._due_at)

    def pop_answers(self) -> tuple[Int64s, Int32s]:
        """Numbers and output lengths of the due plan's new answers, both ``[k]``."""
        count = self._due_at.popleft() - self._num_popped
        answers, self._usable = self._usable[:count], self._usable[count:]
        self._num_popped += count
        pairs = np.array(answers, np.int64).reshape(-1, 2)
        pairs = pairs[pairs[:, 1] != _FAILED]
        return pairs[:, 0], pairs[:, 1].astype(np.int32)

    def _check_due(self) -> None:
        """Note whether a new plan is due with the answers usable now."""
        if not self._learns or not self._num_unknown:
            return
        if self._waits_for_sample:
            enough = not self._sample
        else:
            enough = self._num_usable >= self._wanted
        if not enough:
            return
        self._waits_for_sample = False
        self._wanted = max(self._wanted, 2 * self._num_usable)
        self._due_at.append(self._num_usable)
        self._num_plans += 1
        if self._num_plans == MAX_REPLANS:
            self._stop_learning()

    def _stop_learning(self) -> None:
        self._learns = False
        self._unanswered.clear()
        self._early.clear()


def _first_wanted(num_unknown: int) -> int:
    return max(_MIN_ANSWERS, int(_MIN_SHARE * num_unknown))
