"""Which LoRA adapters are in the engine's memory, of more than fit there.

A request joins only if its adapter has a slot. An adapter gets a free one when its first
request would join, and keeps it until no request of it is left, so it is loaded once.
Meanwhile requests of adapters without a slot wait aside, and others overtake them.

Some do not wait that long: online requests, requests of a job of higher priority, and those
of a job none of whose adapters has a slot, next to one with several. For them one adapter
is *drained*: its running requests end, and no others of it join before another adapter had
the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ..planner.requests import ONLINE
from .job_state import JobState
from .open_jobs import OpenJobs
from .scheduled_request import ScheduledRequest

Adapter = str | None
"""The engine's id of an adapter. None is the model alone, which takes a slot, too."""


@dataclass(eq=False)
class AdapterSlots:
    """The adapters whose requests may join.

    Args:
        fit: whether the engine can hold these adapters at a time.
        in_use: requests that run, or that will run before any other joins.
        make_room: called with the adapters that have slots whenever one gets a slot. The
            engine loads it with its first request, and would make room for it without
            knowing that others will be needed again.
    """

    jobs: OpenJobs
    fit: Callable[[set[Adapter]], bool]
    in_use: Callable[[], Iterable[ScheduledRequest]]
    make_room: Callable[[Collection[Adapter]], None]

    def __post_init__(self) -> None:
        self._held: dict[
            Adapter, None
        ] = {}  # in the order in which they got their slots
        self._drained: list[Adapter] = []  # at most one
        self._online: list[Adapter] = []  # at most one: an online request waits for it
        self._looked = False  # for slots that have become free, in this step

    def may_join(self, request: ScheduledRequest) -> bool:
        """Whether a request's adapter has a slot, or gets one now."""
        adapter = request.adapter
        if adapter in self._held:
            return adapter not in self._drained
        if self._online and adapter not in self._online:
            return False
        if not self._fits(adapter):
            self._look()
            if not self._fits(adapter):
                return False
        self._hold(adapter)
        return True

    def online_may_join(self, request: ScheduledRequest) -> bool:
        """The same for an online request. If not, it gets the next slot."""
        self._online.clear()
        if request.adapter in self._drained:
            self._drained.clear()
        if self.may_join(request):
            return True
        self._online.append(request.adapter)
        return False

    def begin_step(self) -> None:
        """Give slots that have become free to adapters that requests wait for."""
        self._looked = False
        online, self._online = self._online, []
        waiting = [job for job in self.jobs.in_order() if job.num_without_adapter]
        waiting.sort(key=lambda job: (-job.priority, self._holds(job) > 0))
        if not waiting and not online:
            self._drained.clear()
            return
        self._look()
        for adapter in online:
            if not self._fits(adapter):
                self._drain(self._spared_for_online())
                return
            self._hold(adapter)
        for job in waiting:
            for adapter in job.awaited_adapters():
                if adapter in self._drained:
                    continue
                if adapter not in self._held and not self._fits(adapter):
                    self._drain(self._spared_for(job))
                    continue
                self._hold(adapter)
                for each in waiting:
                    each.release_adapter(adapter)

    def _hold(self, adapter: Adapter) -> None:
        if adapter not in self._held:
            self._held[adapter] = None
            self.make_room(self._held)

    def _fits(self, adapter: Adapter) -> bool:
        return self.fit({*self._held, adapter})

    def _look(self) -> None:
        if self._looked:
            return
        self._looked = True
        in_use = list(self.in_use())
        needed: set[Adapter] = {each.adapter for each in in_use if each.side == ONLINE}
        for job in self.jobs.each:
            needed.update(job.adapters)
        running = {each.adapter for each in in_use}
        self._held = {
            adapter: None
            for adapter in self._held
            if adapter in (running if adapter in self._drained else needed)
        }
        if self._drained and self._drained[0] not in self._held:
            self._drained.clear()

    # Draining -------------------------------------------------------------------------

    def _drain(self, adapters: list[Adapter]) -> None:
        if self._drained or not adapters:
            return
        count = dict.fromkeys(adapters, 0)
        for request in self.in_use():
            if request.adapter in count:
                count[request.adapter] += 1
        self._drained.append(min(adapters, key=count.__getitem__))

    def _spared_for_online(self) -> list[Adapter]:
        online = {each.adapter for each in self.in_use() if each.side == ONLINE}
        return [adapter for adapter in self._held if adapter not in online]

    def _spared_for(self, job: JobState) -> list[Adapter]:
        """The adapters that lose their slots for a job."""
        none_held = not self._holds(job)
        return [
            adapter
            for adapter in self._spared_for_online()
            if all(
                other.priority < job.priority
                or (
                    none_held
                    and other.priority == job.priority
                    and self._holds(other) > 1
                )
                for other in self.jobs.each
                if adapter in other.adapters
            )
        ]

    def _holds(self, job: JobState) -> int:
        return sum(adapter in job.adapters for adapter in self._held)
