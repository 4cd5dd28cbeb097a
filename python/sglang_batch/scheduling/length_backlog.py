"""Requests of a job that join in batches of similar KV length, by AlignedServe's rules.

:class:`LengthBacklogs` makes the backlog of a plan with such a rule, in place of one that
follows an order. The choice is that of ``planner.kv_lengths.batch_state``. It is told who
waits, who runs and who leaves, and counts decode steps, so that all ranks choose alike.
Rows leave for the host in a switch (:meth:`LengthBacklog.to_park`), and prompts are computed
before their answers fit (:func:`fill_ahead`), only where the engine asks for it.
"""

from __future__ import annotations

import numpy as np

from ..planner.kv_lengths import batch_state
from ..planner.kv_lengths.batch_state import RunningRows, doubled, make_batches
from ..planner.kv_lengths.length_groups import BatchLaw, parking_pays
from ..planner.kv_lengths.length_tree import NONE
from ..planner.requests import LEFT
from .backlog import Backlog
from .job_plan import JobPlan
from .kv_accounting import KvAccounting
from .next_step import Filling
from .scheduled_request import ScheduledRequest
from .step_record import Admission

_FIRST_SLOTS = 256
# Requests among which the next one to be computed ahead is looked for.
_MOST_AHEAD = 256


class LengthBacklogs:
    """Makes the backlogs of one scheduler's jobs, and measures the running rows for them.

    Attributes:
        host_room: tokens of KV that rows can move to the host.
    """

    def __init__(self, kv_accounting: KvAccounting) -> None:
        self._kv_accounting = kv_accounting
        self._changes = -1
        self._rows = self._longest = 0
        self.host_room = 0

    def __call__(self, plan: JobPlan) -> Backlog:
        return LengthBacklog(plan, self) if plan.length_rule else Backlog.of(plan)

    def rows(self) -> RunningRows:
        """The running requests of all jobs, whose prompts are read in whole, without those
        of which only the prompt is computed."""
        accounting = self._kv_accounting
        if self._changes != accounting.changes:
            self._changes = accounting.changes
            # Without the decode clock, by which all rows grow alike.
            lengths = [
                request.input_len + request.steps - request.begin
                for request in accounting.requests
                if not request.prompt_only
            ]
            self._rows, self._longest = len(lengths), max(lengths, default=0)
        longest = accounting.clock + self._longest if self._rows else 0
        return RunningRows(self._rows, float(sum(accounting.reads)), longest)

    def law(self, plan: JobPlan) -> BatchLaw:
        """The cost of a step. Rows are parked only if the host has room for all of them."""
        cost = plan.cost
        parks = parking_pays(cost.row_share, padded=cost.padded)
        return BatchLaw(
            cost.weight_read_time_s,
            cost.kv_read_time_s,
            cost.row_share,
            cost.padded,
            float(self._kv_accounting.capacity),
            1 << 30,
            parks=parks and self.host_room >= self.rows().total,
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
        self._upcoming = np.zeros(_MOST_AHEAD, np.int32)
        # By length and family, those on the host.
        self._ready: dict[tuple[int, int], dict[ScheduledRequest, None]] = {}
        self._slot: dict[ScheduledRequest, int] = {}
        self._at: list[ScheduledRequest | None] = []
        self._free: list[int] = []
        # Those whose prompt is computed ahead, and the candidate batch that they are of.
        self._left_next: dict[ScheduledRequest, int] = {}
        self._running: dict[ScheduledRequest, None] = {}

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
        slot = self._slot.get(request)
        if request.prompt_only:
            if slot is not None and self._batches.is_next[slot]:
                self._left_next[request] = self._next_batch
            self.remove(request)
            return
        super().remove(request)
        if slot is not None:
            batch_state.join(self._batches, slot)
            self._no_longer_ready(request, slot)
            self._running[request] = None

    @property
    def _next_batch(self) -> int:
        return int(self._batches.state[0]["num_batches"])

    def runs(self, request: ScheduledRequest) -> None:
        """A request runs, again if it has been on the host meanwhile."""
        if request.prompt_only:
            return
        self._left_next.pop(request, None)
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

    def to_park(self) -> list[ScheduledRequest]:
        """Running requests that are to wait on the host from now on: batches of similar
        length are switched. Ask once in a step, before others join."""
        batches, engine = self._batches, self._engine
        cost = self._plan.cost
        if not parking_pays(cost.row_share, padded=cost.padded):
            return []
        if not batch_state.wants_switch(batches, engine.law(self._plan), engine.rows()):
            return []
        return [
            request
            for request in reversed(self._running)
            if batch_state.is_parked(batches, self._slot[request])
        ]

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

    def next_ahead(self) -> ScheduledRequest | None:
        """The first of those that will join whose KV is not on the host.

        Of the next few by their lengths, or else of all by their position.
        """
        for request in self._next_few():
            if request is not None and not request.on_host:
                return request
        in_order = super().first()
        return None if in_order is None or not in_order.mixes else in_order

    def next_on_host(self) -> list[ScheduledRequest]:
        """Of those that join next, the ones whose KV is on the host."""
        if not self._ready:
            return []
        # The first one may stand for another of its length.
        requests = dict.fromkeys([self.first(), *self._next_few()])
        return [each for each in requests if each is not None and each.on_host]

    def _next_few(self) -> list[ScheduledRequest | None]:
        """Those that are proposed next if no other comes or leaves."""
        engine, found = self._engine, self._upcoming
        number = batch_state.upcoming(
            self._batches, engine.law(self._plan), engine.rows(), found
        )
        return [self._at[slot] for slot in found[:number]]

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


def fill_ahead(filling: Filling, limit: int, ahead_tokens: int) -> None:
    """Fill a step with prompts of requests that do not fit yet. They wait on the host
    until they do.

    Args:
        limit: most prompt tokens of the step.
        ahead_tokens: most tokens of such prompts.
    """
    for job in filling.in_turn() if ahead_tokens > 0 else ():
        backlog = job.backlog
        while isinstance(backlog, LengthBacklog) and filling.choice.tokens < limit:
            request = backlog.next_ahead()
            if request is None or request.input_len > ahead_tokens:
                break
            if job.uses.blocked_by(request.node) or filling.overtakes(job, request):
                break
            if not filling.now.has_adapter(request):
                break
            request.prompt_only = True
            answer = filling.admit(job, request, LEFT, limit, 0)
            if answer is not Admission.JOINED:
                request.prompt_only = False
                break
            ahead_tokens -= request.input_len
