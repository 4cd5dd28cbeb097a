"""Limits on a job's requests in the engine that change while the job runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class InflightLimit:
    """The most requests of one job in the engine, and reasons to send none for now.

    on_change: called after each change.
    """

    def __init__(self) -> None:
        self._max_inflight: int | None = None
        self._pauses: dict[str, bool] = {}
        self.on_change: Callable[[], None] = lambda: None

    def allows(self, num_in_flight: int) -> bool:
        """Whether one more request may be sent."""
        if self._pauses:
            return False
        return self._max_inflight is None or num_in_flight < self._max_inflight

    def set(self, max_inflight: int | None) -> None:
        """Allow this many requests in the engine, or any number with None."""
        if max_inflight != self._max_inflight:
            self._max_inflight = max_inflight
            self.on_change()

    def pause(self, reason: str, *, recalls: bool = False) -> None:
        """Send nothing until :meth:`resume` is called for the same reason. ``recalls``:
        requests that the engine has and has not begun are taken back, too."""
        self._pauses[reason] = recalls
        self.on_change()

    @property
    def recalls(self) -> bool:
        """Whether the engine is to have no request that has not begun."""
        return any(self._pauses.values())

    def resume(self, reason: str) -> None:
        """End a pause. Does nothing if there is none for this reason."""
        if reason in self._pauses:
            del self._pauses[reason]
            self.on_change()


class EngineShare:
    """Divides the engine, requests of all together or any number with None, evenly among
    the batches and waves that run."""

    def __init__(self, max_inflight: int | None) -> None:
        self._max_inflight = max_inflight
        self._batches: list[InflightLimit] = []
        self._waves: list[InflightLimit] = []

    def set_batches(self, limits: list[InflightLimit]) -> None:
        """Divide among these batches from now on."""
        self._batches = limits
        self._divide()

    @contextmanager
    def wave(self) -> Iterator[InflightLimit]:
        """The limit of a wave that runs as long as the context."""
        limit = InflightLimit()
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
        if self._max_inflight is not None:
            each = max(1, self._max_inflight // max(1, len(limits)))
        for limit in limits:
            limit.set(each)
