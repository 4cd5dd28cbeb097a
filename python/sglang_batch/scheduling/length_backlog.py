"""Waiting requests of a job that join in batches of similar KV length.

The choice is that of ``planner.kv_lengths.batch_switch``. It is told who waits, who runs and
who leaves, and counts decode steps, so that all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..planner.kv_lengths import batch_state, batch_switch
from ..planner.kv_lengths.batch_state import LengthBatches, RunningRows, make_batches
from ..planner.kv_lengths.length_groups import BatchLaw
from ..planner.kv_lengths.length_tree import NONE
from .backlog import Backlog
from .scheduled_request import ScheduledRequest

_FIRST_SLOTS = 256
# Requests among which the next one to be computed ahead is looked for.
_MOST_AHEAD = 256


class LengthPlace(NamedTuple):
    """The length by which a request joins, and its family; see ``JobPlan``."""

    key: int
    family: int


class LengthBacklog(Backlog):
    """Waiting requests, of which the next one depends on the lengths of running rows.

    Requests that were moved ahead come before all others, and those that do not mix after
    them.

    Args:
        rule: TREE or GROUPS.
        place: of a waiting request.
        rows: the running rows of all jobs.
        law: the cost of a step, and the KV that there is.
        max_wait_steps: decode steps after which a waiting request joins before all others.
            None: never.
        host_room: KV that rows can move to the host, in tokens.
    """

    by_length = True

    def __init__(
        self,
        rule: int,
        place: Callable[[ScheduledRequest], LengthPlace],
        rows: Callable[[], RunningRows],
        law: BatchLaw,
        max_wait_steps: int | None = None,
        host_room: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(0, both_ends=False)
        self.rule = rule
        self._place = place
        self._rows = rows
        self._law_if_parked = law
        self._host_room = host_room
        self._batches = make_batches(_FIRST_SLOTS, rule, max_wait_steps)
        self._upcoming = np.zeros(_MOST_AHEAD, np.int32)
        # By length and family, those on the host.
        self._ready: dict[tuple[int, int], dict[ScheduledRequest, None]] = {}
        self._slot: dict[ScheduledRequest, int] = {}
        self._at: list[ScheduledRequest | None] = []
        self._free: list[int] = []
        # Those whose prompt is computed ahead, and the candidate batch that they are of.
        self._left_next: dict[ScheduledRequest, int] = {}
        self._running: dict[ScheduledRequest, None] = {}

    @property
    def mixed_steps(self) -> int:
        """Decode steps with rows of more than one batch."""
        return int(self._batches.state[0]["mixed_ticks"])

    def add(self, request: ScheduledRequest) -> None:
        super().add(request)
        if request.mixes:
            key, family = self._place(request)
            slot, again = self._new_slot(request), False
            length = max(key, request.input_len + request.steps)
            tokens = request.own + request.steps
            if request in self._left_next:
                again = self._left_next.pop(request) == self._next_batch
                if again:
                    batch_state.add_to_next(self._batches, slot, length, tokens, family)
            if not again:
                batch_state.add(self._batches, slot, length, tokens, family)
            if request.on_host:
                self._ready.setdefault((length, family), {})[request] = None

    def add_again(self, request: ScheduledRequest) -> None:
        # It joins before all others, or its prefix would be evicted meanwhile.
        self.add(request)
        self.move_ahead(request)

    def remove(self, request: ScheduledRequest) -> None:
        super().remove(request)
        if request in self._slot:
            batch_state.remove(self._batches, self._slot[request])
            self._free_slot(request)

    def _push(self, request: ScheduledRequest) -> None:
        if not request.on_host:
            super()._push(request)

    def join(self, request: ScheduledRequest) -> None:
        super().remove(request)
        if request in self._slot:
            batch_state.join(self._batches, self._slot[request])
            self._no_longer_ready(request, self._slot[request])
            self._running[request] = None

    def join_ahead(self, request: ScheduledRequest) -> None:
        slot = self._slot.get(request)
        if slot is not None and self._batches.is_next[slot]:
            self._left_next[request] = self._next_batch
        self.remove(request)

    @property
    def _next_batch(self) -> int:
        """Number of the candidate batch."""
        return int(self._batches.state[0]["num_batches"])

    def runs(self, request: ScheduledRequest) -> None:
        """A request runs, again if it has been on the host meanwhile."""
        self._left_next.pop(request, None)
        if request not in self._running:
            batch_state.come_back(self._batches, self._new_slot(request))
            self._running[request] = None

    def left(self, request: ScheduledRequest) -> None:
        """A request has ended, or gave its KV up."""
        if request in self._running:
            del self._running[request]
            batch_state.leave(self._batches, self._slot[request])
            self._free_slot(request)

    def tick(self) -> None:
        batch_state.tick(self._batches)

    @property
    def _law(self) -> BatchLaw:
        """The law of a step. Rows are parked only if the host has room for all of them."""
        law = self._law_if_parked
        if law.parks and (
            self._host_room is None or self._host_room() < self._rows().total
        ):
            law = law._replace(parks=False)
        return law

    def to_park(self) -> list[ScheduledRequest]:
        if not self._law_if_parked.parks:
            return []
        batches = self._batches
        if not batch_switch.wants_switch(batches, self._law, self._rows()):
            return []
        return [
            request
            for request in reversed(self._running)
            if batch_switch.is_parked(batches, self._slot[request])
        ]

    def first(self) -> ScheduledRequest | None:
        in_order = super().first()
        if in_order is not None and in_order.ahead:
            return in_order
        slot = batch_switch.propose(self._batches, self._law, self._rows())
        if slot != NONE:
            return self._ready_alike(slot) or self._at[slot]
        # Those that do not mix are the only ones left, or nobody should join now.
        return None if in_order is None or in_order.mixes else in_order

    def _ready_alike(self, slot: int) -> ScheduledRequest | None:
        """A request like this one whose KV is on the host."""
        batches = self._batches
        alike = (int(batches.key[slot]), int(batches.family[slot]))
        for request in self._ready.get(alike, ()):
            if batches.is_next[self._slot[request]] == batches.is_next[slot]:
                return request
        return None

    def next_ahead(self) -> ScheduledRequest | None:
        """The first of those that will join whose KV is not on the host.

        Of the next few by their lengths, or else of all by their position.
        """
        found = self._upcoming
        number = batch_switch.upcoming(self._batches, self._law, self._rows(), found)
        for slot in found[:number]:
            request: ScheduledRequest | None = self._at[slot]
            if request is not None and not request.on_host:
                return request
        in_order = super().first()
        return None if in_order is None or not in_order.mixes else in_order

    def next_on_host(self) -> list[ScheduledRequest]:
        if not self._ready:
            return []
        found = self._upcoming
        number = batch_switch.upcoming(self._batches, self._law, self._rows(), found)
        # The first one may stand for another of its length.
        requests = dict.fromkeys([self.first(), *(self._at[i] for i in found[:number])])
        return [each for each in requests if each is not None and each.on_host]

    def reorder(self, num_left: int, *, both_ends: bool) -> None:
        """Take the places of a new plan."""
        super().reorder(num_left, both_ends=both_ends)
        waiting = list(self)
        for request in waiting:
            self.remove(request)
        for request in waiting:
            self.add(request)

    def _new_slot(self, request: ScheduledRequest) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._at)
            self._at.append(None)
            if slot == len(self._batches.key):
                self._batches = _larger(self._batches)
        self._slot[request], self._at[slot] = slot, request
        return slot

    def _no_longer_ready(self, request: ScheduledRequest, slot: int) -> None:
        alike = (int(self._batches.key[slot]), int(self._batches.family[slot]))
        ready = self._ready.get(alike, {})
        ready.pop(request, None)
        if not ready:
            self._ready.pop(alike, None)

    def _free_slot(self, request: ScheduledRequest) -> None:
        slot = self._slot.pop(request)
        self._no_longer_ready(request, slot)
        self._at[slot] = None
        self._free.append(slot)


def _larger(batches: LengthBatches) -> LengthBatches:
    """The same with room for twice as many requests."""
    size = len(batches.key)
    new = make_batches(2 * size, 0)
    for name in ("key", "family", "batch_of", "is_next", "ring"):
        getattr(new, name)[:size] = getattr(batches, name)
    for name in ("before", "after", "length", "tokens", "since"):
        getattr(new.tree, name)[:size] = getattr(batches.tree, name)
    for name in ("nodes", "first", "last"):
        np.copyto(getattr(new.tree, name), getattr(batches.tree, name))
    np.copyto(new.state, batches.state)
    return new
