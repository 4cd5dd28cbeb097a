"""Sends a job's requests into the engine, so many at a time, in the order of its plan.

An order that is followed has one window. One that is taken from both ends has two: the
scheduler chooses between requests of either side, so it must always have some of both.
Each replica of the engine has windows of its own; one that has sent all of its shard
takes requests from the far end of another's.

A new plan may come at any time: it orders what has not been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from .config import OfflineBatchConfig
from .engine import Engine, PreparedRequest
from .job_planning import ShardPlan
from .learning import Learning
from .planner.requests import Int32s, Int64s
from .request import BatchRequestInput, RequestOutput
from .scheduling.line import LEFT, RIGHT
from .send_limit import SendLimit
from .windows import Replica, Unsent, shares

Sink = Callable[[BatchRequestInput, RequestOutput], None]
# A request, and what it was rendered to: its answer where that failed.
Rendered = tuple[BatchRequestInput, PreparedRequest | RequestOutput]
# Renders one request of the job, by its number.
Render = Callable[[int], Coroutine[Any, Any, Rendered]]
# Makes plans with new answers, numbers and output lengths, and tells the engine.
Replan = Callable[[Int64s, Int32s], Awaitable[Sequence[ShardPlan]]]


class Feeder:
    """Sends requests until each has its answer.

    Args:
        num_requests: of the job; their numbers are below it.
        render: renders a request by its number; a request that cannot be rendered is
            answered by what it returns.
        sink: called once per request.
        learning: says when answers are enough for a new plan.
        replan: makes that plan.
        limit: how many may be in the engine, if that changes while the job runs.
    """

    def __init__(
        self,
        engine: Engine,
        config: OfflineBatchConfig,
        num_requests: int,
        render: Render,
        sink: Sink,
        learning: Learning | None = None,
        replan: Replan | None = None,
        limit: SendLimit | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._render = render
        self._sink = sink
        self._learning = learning
        self._replan = replan
        self._replicas: list[Replica] = []
        self._taken = np.zeros(num_requests, np.bool_)
        self._rendering: dict[int, asyncio.Task[Rendered]] = {}
        self._look_ahead = config.render_lookahead
        self._changed = asyncio.Event()
        self._limit = limit or SendLimit()
        self._limit.on_change = self._changed.set
        self._replanning: asyncio.Task[None] | None = None

    def follow(self, order: Int64s) -> None:
        """Send requests in this order; the engine chooses the replicas."""
        replica = Replica(None)
        replica.adopt((order, order[:0]), self._window(False), False)
        self._replicas = [replica]

    def adopt(self, plans: Sequence[ShardPlan]) -> None:
        """Send what has not been sent by these plans, one for each replica."""
        if not self._replicas:
            single = len(plans) == 1
            self._replicas = [Replica(None if single else i) for i in range(len(plans))]
            for replica, plan in zip(self._replicas, plans, strict=True):
                replica.rest = Unsent(plan.too_large)
        both_ends = any(plan.both_ends for plan in plans)
        windows = shares(self._window(both_ends), len(plans))
        num_sides = len(plans) * (2 if both_ends else 1)
        self._look_ahead = max(1, self._config.render_lookahead // num_sides)
        for replica, plan, window in zip(self._replicas, plans, windows, strict=True):
            left, right = plan.sides
            unsent = left[~self._taken[left]], right[~self._taken[right]]
            replica.adopt(unsent, window, both_ends)
            replica.put_on_sides(right)

    def _window(self, both_ends: bool) -> int:
        if self._config.max_inflight:
            return self._config.max_inflight
        each = self._engine.default_max_inflight
        return 2 * each if both_ends else each

    @property
    def num_in_flight(self) -> int:
        return sum(len(replica.in_flight) for replica in self._replicas)

    async def run(self) -> None:
        """Send everything. The first error of the engine or of the sink ends it."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._changed.clear()
                    self._fill(group)
                    if not any(r.num_unsent or r.in_flight for r in self._replicas):
                        break
                    self._learn(group)
                    await self._changed.wait()
                if self._replanning is not None:
                    self._replanning.cancel()
        except BaseExceptionGroup as failures:
            # The first failure cancelled the rest; it is the one to report.
            raise failures.exceptions[0] from None
        finally:
            for task in self._rendering.values():
                task.cancel()

    # Sending --------------------------------------------------------------------------

    def _fill(self, group: asyncio.TaskGroup) -> None:
        """Send all that is rendered and has room."""
        for replica in self._replicas:
            if len(self._replicas) > 1 and replica.is_idle:
                self._steal(replica)
            sending = True
            while sending:  # the sides take turns
                left = self._send_next(group, replica, LEFT)
                sending = self._send_next(group, replica, RIGHT) or left

    def _send_next(self, group: asyncio.TaskGroup, replica: Replica, side: int) -> bool:
        """Send or answer the next request of a side, if it is ready."""
        source = replica.source(side)
        ahead = source.first(self._look_ahead)
        for number in ahead:
            if number not in self._rendering:
                task = asyncio.ensure_future(self._render(number))
                task.add_done_callback(lambda _: self._changed.set())
                self._rendering[number] = task
        if not ahead or not self._rendering[ahead[0]].done():
            return False
        number = ahead[0]
        request, rendered = self._rendering[number].result()
        if not isinstance(rendered, RequestOutput) and not (
            replica.has_room(side) and self._limit.allows(self.num_in_flight)
        ):
            return False
        source.drop_first()
        self._taken[number] = True
        del self._rendering[number]
        if isinstance(rendered, RequestOutput):
            self._sink(request, rendered)
            if self._learning is not None:
                self._learning.never_sent(number)
        else:
            replica.sent(number, side)
            if self._learning is not None:
                self._learning.sent((replica.index, side), number)
            group.create_task(self._execute(replica, side, request, rendered))
        return True

    async def _execute(
        self, replica: Replica, side: int, request: BatchRequestInput, prepared: Any
    ) -> None:
        try:
            if replica.index is None:
                output = await self._engine.execute(prepared)
            else:
                output = await self._engine.execute(prepared, replica=replica.index)
            self._sink(request, output)
            if self._learning is not None:
                tokens = output.usage.output_tokens if output.ok else None
                self._learning.ended((replica.index, side), request.index, tokens)
        finally:
            replica.ended(request.index)
            self._changed.set()

    def _steal(self, thief: Replica) -> None:
        """Take requests from the far end of the shard with most unsent work.

        Half of what is left there, so that both end together, and in one piece: what
        is next to each other in the order shares prefixes.
        """
        victim = max(self._replicas, key=lambda replica: replica.num_unsent)
        source = max((*victim.sides, victim.rest), key=len)
        stolen = source.take_last(min((len(source) + 1) // 2, thief.window))
        thief.rest = Unsent(stolen)
        self._taken[stolen] = True

    # Learning -------------------------------------------------------------------------

    def _learn(self, group: asyncio.TaskGroup) -> None:
        """Have a new plan made when there are answers enough; one at a time."""
        if self._learning is None or not self._learning.due:
            return
        if self._replanning is None or self._replanning.done():
            answers = self._learning.take()
            self._replanning = group.create_task(self._adopt_new(*answers))

    async def _adopt_new(self, numbers: Int64s, output_len: Int32s) -> None:
        assert self._replan is not None
        self.adopt(await self._replan(numbers, output_len))
        self._changed.set()
