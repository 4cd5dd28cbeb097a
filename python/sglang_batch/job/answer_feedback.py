"""The answers that a running job learns from, and when it is worth a new plan.

The answers that have arrived at any moment are the short ones, so a plan also uses the
requests that still run, as censored observations (``planner.output_lengths.estimates``).
Requests of a stream start one after another and run side by side, a token of each in every
step. So one that still runs has at least as many tokens as any answer to a request that
started after it. An engine that does not tell when a request starts is taken to start them
in the order in which they are sent.
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
# As many answers as a multiple of the sample's, if a part of it does not end.
_BESIDE_SAMPLE = 2
_FAILED = -1


class AnswerFeedback:
    """Collects the answers for new plans, which depend only on the answers' order and lengths.

    Args:
        sample: numbers of the requests that the first new plan waits for. Empty if
            there is no sample.
        num_unknown: requests of unknown output length. With none, no plan is due.
        grows: whether :meth:`grow` will be called. Answers are collected until then.
    """

    def __init__(
        self, sample: Int64s, num_unknown: int, *, grows: bool = False
    ) -> None:
        self._num_unknown = num_unknown
        self._learns = grows or num_unknown > 0
        # By stream, in the order of their starts.
        self._started: dict[Hashable, dict[int, None]] = {}
        # Output length of each answer, _FAILED for an error.
        self._length: dict[int, int] = {}
        self._new: list[int] = []  # answered since the last plan was due
        self._num_plans = 0
        self._due: deque[tuple[Int64s, Int32s]] = deque()
        self._wait_for(sample)

    def _wait_for(self, sample: Int64s) -> None:
        """Set the answers that the first new plan waits for."""
        self._sample = set(sample.tolist())
        self._waits_for_sample = bool(self._sample)
        self._wanted = max(_MIN_ANSWERS, int(_MIN_SHARE * self._num_unknown))
        self._without_sample = max(self._wanted, _BESIDE_SAMPLE * len(self._sample))

    def grow(self, sample: Int64s, num_unknown: int, *, grows: bool) -> None:
        """The job has more requests; the arguments are those of the constructor, and a
        sample counts only until a plan was due."""
        self._num_unknown = num_unknown
        if not self._num_plans:
            self._wait_for(sample)
        if not grows and not num_unknown:
            self._stop_learning()
        self._check_due()

    def add_started(self, stream: Hashable, number: int) -> None:
        """Add a request that has started, maybe again as it lost its KV, to the end of its
        stream."""
        if self._learns:
            started = self._started.setdefault(stream, {})
            started.pop(number, None)
            started[number] = None

    def remove_started(self, stream: Hashable, number: int) -> None:
        """A request no longer runs, and has no answer."""
        self._started.get(stream, {}).pop(number, None)

    def add_answer(self, number: int, output_len: int | None) -> None:
        """Add an answer's length in tokens, or None for an error."""
        self._sample.discard(number)
        if not self._learns:
            return
        self._length[number] = _FAILED if output_len is None else output_len
        self._new.append(number)
        self._check_due()

    def skip(self, number: int) -> None:
        """Stop waiting for a request that was answered without being sent."""
        self._sample.discard(number)
        self._check_due()

    @property
    def is_due(self) -> bool:
        """Whether there are enough answers for a new plan."""
        return bool(self._due)

    def pop_answers(self) -> tuple[Int64s, Int32s]:
        """The due plan's new answers, and the requests that ran when it was due.

        Returns:
            Numbers, int64 ``[k]``, and output lengths, int32 ``[k]``: negative for a
            request that runs, whose tokens so far are the negated value.
        """
        return self._due.popleft()

    def take_answers(self) -> tuple[Int64s, Int32s]:
        """The same for a plan that is made for other reasons: none while a sample is awaited."""
        if self._waits_for_sample or not self._learns:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        answers = self._answers()
        self._new.clear()
        return answers

    def _check_due(self) -> None:
        """Note whether a new plan is due with the answers so far."""
        if not self._learns or not self._num_unknown:
            return
        count = len(self._length)
        if self._waits_for_sample:
            # One line of the sample that does not end holds nothing up.
            enough = not self._sample or count >= self._without_sample
        else:
            enough = count >= self._wanted
        if not enough:
            return
        self._waits_for_sample = False
        self._wanted = max(self._wanted, 2 * count)
        self._due.append(self._answers())
        self._new.clear()
        self._num_plans += 1
        if self._num_plans == MAX_REPLANS:
            self._stop_learning()

    def _stop_learning(self) -> None:
        self._learns = False
        self._started.clear()
        self._length.clear()

    def _answers(self) -> tuple[Int64s, Int32s]:
        numbers = [each for each in self._new if self._length[each] != _FAILED]
        lengths = [self._length[each] for each in numbers]
        for started in self._started.values():
            so_far = 0
            for number in reversed(started):
                length = self._length.get(number)
                if length is None:
                    if so_far:
                        numbers.append(number)
                        lengths.append(-so_far)
                else:
                    so_far = max(so_far, length - 1)
        return np.array(numbers, np.int64), np.array(lengths, np.int32)
