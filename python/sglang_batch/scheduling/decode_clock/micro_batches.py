"""Micro-batches of pipeline parallelism, of which several are in flight."""

from __future__ import annotations

from ..scheduled_request import ScheduledRequest


class MicroBatches:
    """Whose turn it is, and what has started in each.

    SGLang asks for the next batch of one micro-batch after the other. In each round a
    running request decodes once, in the step of its own micro-batch, whose last results
    are known by then. Without pipeline parallelism there is one, and each step is a round.

    Attributes:
        number: how many there are.
    """

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self._turn = -1
        self._decoded = False
        self._starting: list[list[ScheduledRequest]] = [[] for _ in range(number)]

    @property
    def starting(self) -> list[ScheduledRequest]:
        """Requests whose prompt is complete after this step."""
        return self._starting[self._turn]

    def begin_step(self) -> list[ScheduledRequest]:
        """The next micro-batch has its turn. Returns what its last step completed."""
        self._turn = (self._turn + 1) % self.number
        completed = self.starting
        self._starting[self._turn] = []
        return completed

    def end_step(self, *, decodes: bool) -> bool:
        """Whether a round ends here in which requests decoded, as in this step or not."""
        self._decoded |= decodes
        if self._turn < self.number - 1:
            return False
        decoded, self._decoded = self._decoded, False
        return decoded
