"""Sends a job's requests to the engine in the order of its plan, a window at a time.

An order that is taken from both ends has two windows, one for each side, as the scheduler
always needs requests of both. Any other order has one. Each replica of the engine has windows
of its own.

A new plan orders the requests that have not been sent, and may move them to other replicas. One
is asked for when enough answers have come, when a replica runs out of requests before the
others, and when replicas come or go. Requests that a lost replica had are sent again. Those
that may be the reason of several crashes wait for the end, when each runs with no other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..config import OfflineBatchConfig
from ..planner.requests import LEFT, RIGHT, Int32s, Int64s
from ..request import BatchRequestInput, RequestOutput, Sink, parse_request_id
from . import traces
from .answer_feedback import AnswerFeedback
from .engine import Engine, PreparedRequest, ReplicaLost
from .inflight_limit import InflightLimit
from .job_shards import JobProgress, ShardPlan
from .occupancy import Occupancy, Tail
from .rendering import Rendered, task_group
from .replicas import Replica, SendQueue, divide_window

# Renders one request of the job, by its number.
Render = Callable[[int], Coroutine[Any, Any, Rendered]]
# A replica that runs dry gets no more while the unsent requests are over this share of those
# after the last new plan: it was given as many as pays.
_FEWER = 15 / 16
# A running request has done half of its work, on average.
_RUNNING_LEFT = 0.5
# Makes new plans from answers (numbers, output lengths) and has them carried out.
Replan = Callable[[Int64s, Int32s], Awaitable[None]]


class Dispatcher:
    """Sends requests until each has its answer.

    Call :meth:`set_order` or :meth:`set_plans` before :meth:`run`.

    Args:
        num_requests: requests of the job. Their numbers are below it.
        render: renders a request by its number. Its error is its answer.
        sink: called once per request.
        limit: how many requests may be in the engine.
        releases: whether replicas may end once nothing is left for them.
        job_id: with which the ids of its requests begin.

    Attributes:
        grows: whether further plans will have more requests.
        engine_tells: whether :meth:`joined` is called. Set it before the first plan.
    """

    def __init__(
        self,
        engine: Engine,
        config: OfflineBatchConfig,
        num_requests: int,
        render: Render,
        sink: Sink,
        limit: InflightLimit | None = None,
        *,
        releases: bool = False,
        job_id: str = "",
    ) -> None:
        self._engine = engine
        self._job_id = job_id
        self._config = config
        self._render = render
        self._sink = sink
        self._replicas: list[Replica] = []
        self._sent = np.zeros(num_requests, np.bool_)
        self._replica_of = np.full(num_requests, -1, np.int32)
        self._left = np.ones(num_requests)  # shares of the requests' work
        self._rendering: dict[int, asyncio.Task[Rendered]] = {}
        self._lookahead = config.render_lookahead
        self._changed = asyncio.Event()
        self._limit = limit or InflightLimit()
        self._limit.on_change = self._changed.set
        self._releases = releases
        # It learns nothing until there is one with a plan.
        self._feedback = AnswerFeedback(np.zeros(0, np.int64), 0)
        self._replan: Replan | None = None
        self._replanning: asyncio.Task[None] | None = None
        self._most_in_flight = 0
        self._num_planned = 0  # unsent requests after the last plan
        self._replicas_changed = False
        self._suspects: deque[int] = deque()
        self._trying: asyncio.Task[None] | None = None  # one that runs alone
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of requests in flight
        self._recalled: set[int] = set()
        self._recalling: asyncio.Task[None] | None = None
        self.grows = False
        self.engine_tells = False

    def set_order(self, order: Int64s) -> None:
        """Send requests in this order and let the engine choose the replicas."""
        self._most_in_flight = self._window(False)
        replica = Replica(None, tells=self.engine_tells)
        replica.set_sides((order, order[:0]), self._most_in_flight, False)
        self._replicas = [replica]

    def set_plans(self, plans: Sequence[ShardPlan], *, grows: bool = False) -> None:
        """Send the remaining requests by these plans, one for each replica.

        Args:
            grows: whether a later plan will have more requests.
        """
        single = len(plans) == 1 and self._engine.replica_changes is None
        self._replicas += [
            Replica(None if single else i, tells=self.engine_tells)
            for i in range(len(self._replicas), len(plans))
        ]
        self._note_live()
        both_ends = any(plan.both_ends for plan in plans)
        self._most_in_flight = self._window(both_ends)
        num_live = max(1, sum(replica.is_live for replica in self._replicas))
        windows = iter(divide_window(self._most_in_flight, num_live))
        num_sides = num_live * (2 if both_ends else 1)
        self._lookahead = max(1, self._config.render_lookahead // num_sides)
        for replica, plan in zip(self._replicas, plans, strict=True):
            left, right = plan.sides
            unsent = left[~self._sent[left]], right[~self._sent[right]]
            # One that is gone has the window of another once it is back.
            window = next(windows) if replica.is_live else self._most_in_flight
            replica.set_sides(unsent, window, both_ends)
            replica.returned.clear()
            replica.reassign_in_flight(right)
            new = plan.too_large[~self._sent[plan.too_large]]
            replica.rest = SendQueue(np.concatenate([replica.rest.unsent, new]))
            self._note_sent(replica, new)
        self.grows = grows
        self._num_planned = sum(r.num_unsent for r in self._replicas if r.is_live)
        self._changed.set()

    def progress(self, *, whole: bool) -> JobProgress:
        """Where the requests are, for a new plan, which is one of all requests if
        ``whole``. It may move the far half of each queue, of which nothing is sent until
        the plan is set."""
        replica_of, stays = self._replica_of.copy(), self._sent.copy()
        if len(self._replicas) > 1:
            for index, replica in enumerate(self._replicas):
                replica_of[replica.unsent] = index
                stays[replica.hold()] = True
        return JobProgress(replica_of, stays, self._left.copy(), whole)

    def replicas_changed(self) -> None:
        """Replicas have come, gone or changed their speed: a new plan is due."""
        self._replicas_changed = True
        self._note_live()
        self._changed.set()

    def tail(self) -> Tail:
        """The tail of the job, if it ends now."""
        return Occupancy.tail([replica.occupancy for replica in self._replicas])

    def _check_replicas(self) -> None:
        changes = self._engine.replica_changes
        if changes is not None and changes.failure is not None:
            raise changes.failure

    def _note_live(self) -> None:
        changes = self._engine.replica_changes
        if changes is None:
            return
        is_live = changes.speeds.there.tolist()
        for replica, live in zip(self._replicas, is_live, strict=False):
            if replica.is_live and not live:
                replica.occupancy.gone()
            replica.is_live = live

    def _release_idle(self) -> None:
        """Let replicas end that have nothing to do any more."""
        changes = self._engine.replica_changes if self._releases else None
        if changes is not None and not self.grows and not self._num_unsent:
            changes.release_idle()

    @property
    def _num_unsent(self) -> int:
        return sum(replica.num_unsent for replica in self._replicas)

    def joined(self, numbers: list[int]) -> None:
        """These requests run now."""
        for replica in self._replicas:
            found = replica.joined(numbers)
            self._left[found] = _RUNNING_LEFT
            for number in found:
                self._feedback.add_started(replica.index, number)
        self._changed.set()

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

    @traces.span("dispatch")
    async def run(self) -> None:
        """Send everything. Stops at the first error of the engine or of the sink."""
        try:
            async with task_group() as group:
                while True:
                    self._changed.clear()
                    self._check_replicas()
                    self._recall_if_due(group)
                    self._send_ready(group)
                    busy = self._num_unsent or self.num_in_flight
                    if not busy and not self.grows and not self._try_suspect(group):
                        break
                    self._release_idle()
                    self._replan_if_due(group)
                    await self._changed.wait()
                if self._replanning is not None:
                    self._replanning.cancel()
        finally:
            for task in self._rendering.values():
                task.cancel()

    # Sending --------------------------------------------------------------------------

    def _send_ready(self, group: asyncio.TaskGroup) -> None:
        """Send every request that is rendered and fits into its window."""
        sending = True
        while sending:  # one of each replica and side at a time
            sending = False
            for replica in self._replicas:
                for side in (LEFT, RIGHT):
                    sending |= self._send_next(group, replica, side)

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
            replica.has_window(side)
            and self.num_in_flight < self._most_in_flight
            and self._limit.allows(self.num_in_flight)
        ):
            return False
        queue.pop()
        self._note_sent(replica, number)
        del self._rendering[number]
        if isinstance(rendered, RequestOutput):
            self._left[number] = 0.0
            self._sink(request, rendered)
            self._feedback.skip(number)
        else:
            replica.add_in_flight(number, side)
            if not self.engine_tells:
                self._feedback.add_started((replica.index, side), number)
            self._tasks[number] = group.create_task(
                self._execute(replica, side, request, rendered)
            )
        return True

    async def _execute(
        self,
        replica: Replica,
        side: int,
        request: BatchRequestInput,
        prepared: PreparedRequest,
    ) -> None:
        every = -(-len(self._sent) // traces.MOST_LINES)
        try:
            async with traces.span("line", hides=request.index % every > 0):
                traces.note(custom_id=request.custom_id, number=request.index)
                output = await self._engine.execute(prepared, replica.index)
                traces.note(status_code=output.status_code, **asdict(output.usage))
        except ReplicaLost as lost:
            self._take_back(replica, side, request.index, lost)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if request.index not in self._recalled or task is None or task.uncancel():
                raise  # the job ends
            self._unsend(replica, side, request.index)
            replica.sides[replica.in_flight[request.index]].put_back(request.index)
        else:
            self._left[request.index] = 0.0
            self._sink(request, output)
            tokens = output.usage.output_tokens if output.ok else None
            self._feedback.add_answer(request.index, tokens)
        finally:
            replica.remove_in_flight(request.index)
            self._recalled.discard(request.index)
            del self._tasks[request.index]
            self._changed.set()

    def _take_back(
        self, replica: Replica, side: int, number: int, lost: ReplicaLost
    ) -> None:
        """A request was lost with its replica. It will be sent again."""
        if lost.is_suspect:
            self._forget_started(replica, side, number)
            self._suspects.append(number)
            return
        self._unsend(replica, side, number)
        replica.returned.append(number)

    def _unsend(self, replica: Replica, side: int, number: int) -> None:
        self._forget_started(replica, side, number)
        self._sent[number] = False
        self._left[number] = 1.0

    def _forget_started(self, replica: Replica, side: int, number: int) -> None:
        stream = replica.index if self.engine_tells else (replica.index, side)
        self._feedback.remove_started(stream, number)

    # Taking back ----------------------------------------------------------------------

    def _recall_if_due(self, group: asyncio.TaskGroup) -> None:
        """Take back the requests that the engine has not begun, if the job is paused for long."""
        if not self._limit.recalls:
            self._recalling = None
        elif self._recalling is None:
            self._recalling = group.create_task(self._recall())

    async def _recall(self) -> None:
        running: set[int] | None = None
        for replica in self._replicas:
            waiting = replica.waiting
            if waiting is None:
                if running is None:
                    running = await self._running()
                waiting = [each for each in replica.in_flight if each not in running]
            # The last one first: each is then the next to be sent.
            for number in reversed(waiting):
                if number in self._tasks and self._limit.recalls:
                    self._recalled.add(number)
                    self._tasks[number].cancel()

    async def _running(self) -> set[int]:
        """Numbers of the job's requests that the engine runs."""
        known = [parse_request_id(rid) for rid in await self._engine.running_s()]
        return {number for job_id, number, _ in known if job_id == self._job_id}

    def _try_suspect(self, group: asyncio.TaskGroup) -> bool:
        """Run the next suspect, now that nothing else runs. False if there is none."""
        if self._trying is None or self._trying.done():
            if not self._suspects:
                return False
            self._trying = group.create_task(self._run_alone(self._suspects.popleft()))
        return True

    async def _run_alone(self, number: int) -> None:
        request, output = await self._render(number)
        if not isinstance(output, RequestOutput):
            output = await self._engine.execute(output)
        self._left[number] = 0.0
        self._sink(request, output)
        self._changed.set()

    def _note_sent(self, replica: Replica, numbers: int | Int64s) -> None:
        self._sent[numbers] = True
        self._replica_of[numbers] = replica.index or 0

    # New plans ------------------------------------------------------------------------

    def _replan_if_due(self, group: asyncio.TaskGroup) -> None:
        """Start a new plan if it is due and none is being made."""
        is_busy = self._replanning is not None and not self._replanning.done()
        if self._replan is None or is_busy:
            return
        if not any(replica.is_live for replica in self._replicas):
            return
        if self._feedback.is_due:
            answers = self._feedback.pop_answers()
        elif self._is_uneven or (
            self._replicas_changed and (self._num_unsent or self.grows)
        ):
            answers = self._feedback.take_answers()
        else:
            return
        self._replicas_changed = False
        self._replanning = group.create_task(self._make_plans(*answers))

    @property
    def _is_uneven(self) -> bool:
        """Whether a replica runs dry while another still has requests to give."""
        live = [replica for replica in self._replicas if replica.is_live]
        unsent = [replica.num_unsent for replica in live]
        if max(unsent) <= min(unsent) + 1 or sum(unsent) > _FEWER * self._num_planned:
            return False
        return live[unsent.index(min(unsent))].runs_dry

    async def _make_plans(self, numbers: Int64s, output_len: Int32s) -> None:
        assert self._replan is not None
        await self._replan(numbers, output_len)
        self._changed.set()
