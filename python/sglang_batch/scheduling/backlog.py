"""Requests of a job that have arrived and wait.

They are taken from either end of the order. Requests that do not mix come after all others,
so that the steps of the others mix. Adding and removing one takes logarithmic time, so a
hundred thousand of them cost a scheduling pass nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from .job_plan import JobPlan
from .scheduled_request import ScheduledRequest

# Rank, position, arrival, entry and the request.
_Entry = tuple[int, int, int, int, ScheduledRequest]


class Backlog:
    """Waiting requests: those that mix first, by position, and by arrival where positions
    are equal. A request that joined and was put back keeps its first arrival.

    Args:
        num_left: positions below it are the left side. The right scanner takes neither
            these nor unplanned requests.

    Attributes:
        rule: of ``JobPlan.length_rule``. With one, requests whose KV is on the host wait
            among the others.
        count: number of waiting requests, read in every step.
        tokens: prompt tokens of them all.
    """

    rule = 0

    def __init__(self, num_left: int, *, both_ends: bool) -> None:
        self._num_left = num_left
        self._both_ends = both_ends
        self._requests: dict[int, ScheduledRequest] = {}  # by entry
        self._first: list[_Entry] = []
        self._last: list[_Entry] = []
        self._arrivals = 0
        self._entries = 0
        self.count = 0
        self.tokens = 0

    @classmethod
    def of(cls, plan: JobPlan) -> Backlog:
        """An empty backlog in the order of a plan."""
        return cls(plan.num_left, both_ends=plan.density is not None)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        """Requests in the order in which they were added."""
        return iter(list(self._requests.values()))

    def add(self, request: ScheduledRequest) -> None:
        if request.arrival < 0:
            self._arrivals += 1
            request.arrival = self._arrivals
        self._entries += 1
        request.waiting = True
        request.entry = self._entries
        self._requests[request.entry] = request
        self.count += 1
        self.tokens += request.input_len
        self._push(request)

    def add_again(self, request: ScheduledRequest) -> None:
        """A request that waited for its prefix could join now."""
        self.add(request)

    def move_ahead(self, request: ScheduledRequest) -> None:
        """Let a request join before the others of its side."""
        if request.ahead:
            return
        request.ahead = True
        if request.waiting:
            self._push(request)

    def _push(self, request: ScheduledRequest) -> None:
        position = request.position
        later = (request.arrival, request.entry, request)
        last, behind = 2 * (not request.mixes), not request.ahead
        on_right = self._both_ends and request.leaf >= 0 and position >= self._num_left
        heapq.heappush(self._first, (last + (on_right or behind), position, *later))
        if self._both_ends and request.leaf >= 0:
            rank = last + (not on_right or behind)
            heapq.heappush(self._last, (rank, -position, *later))

    def remove(self, request: ScheduledRequest) -> None:
        request.waiting = False
        del self._requests[request.entry]
        self.count -= 1
        self.tokens -= request.input_len
        request.entry = -1

    def join(self, request: ScheduledRequest) -> None:
        """A waiting request joins the running ones."""
        self.remove(request)

    def runs(self, request: ScheduledRequest) -> None:
        """A request of the job begins to run, or continues."""

    def left(self, request: ScheduledRequest) -> None:
        """A running request has ended, or gave its KV up."""

    def tick(self) -> None:
        """The running requests took a decode step."""

    def reorder(self, plan: JobPlan) -> None:
        """Sort again by a new plan, after the requests' positions have changed."""
        self._num_left, self._both_ends = plan.num_left, plan.density is not None
        self._first.clear()
        self._last.clear()
        for request in self._requests.values():
            self._push(request)

    def first(self) -> ScheduledRequest | None:
        """The request with the lowest position, of those that mix if there are any, and
        of those that were moved ahead."""
        return self._top(self._first)

    def last(self) -> ScheduledRequest | None:
        """The same with the highest position, if that is on the right side."""
        request = self._top(self._last)
        return None if request is None or request.position < self._num_left else request

    def _top(self, heap: list[_Entry]) -> ScheduledRequest | None:
        while heap:
            *_, entry, request = heap[0]
            if request.entry == entry:
                return request
            heapq.heappop(heap)  # it was taken from the other end, or left
        return None


BacklogMaker = Callable[[JobPlan], Backlog]
"""Makes an empty backlog for a plan: :meth:`Backlog.of`, or one with rules of its own."""
