"""The decode clock where a step yields several tokens of a request.

With speculation a request decodes as many tokens in a step as the model accepts of a draft,
and one more. Forecasts count tokens: one tick of the clock is one token of every running
request. So the clock follows the mean of the tokens that they have decoded, and their sum is
counted right. A request that decodes faster or slower than the mean is set right once it is a
few tokens off.

Ticks follow from the results of steps alone, so all TP ranks count alike.
"""

from __future__ import annotations

from collections.abc import Callable

from ..kv_accounting import KvAccounting
from ..scheduled_request import ScheduledRequest

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
