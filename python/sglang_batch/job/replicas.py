"""The unsent and the in-flight requests of each replica of the engine.

A replica that tells which requests it runs is sent few others ahead: what was sent cannot
move to another replica any more, while the scheduler needs requests to choose from. Twice what
joined a step lately is enough until the answers of that step have been replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..planner.requests import LEFT, RIGHT, Int64s
from .occupancy import Occupancy

# Least requests of a side that a replica is sent ahead of those that it runs.
MIN_AHEAD = 8
# The same in requests that join a step, and the share of their number that the next step
# with fewer is taken to have.
_STEPS_AHEAD = 2
_LATELY = 0.75


class SendQueue:
    """Numbers of unsent requests, int64, in the order of sending."""

    def __init__(self, numbers: Int64s | Sequence[int] = ()) -> None:
        self._numbers = numbers = np.asarray(numbers, np.int64)
        self._begin = 0
        self._held = len(numbers)

    def __len__(self) -> int:
        return len(self._numbers) - self._begin

    @property
    def unsent(self) -> Int64s:
        """All numbers in the queue."""
        return self._numbers[self._begin :]

    def hold(self, *, all_of_it: bool = False) -> Int64s:
        """Keep the far half, or ``all_of_it``, and return the nearer one, which may be sent."""
        if all_of_it:
            self._held = self._begin
            return self._numbers[:0]
        self._held = self._begin + len(self) // 2
        return self._numbers[self._begin : self._held]

    def peek(self, count: int) -> list[int]:
        """The next ``count`` numbers that may be sent, or fewer. They stay in the queue."""
        end = min(self._begin + count, self._held)
        numbers: list[int] = self._numbers[self._begin : end].tolist()
        return numbers

    def pop(self) -> None:
        """Remove the next number."""
        self._begin += 1

    def put_back(self, number: int) -> None:
        """Have this number be the next one."""
        held = self._held - self._begin
        self._numbers = np.concatenate([[number], self.unsent])
        self._begin, self._held = 0, held + 1


class Replica:
    """One replica of the engine.

    index: None where the engine chooses the replica.
    sides: the left and the right side of the order.
    tells: whether it tells which requests it runs. One of several is sent few others then.
    is_live: whether it takes requests. One that is gone keeps its unsent ones until the next plan.
    rest: sent after both sides: requests that are too large.
    returned: numbers of requests that it had when it was lost.
    in_flight: the side of each request in flight, by its number.
    occupancy: of the requests that it runs: all in flight where it does not tell.
    """

    def __init__(self, index: int | None, *, tells: bool = False) -> None:
        self.index = index
        self._tells = tells
        self._few_ahead = tells and index is not None
        self.sides = (SendQueue(), SendQueue())
        self.is_live = True
        self.rest = SendQueue()
        self.returned: list[int] = []
        self.in_flight: dict[int, int] = {}
        self._windows = [0, 0]
        self._num_in_flight = [0, 0]
        self._ahead: set[int] = set()
        self._num_ahead = [0, 0]
        self._joined_lately = 0.0
        self.occupancy = Occupancy()

    def set_sides(
        self, sides: tuple[Int64s, Int64s], window: int, both_ends: bool
    ) -> None:
        """Send these requests next, at most ``window`` of them at a time."""
        self.sides = (SendQueue(sides[LEFT]), SendQueue(sides[RIGHT]))
        right = window // 2 if both_ends else 0
        self._windows = [window - right, right]

    def reassign_in_flight(self, right: Int64s) -> None:
        """Count the requests in flight on their sides of a new plan, with these on the right."""
        numbers = np.fromiter(self.in_flight, np.int64, len(self.in_flight))
        sides = np.where(np.isin(numbers, right), RIGHT, LEFT)
        self.in_flight = dict(zip(numbers.tolist(), sides.tolist(), strict=True))
        self._num_in_flight = np.bincount(sides, minlength=2).tolist()
        self._num_ahead = [0, 0]
        for number in self._ahead:
            self._num_ahead[self.in_flight[number]] += 1

    @property
    def window(self) -> int:
        """The most requests in flight, both sides together."""
        return sum(self._windows)

    @property
    def num_unsent(self) -> int:
        return sum(map(len, (*self.sides, self.rest))) + len(self.returned)

    @property
    def unsent(self) -> Int64s:
        """Numbers of all unsent requests of both sides, int64, and of those returned."""
        returned = np.array(self.returned, np.int64)
        return np.concatenate([*(side.unsent for side in self.sides), returned])

    @property
    def most_ahead(self) -> int:
        """The most requests of a side that it is sent ahead of those that it runs."""
        return max(MIN_AHEAD, int(_STEPS_AHEAD * self._joined_lately))

    @property
    def runs_dry(self) -> bool:
        """Whether there is nothing to send to it, or will not be soon."""
        if self._few_ahead:
            return self.num_unsent < self.most_ahead
        return not self.num_unsent and len(self.in_flight) < self.window

    @property
    def waiting(self) -> list[int] | None:
        """Numbers of requests that it was sent and does not run, by the order of sending.
        None if it does not tell."""
        if not self._tells:
            return None
        return [number for number in self.in_flight if number in self._ahead]

    def hold(self) -> Int64s:
        """Keep the far half of each side. Returns the numbers that may be sent, int64.

        A replica that is gone is sent nothing.
        """
        gone = not self.is_live
        return np.concatenate([side.hold(all_of_it=gone) for side in self.sides])

    def queue(self, side: int) -> SendQueue:
        """The queue from which a side is sent."""
        if side == LEFT and not any(map(len, self.sides)):
            return self.rest
        return self.sides[side]

    def has_window(self, side: int) -> bool:
        """Whether one more request of a side may be sent. A side with nothing left to send
        leaves its window to the other."""
        if not self.is_live or len(self.in_flight) >= self.window:
            return False
        if self._few_ahead and self._num_ahead[side] >= self.most_ahead:
            return False
        is_below = self._num_in_flight[side] < self._windows[side]
        return is_below or not self.sides[1 - side]

    def add_in_flight(self, number: int, side: int) -> None:
        self.in_flight[number] = side
        self._num_in_flight[side] += 1
        if self._tells:
            self._ahead.add(number)
            self._num_ahead[side] += 1
        else:
            self.occupancy.runs(self._num_running)

    @property
    def _num_running(self) -> int:
        return len(self.in_flight) - len(self._ahead)

    def joined(self, numbers: Iterable[int]) -> list[int]:
        """It runs these requests now. Returns those of them that it was sent."""
        found = [number for number in numbers if number in self.in_flight]
        if found:
            self._joined_lately = max(len(found), _LATELY * self._joined_lately)
        for number in found:
            self._no_longer_ahead(number)
        if self._tells:
            self.occupancy.runs(self._num_running)
        return found

    def _no_longer_ahead(self, number: int) -> None:
        if number in self._ahead:
            self._ahead.remove(number)
            self._num_ahead[self.in_flight[number]] -= 1

    def remove_in_flight(self, number: int) -> None:
        if number not in self._ahead:
            self.occupancy.ended(number, self._num_running)
        self._no_longer_ahead(number)
        self._num_in_flight[self.in_flight.pop(number)] -= 1


def divide_window(window: int, num_replicas: int) -> list[int]:
    """Divide a window evenly. With more replicas than requests, each gets one."""
    each, more = divmod(window, num_replicas)
    return [max(1, each + (replica < more)) for replica in range(num_replicas)]
