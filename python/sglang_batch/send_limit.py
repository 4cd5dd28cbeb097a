"""How many requests of a job may be in the engine, changed while the job runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SendLimit:
    """A number that a running job obeys, and reasons to send nothing for now.

    on_change: called after each change.
    """

    def __init__(self) -> None:
        self._most: int | None = None
        self._holds: set[str] = set()
        self.on_change: Callable[[], None] = lambda: None

    def allows(self, num_in_flight: int) -> bool:
        """Whether one more may be sent."""
        if self._holds:
            return False
        return self._most is None or num_in_flight < self._most

    def set(self, most: int | None) -> None:
        """At most so many in the engine; None is any number."""
        if most != self._most:
            self._most = most
            self.on_change()

    def hold(self, why: str) -> None:
        """Send nothing until :meth:`release` is called for the same reason."""
        self._holds.add(why)

    def release(self, why: str) -> None:
        if why in self._holds:
            self._holds.discard(why)
            self.on_change()


class EngineShare:
    """The requests that batches and waves may have in the engine, divided evenly.

    most: of all together; None is any number.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._batches: list[SendLimit] = []
        self._waves: list[SendLimit] = []

    def set_batches(self, limits: list[SendLimit]) -> None:
        """These batches run now."""
        self._batches = limits
        self._divide()

    @contextmanager
    def wave(self) -> Iterator[SendLimit]:
        """The limit of a wave, which runs for the length of the block."""
        limit = SendLimit()
        self._waves.append(limit)
        self._divide()
        try:
            yield limit
        finally:
            self._waves.remove(limit)
            self._divide()

    def _divide(self) -> None:
        limits = [*self._batches, *self._waves]
        each = None
        if self._most is not None:
            each = max(1, self._most // max(1, len(limits)))
        for limit in limits:
            limit.set(each)
