"""Which samples of a rollout run, which are aborted, and when a group is complete.

A state machine without an engine. Samples are numbered over all groups, group by group. A
group is complete once ``k`` of its samples have finished: its others are no longer wanted.
Once enough groups are complete, nothing else is wanted. A sample that is no longer wanted is
aborted, keeps its tokens, and may also finish meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class SampleEnd(StrEnum):
    """How a sample ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class GroupEnd(StrEnum):
    """How a group ended: ``k`` samples finished, it was aborted before, or too many failed."""

    COMPLETE = "complete"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class _Group:
    k: int
    running: set[int]  # samples without an end, those not sent yet included
    ends: dict[SampleEnd, int] = field(
        default_factory=lambda: dict.fromkeys(SampleEnd, 0)
    )

    @property
    def is_complete(self) -> bool:
        return self.ends[SampleEnd.FINISHED] >= self.k


class GroupBoard:
    """The groups of one call.

    Args:
        sizes: the number of samples of each group, ``n``.
        finished: how many of them must finish, ``k``, each at most its ``n``.
        enough: complete groups at which everything else is aborted.
    """

    def __init__(
        self, sizes: Sequence[int], finished: Sequence[int], enough: int
    ) -> None:
        self._begin = [0]
        self._groups = []
        for n, k in zip(sizes, finished, strict=True):
            first = self._begin[-1]
            self._groups.append(_Group(k, set(range(first, first + n))))
            self._begin.append(first + n)
        self._enough = enough
        self._num_complete = 0
        self._over = deque[int]()
        self.is_stopped = False

    def place(self, number: int) -> tuple[int, int]:
        """The group of a sample, and its index in the group."""
        group = bisect_right(self._begin, number) - 1
        return group, number - self._begin[group]

    def is_wanted(self, number: int) -> bool:
        """Whether a sample is to run, or to continue."""
        group = self._groups[self.place(number)[0]]
        return not self.is_stopped and not group.is_complete

    def ended(self, number: int, how: SampleEnd) -> list[int]:
        """A sample has ended.

        An abort of a sample that is wanted was somebody else's, such as that of a trainer
        who wants to load new weights. It stops the whole call.

        Returns:
            Samples without an end that were wanted until now: they are to be aborted.
        """
        was_wanted = self.is_wanted(number)
        place, _ = self.place(number)
        group = self._groups[place]
        group.running.remove(number)
        group.ends[how] += 1
        if not group.running:
            self._over.append(place)
        if not was_wanted:
            return []
        if how is SampleEnd.ABORTED:
            return self.stop()
        if not group.is_complete:
            return []
        unwanted = sorted(group.running)
        self._num_complete += 1
        if self._num_complete >= self._enough:
            unwanted += self.stop()
        return unwanted

    def stop(self) -> list[int]:
        """Nothing is wanted any more.

        Returns:
            As :meth:`ended`.
        """
        if self.is_stopped:
            return []
        wanted = [group for group in self._groups if not group.is_complete]
        self.is_stopped = True
        return sorted(number for group in wanted for number in group.running)

    def pop_over(self) -> list[int]:
        """Groups whose last sample has ended since the last call, in that order."""
        over = list(self._over)
        self._over.clear()
        return over

    def end_of(self, group: int) -> GroupEnd:
        """How a group ended, once it is over."""
        found = self._groups[group]
        if found.is_complete:
            return GroupEnd.COMPLETE
        return GroupEnd.ABORTED if found.ends[SampleEnd.ABORTED] else GroupEnd.FAILED
