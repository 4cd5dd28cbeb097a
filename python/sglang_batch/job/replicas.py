"""The unsent and the in-flight requests of each replica of the engine."""

from __future__ import annotations

import numpy as np

from ..planner.requests import LEFT, RIGHT, Int64s


class SendQueue:
    """Numbers of unsent requests, int64, in the order of sending."""

    def __init__(self, numbers: Int64s) -> None:
        self._numbers = numbers
        self._begin, self._end = 0, len(numbers)

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def unsent(self) -> Int64s:
        """All numbers in the queue."""
        return self._numbers[self._begin : self._end]

    def peek(self, count: int) -> list[int]:
        """The next ``count`` numbers, or fewer. They stay in the queue."""
        end = min(self._begin + count, self._end)
        numbers: list[int] = self._numbers[self._begin : end].tolist()
        return numbers

    def pop(self) -> None:
        """Remove the next number."""
        self._begin += 1

    def pop_last(self, count: int) -> Int64s:
        """Remove and return the last ``count`` numbers, or fewer, in their order."""
        begin = max(self._begin, self._end - count)
        numbers = self._numbers[begin : self._end]
        self._end = begin
        return numbers


class Replica:
    """One replica of the engine.

    index: None where the engine chooses the replica.
    sides: the left and the right side of the order.
    rest: sent after both sides: requests that are too large, or stolen ones.
    in_flight: the side of each request in flight, by its number.
    """

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.sides = (empty_queue(), empty_queue())
        self.rest = empty_queue()
        self.in_flight: dict[int, int] = {}
        self._windows = [0, 0]
        self._num_in_flight = [0, 0]

    def set_sides(
        self, sides: tuple[Int64s, Int64s], window: int, both_ends: bool
    ) -> None:
        """Send these requests next, at most ``window`` of them at a time."""
        self.sides = (SendQueue(sides[LEFT]), SendQueue(sides[RIGHT]))
        right = window // 2 if both_ends else 0
        self._windows = [window - right, right]

    def reassign_in_flight(self, right: Int64s) -> None:
        """Count the requests in flight on their sides of a new plan.

        Args:
            right: numbers of all requests on the new plan's right side.
        """
        numbers = np.fromiter(self.in_flight, np.int64, len(self.in_flight))
        sides = np.where(np.isin(numbers, right), RIGHT, LEFT)
        self.in_flight = dict(zip(numbers.tolist(), sides.tolist(), strict=True))
        self._num_in_flight = np.bincount(sides, minlength=2).tolist()

    @property
    def window(self) -> int:
        """The most requests in flight, both sides together."""
        return sum(self._windows)

    @property
    def num_unsent(self) -> int:
        return sum(map(len, (*self.sides, self.rest)))

    @property
    def is_idle(self) -> bool:
        """Whether everything is sent and the window is not full."""
        return not self.num_unsent and len(self.in_flight) < self.window

    def queue(self, side: int) -> SendQueue:
        """The queue from which a side is sent."""
        if side == LEFT and not any(map(len, self.sides)):
            return self.rest
        return self.sides[side]

    def has_window(self, side: int) -> bool:
        """Whether one more request of a side may be sent.

        A side with nothing left to send leaves its window to the other.
        """
        if len(self.in_flight) >= self.window:
            return False
        is_below = self._num_in_flight[side] < self._windows[side]
        return is_below or not self.sides[1 - side]

    def add_in_flight(self, number: int, side: int) -> None:
        self.in_flight[number] = side
        self._num_in_flight[side] += 1

    def remove_in_flight(self, number: int) -> None:
        self._num_in_flight[self.in_flight.pop(number)] -= 1


def empty_queue() -> SendQueue:
    return SendQueue(np.zeros(0, np.int64))


def divide_window(window: int, num_replicas: int) -> list[int]:
    """Divide a window evenly. With more replicas than requests, some get 0."""
    each, more = divmod(window, num_replicas)
    return [each + (replica < more) for replica in range(num_replicas)]
