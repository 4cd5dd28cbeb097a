"""What each replica of the engine is to run, and how much of it at a time."""

from __future__ import annotations

import numpy as np

from .planner.requests import Int64s
from .scheduling.line import LEFT, RIGHT


class Unsent:
    """Numbers of requests in the order in which they are to be sent."""

    def __init__(self, numbers: Int64s) -> None:
        self._numbers = numbers
        self._begin, self._end = 0, len(numbers)

    def __len__(self) -> int:
        return self._end - self._begin

    def first(self, count: int) -> list[int]:
        """The next ones; they stay."""
        end = min(self._begin + count, self._end)
        found: list[int] = self._numbers[self._begin : end].tolist()
        return found

    def drop_first(self) -> None:
        self._begin += 1

    def take_last(self, count: int) -> Int64s:
        """Remove the last ones, in their order."""
        begin = max(self._begin, self._end - count)
        taken = self._numbers[begin : self._end]
        self._end = begin
        return taken


class Replica:
    """What one replica was given and has not sent, and what it has in flight.

    index: None where the engine chooses the replica.
    sides: the left and the right side of the order.
    rest: after both: requests that are too large, or another replica's.
    in_flight: the side of each request that was sent, by its number.
    """

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.sides = (nothing(), nothing())
        self.rest = nothing()
        self.in_flight: dict[int, int] = {}
        self._room = [0, 0]
        self._count = [0, 0]

    def adopt(self, sides: tuple[Int64s, Int64s], window: int, both_ends: bool) -> None:
        """Send what is left in this order, ``window`` requests at a time."""
        self.sides = (Unsent(sides[LEFT]), Unsent(sides[RIGHT]))
        right = window // 2 if both_ends else 0
        self._room = [window - right, right]

    def put_on_sides(self, right: Int64s) -> None:
        """A new plan has some of what is in flight on its right side."""
        numbers = np.fromiter(self.in_flight, np.int64, len(self.in_flight))
        sides = np.where(np.isin(numbers, right), RIGHT, LEFT)
        self.in_flight = dict(zip(numbers.tolist(), sides.tolist(), strict=True))
        self._count = np.bincount(sides, minlength=2).tolist()

    @property
    def window(self) -> int:
        return sum(self._room)

    @property
    def num_unsent(self) -> int:
        return sum(map(len, (*self.sides, self.rest)))

    @property
    def is_idle(self) -> bool:
        """Whether it could run more than what it was given."""
        return not self.num_unsent and len(self.in_flight) < self.window

    def source(self, side: int) -> Unsent:
        """Where the next request of a side comes from."""
        if side == LEFT and not any(map(len, self.sides)):
            return self.rest
        return self.sides[side]

    def has_room(self, side: int) -> bool:
        """An exhausted side leaves its window to the other."""
        if len(self.in_flight) >= self.window:
            return False
        return self._count[side] < self._room[side] or not self.sides[1 - side]

    def sent(self, number: int, side: int) -> None:
        self.in_flight[number] = side
        self._count[side] += 1

    def ended(self, number: int) -> None:
        self._count[self.in_flight.pop(number)] -= 1


def nothing() -> Unsent:
    return Unsent(np.zeros(0, np.int64))


def shares(window: int, num_replicas: int) -> list[int]:
    """A window divided among replicas; of one smaller than their number, some get 0."""
    each, more = divmod(window, num_replicas)
    return [each + (replica < more) for replica in range(num_replicas)]
