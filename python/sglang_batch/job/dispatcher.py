"""Sends a job's requests to the engine in the order of its plan, a window at a time.

An order that is taken from both ends has two windows, one for each side: the scheduler
chooses between the sides, so it always needs requests of both. Any other order has one
window. Each replica of the engine has windows of its own. A replica that has sent all
of its shard takes requests from the far end of another's.

A new plan may arrive at any time. It orders the requests that have not been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from ..config import OfflineBatchConfig
from ..engine import Engine, PreparedRequest
from ..planner.requests import LEFT, RIGHT, Int32s, Int64s
from ..request import BatchRequestInput, RequestOutput
from .answer_feedback import AnswerFeedback
from .inflight_limit import InflightLimit
from .rendering import Rendered
from .replicas import Replica, SendQueue, divide_window
from .shard_plan import ShardPlan

Sink = Callable[[BatchRequestInput, RequestOutput], None]
# Renders one request of the job, by its number.
Render = Callable[[int], Coroutine[Any, Any, Rendered]]
# Makes new plans from answers (numbers, output lengths) and has them carried out.
Replan = Callable[[Int64s, Int32s], Awaitable[None]]


class Dispatcher:
    """Sends requests until each has its answer.

    Call :meth:`set_order` or :meth:`set_plans` before :meth:`run`.

    Args:
        num_requests: requests of the job. Their numbers are below it.
        render: renders a request by its number. The error of a request that cannot be
            rendered is its answer.
        sink: called once per request.
        limit: how many requests may be in the engine, for jobs that are throttled
            while they run.

    Attributes:
        grows: whether further plans will have more requests.
    """

    def __init__(
        self,
        engine: Engine,
        config: OfflineBatchConfig,
        num_requests: int,
        render: Render,
        sink: Sink,
        limit: InflightLimit | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._render = render
        self._sink = sink
        self._replicas: list[Replica] = []
        # Requests that a new plan no longer moves: sent, or taken by another replica.
        self._settled = np.zeros(num_requests, np.bool_)
        self._replica_of = np.full(num_requests, -1, np.int32)
        self._rendering: dict[int, asyncio.Task[Rendered]] = {}
        self._lookahead = config.render_lookahead
        self._changed = asyncio.Event()
        self._limit = limit or InflightLimit()
        self._limit.on_change = self._changed.set
        self._feedback: AnswerFeedback | None = None
        self._replan: Replan | None = None
        self._replanning: asyncio.Task[None] | None = None
        self.grows = False

    def set_order(self, order: Int64s) -> None:
        """Send requests in this order and let the engine choose the replicas."""
        replica = Replica(None)
        replica.set_sides((order, order[:0]), self._window(False), False)
        self._replicas = [replica]

    def set_plans(self, plans: Sequence[ShardPlan], *, grows: bool = False) -> None:
        """Send the remaining requests by these plans, one for each replica.

        Args:
            grows: whether a later plan will have more requests.
        """
        if not self._replicas:
            single = len(plans) == 1
            self._replicas = [Replica(None if single else i) for i in range(len(plans))]
        both_ends = any(plan.both_ends for plan in plans)
        windows = divide_window(self._window(both_ends), len(plans))
        num_sides = len(plans) * (2 if both_ends else 1)
        self._lookahead = max(1, self._config.render_lookahead // num_sides)
        for replica, plan, window in zip(self._replicas, plans, windows, strict=True):
            left, right = plan.sides
            unsent = left[~self._settled[left]], right[~self._settled[right]]
            replica.set_sides(unsent, window, both_ends)
            replica.reassign_in_flight(right)
            new = plan.too_large[~self._settled[plan.too_large]]
            replica.rest = SendQueue(np.concatenate([replica.rest.unsent, new]))
            self._settle(replica, new)
        self.grows = grows
        self._changed.set()

    def replica_of(self) -> Int32s:
        """The replica of each request that a new plan no longer moves, else -1."""
        return self._replica_of.copy()

    def replan_from(self, feedback: AnswerFeedback, replan: Replan) -> None:
        """Call ``replan`` whenever ``feedback`` has enough answers for a new plan."""
        self._feedback = feedback
        self._replan = replan

    def _window(self, both_ends: bool) -> int:
        if self._config.max_inflight:
            return self._config.max_inflight
        window = self._engine.default_max_inflight
        return 2 * window if both_ends else window

    @property
    def num_in_flight(self) -> int:
        return sum(len(replica.in_flight) for replica in self._replicas)

    async def run(self) -> None:
        """Send everything. Stops at the first error of the engine or of the sink."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._changed.clear()
                    self._send_ready(group)
                    busy = any(r.num_unsent or r.in_flight for r in self._replicas)
                    if not busy and not self.grows:
                        break
                    self._replan_if_due(group)
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

    def _send_ready(self, group: asyncio.TaskGroup) -> None:
        """Send every request that is rendered and fits into its window."""
        for replica in self._replicas:
            if len(self._replicas) > 1 and replica.is_idle:
                self._steal(replica)
            sending = True
            while sending:  # alternate between the sides
                left = self._send_next(group, replica, LEFT)
                sending = self._send_next(group, replica, RIGHT) or left

    def _send_next(self, group: asyncio.TaskGroup, replica: Replica, side: int) -> bool:
        """Send or answer the next request of a side, if it is ready."""
        queue = replica.queue(side)
        ahead = queue.peek(self._lookahead)
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
            replica.has_window(side) and self._limit.allows(self.num_in_flight)
        ):
            return False
        queue.pop()
        self._settle(replica, number)
        del self._rendering[number]
        if isinstance(rendered, RequestOutput):
            self._sink(request, rendered)
            if self._feedback is not None:
                self._feedback.skip(number)
        else:
            replica.add_in_flight(number, side)
            if self._feedback is not None:
                self._feedback.add_sent((replica.index, side), number)
            group.create_task(self._execute(replica, side, request, rendered))
        return True

    async def _execute(
        self,
        replica: Replica,
        side: int,
        request: BatchRequestInput,
        prepared: PreparedRequest,
    ) -> None:
        try:
            if replica.index is None:
                output = await self._engine.execute(prepared)
            else:
                output = await self._engine.execute(prepared, replica=replica.index)
            self._sink(request, output)
            if self._feedback is not None:
                tokens = output.usage.output_tokens if output.ok else None
                self._feedback.add_answer(request.index, tokens)
        finally:
            replica.remove_in_flight(request.index)
            self._changed.set()

    def _steal(self, thief: Replica) -> None:
        """Give an idle replica requests of the one with the most unsent requests.

        They are half of a queue, so that both replicas end together, and its far end,
        because neighbours in the order share prefixes.
        """
        victim = max(self._replicas, key=lambda replica: replica.num_unsent)
        queue = max((*victim.sides, victim.rest), key=len)
        stolen = queue.pop_last(min((len(queue) + 1) // 2, thief.window))
        thief.rest = SendQueue(stolen)
        self._settle(thief, stolen)

    def _settle(self, replica: Replica, numbers: int | Int64s) -> None:
        self._settled[numbers] = True
        self._replica_of[numbers] = replica.index or 0

    # New plans ------------------------------------------------------------------------

    def _replan_if_due(self, group: asyncio.TaskGroup) -> None:
        """Start a new plan if there are enough answers and none is being made."""
        if self._feedback is None or not self._feedback.is_due:
            return
        if self._replanning is None or self._replanning.done():
            answers = self._feedback.pop_answers()
            self._replanning = group.create_task(self._make_plans(*answers))

    async def _make_plans(self, numbers: Int64s, output_len: Int32s) -> None:
        assert self._replan is not None
        await self._replan(numbers, output_len)
        self._changed.set()
