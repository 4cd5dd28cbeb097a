"""The decode clock where it does not tick once in each step that decodes.

With pipeline parallelism several micro-batches are in flight, and the clock ticks once
per round of them (:class:`MicroBatches`).

With speculation a request decodes as many tokens in a step as the model accepts of a draft,
and one more. Forecasts count tokens: one tick of the clock is one token of every running
request. So the clock follows the mean of the tokens that they have decoded, and their sum is
counted right (:class:`TokenClock`). A request that decodes faster or slower than the mean is
set right once it is a few tokens off.

Ticks follow from the results of steps alone, so all TP ranks count alike.
"""

from __future__ import annotations

from collections.abc import Callable

from .kv_accounting import KvAccounting
from .scheduled_request import ScheduledRequest

# Tokens by which the count of a single request may be off.
MOST_OFF = 16


class TokenClock:
    """Ticks of the decode clock that follow the tokens of the running requests."""

    def __init__(self, kv_accounting: KvAccounting) -> None:
        self._kv_accounting = kv_accounting

    def follow(self, tick: Callable[[], None]) -> None:
        """Count the tokens that the last results have.

        Args:
            tick: lets all running requests take one decode step.
        """
        for _ in range(self._ticks()):
            tick()
        accounting = self._kv_accounting
        for request in accounting.requests:
            if not request.decoding:
                continue
            steps, counted = taken(request), request.steps_done(accounting.clock)
            goes_on = request.takes_steps(accounting.clock)
            late = not goes_on and steps < request.max_decode_steps
            if late or abs(steps - counted) > MOST_OFF:
                accounting.set_steps(request, steps)

    def _ticks(self) -> int:
        """The mean of the tokens that requests have and are not counted with."""
        clock = self._kv_accounting.clock
        rows = more = 0
        for request in self._kv_accounting.requests:
            if request.takes_steps(clock):
                rows += 1
                more += taken(request) - request.steps_done(clock)
        return max(0, (2 * more + rows) // (2 * rows)) if rows else 0

    def ends(self, request: ScheduledRequest) -> None:
        """A running request ends: its length is learnt from."""
        if request.decoding:
            self._kv_accounting.set_steps(request, taken(request))


def taken(request: ScheduledRequest) -> int:
    """Decode steps of a decoding request, by the tokens that it has."""
    steps = min(len(request.req.output_ids) - 1, request.max_decode_steps)
    # The result of its prompt may still be in flight.
    return max(steps, 0)


class MicroBatches:
    """Whose turn it is, and the rows that have started in each.

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
