"""How many requests of a job may be in the engine, changed while the job runs."""

from __future__ import annotations

from collections.abc import Callable


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
