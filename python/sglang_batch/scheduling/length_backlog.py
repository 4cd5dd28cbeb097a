"""Requests of a job that join in batches of similar KV length, by AlignedServe's rules.

:class:`LengthBacklogs` makes the backlog of a plan with such a rule, in place of one that
follows an order. The choice is that of ``planner.kv_lengths.batch_state``. It is told who
waits, who runs and who leaves, and counts decode steps, so that all ranks choose alike.
"""

from __future__ import annotations

from ..planner.kv_lengths import batch_state
from ..planner.kv_lengths.batch_state import RunningRows, doubled, make_batches
from ..planner.kv_lengths.length_groups import BatchLaw
from ..planner.kv_lengths.length_tree import NONE
from .backlog import Backlog
from .job_plan import JobPlan
from .kv_accounting import KvAccounting
from .scheduled_request import ScheduledRequest

_FIRST_SLOTS = 256


class LengthBacklogs:
    """Makes the backlogs of one scheduler's jobs, and measures the running rows for them."""

    def __init__(self, kv_accounting: KvAccounting) -> None:
        self._kv_accounting = kv_accounting
        self._changes = -1
        self._rows = self._longest = 0

    def __call__(self, plan: JobPlan) -> Backlog:
        return LengthBacklog(plan, self) if plan.length_rule else Backlog.of(plan)

    def rows(self) -> RunningRows:
        """The running requests of all jobs, whose prompts are read in whole."""
        accounting = self._kv_accounting
        if self._changes != accounting.changes:
            self._changes = accounting.changes
            # Without the decode clock, by which all rows grow alike.
            lengths = [
                request.input_len + request.steps - request.begin
                for request in accounting.requests
            ]
            self._rows, self._longest = len(lengths), max(lengths, default=0)
        longest = accounting.clock + self._longest if self._rows else 0
        return RunningRows(self._rows, float(sum(accounting.reads)), longest)

    def law(self, plan: JobPlan) -> BatchLaw:
        """The cost of a step. No row is parked."""
        cost = plan.cost
        return BatchLaw(
            cost.weight_read_time_s,
            cost.kv_read_time_s,
            cost.row_share,
            cost.padded,
            float(self._kv_accounting.capacity),
            1 << 30,
            parks=False,
        )


class LengthBacklog(Backlog):
    """Waiting requests, of which the next one depends on the lengths of running rows.

    Requests that were moved ahead come before all others, and those that do not mix after
    them.

    Args:
        engine: the running rows of all jobs, and the cost of a step with them.
    """

    def __init__(self, plan: JobPlan, engine: LengthBacklogs) -> None:
        super().__init__(0, both_ends=False)
        self._plan, self._engine = plan, engine
        self.rule = plan.length_rule
        self._batches = make_batches(_FIRST_SLOTS, self.rule, plan.max_wait_steps)
        # By length and family, those on the host.
        self._ready: dict[tuple[int, int], dict[ScheduledRequest, None]] = {}
        self._slot: dict[ScheduledRequest, int] = {}
        self._at: list[ScheduledRequest | None] = []
        self._free: list[int] = []
        self._running: dict[ScheduledRequest, None] = {}

    def add(self, request: ScheduledRequest) -> None:
        super().add(request)
        if request.mixes:
            key, family = self._place(request)
            slot = self._new_slot(request)
            length = max(key, request.input_len + request.steps)
            tokens = request.own + request.steps
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
        slot = self._slot.get(request)
        super().remove(request)
        if slot is not None:
            batch_state.join(self._batches, slot)
            self._no_longer_ready(request, slot)
            self._running[request] = None

    def runs(self, request: ScheduledRequest) -> None:
        """A request runs, again if it has been on the host meanwhile."""
        if request not in self._running:
            batch_state.come_back(self._batches, self._new_slot(request))
            self._running[request] = None

    def left(self, request: ScheduledRequest) -> None:
        if request in self._running:
            del self._running[request]
            batch_state.leave(self._batches, self._slot[request])
            self._free_slot(request)

    def tick(self) -> None:
        batch_state.tick(self._batches)

    def _place(self, request: ScheduledRequest) -> tuple[int, int]:
        """The length by which a request joins, and its family; see ``JobPlan``."""
        plan, leaf = self._plan, request.leaf
        if leaf < 0 or plan.length_key is None or plan.family is None:
            return request.input_len, NONE
        return int(plan.length_key[leaf]), int(plan.family[leaf])

    def first(self) -> ScheduledRequest | None:
        in_order = super().first()
        if in_order is not None and in_order.ahead:
            return in_order
        engine = self._engine
        slot = batch_state.propose(self._batches, engine.law(self._plan), engine.rows())
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

    def reorder(self, plan: JobPlan) -> None:
        """Take the places of a new plan."""
        super().reorder(plan)
        self._plan = plan
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
                self._batches = doubled(self._batches)
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
