"""One job, from requests to results: render, plan, feed, store.

All front doors end here. A job knows its requests only through :class:`Requests`
(random access, so nothing but the tokens is ever held for all of them), the engine
only through :class:`~sglang_batch.engine.Engine`, and hands each answer to a sink the
moment it arrives.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .config import OfflineBatchConfig
from .engine import Engine, PreparedRequest
from .planner.order import OrderSettings
from .planner.plan import Machine, Plan, make_plan
from .planner.requests import UNKNOWN, PlanRequests
from .request import BatchRequestInput, RequestOutput, engine_request_id
from .scheduling.job_plan import JobPlan, job_plan, unplanned
from .store.token_spool import TokenSpool

logger = logging.getLogger(__name__)

# Of a request that declares none; above any context length.
NO_LIMIT = 1 << 24

Indices = Sequence[int] | NDArray[np.int64]
Rendered = tuple[BatchRequestInput, PreparedRequest | RequestOutput]
Sink = Callable[[BatchRequestInput, RequestOutput], None]


class Requests(Protocol):
    """The requests of a job, by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> BatchRequestInput: ...


class Job:
    """Runs the requests ``todo`` of ``requests`` and gives each answer to ``sink``.

    Args:
        job_id: prefix of the engine's request ids; unique among running jobs.
        todo: indices to run, each once; the others are left alone.
        sink: called once per request, from the event loop.
        on_rendered: called once per request rendered for planning.
    """

    def __init__(
        self,
        job_id: str,
        requests: Requests,
        todo: Indices,
        engine: Engine,
        config: OfflineBatchConfig,
        sink: Sink,
        *,
        on_rendered: Callable[[], None] = lambda: None,
    ) -> None:
        self._job_id = job_id
        self._requests = requests
        self._todo = todo
        self._engine = engine
        self._config = config
        self._sink = sink
        self._on_rendered = on_rendered
        # Share of the prompt tokens that a perfect prefix cache would save; None
        # until the job is planned by a policy that looks at tokens.
        self.optimal_prefix_sharing_ratio: float | None = None

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Run to the end, or until ``stop`` is set.

        When stopped, requests inside the engine are aborted and have no answer.
        Only an error of the engine itself or of the sink is raised; an error of one
        request is its answer.
        """
        work = asyncio.ensure_future(self._run())
        if stop is None:
            return await work
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if not work.done():
                work.cancel()
            try:
                await work
            except asyncio.CancelledError:
                if not stop.is_set():
                    raise
        return None

    async def _run(self) -> None:
        machine = self._engine.machine
        # A single request has no order to find.
        if self._config.policy == "fcfs" or len(self._todo) < 2:
            order: Indices = self._todo
            plan = unplanned(machine)
        else:
            order, plan = await self._plan()
        await self._engine.open_job(self._job_id, [plan])
        try:
            await self._feed(order)
        finally:
            await self._engine.close_job(self._job_id)

    async def _plan(self) -> tuple[Indices, JobPlan]:
        """Render every request, keep its tokens and limits only, and order by them.

        Requests that cannot be rendered are answered here and left out.
        """
        planned: list[int] = []
        limits: list[tuple[int, int]] = []
        with (
            TemporaryDirectory(prefix="sglang-batch-") as directory,
            TokenSpool(Path(directory) / "tokens.i32") as spool,
        ):
            async with aclosing(self._render(self._todo, tokenize=True)) as rendered:
                async for request, prepared in rendered:
                    self._on_rendered()
                    if isinstance(prepared, RequestOutput):
                        self._sink(request, prepared)
                    else:
                        spool.append(prepared.input_ids or ())
                        limits.append(_output_limits(prepared))
                        planned.append(request.index)
            tokens, offsets = spool.arrays()
            plan = await asyncio.to_thread(
                _make_plan, tokens, offsets, limits, self._engine.machine, self._config
            )
        self.optimal_prefix_sharing_ratio = plan.tree.prefix_sharing_ratio
        logger.info(
            "Job %s: %d requests, %d prompt tokens, %.1f%% of them shareable; order %s",
            self._job_id,
            len(planned),
            int(offsets[-1]),
            100 * plan.tree.prefix_sharing_ratio,
            plan.policy,
        )
        numbers = np.asarray(planned, dtype=np.int64)
        return numbers[plan.order], job_plan(plan, numbers, self._engine.machine)

    async def _feed(self, order: Indices) -> None:
        """Send requests in order, a bounded number of them at a time."""
        window = self._config.max_inflight or self._engine.default_max_inflight
        free = asyncio.Semaphore(window)
        try:
            async with (
                asyncio.TaskGroup() as group,
                aclosing(self._render(order, tokenize=False)) as rendered,
            ):
                async for request, prepared in rendered:
                    if isinstance(prepared, RequestOutput):
                        self._sink(request, prepared)
                        continue
                    await free.acquire()
                    group.create_task(self._execute(request, prepared, free))
        except BaseExceptionGroup as failures:
            # The first failure cancelled the rest; it is the one to report.
            raise failures.exceptions[0] from None

    async def _execute(
        self,
        request: BatchRequestInput,
        prepared: PreparedRequest,
        free: asyncio.Semaphore,
    ) -> None:
        try:
            self._sink(request, await self._engine.execute(prepared))
        finally:
            free.release()

    async def _render(
        self, indices: Indices, *, tokenize: bool
    ) -> AsyncGenerator[Rendered]:
        """Rendered requests in the order of ``indices``, some ahead of their turn."""
        ahead: deque[
            tuple[BatchRequestInput, asyncio.Task[PreparedRequest | RequestOutput]]
        ] = deque()
        try:
            for index in indices:
                request = self._requests[int(index)]
                rid = engine_request_id(self._job_id, request.index)
                prepare = self._engine.prepare(request, rid, tokenize=tokenize)
                ahead.append((request, asyncio.ensure_future(prepare)))
                if len(ahead) == self._config.render_lookahead:
                    request, task = ahead.popleft()
                    yield request, await task
            while ahead:
                request, task = ahead.popleft()
                yield request, await task
        finally:
            for _, task in ahead:
                task.cancel()


def _output_limits(prepared: PreparedRequest) -> tuple[int, int]:
    """The most tokens a request generates, and how many it does if that is known."""
    most = NO_LIMIT if prepared.max_new_tokens is None else prepared.max_new_tokens
    return most, most if prepared.ignore_eos and most < NO_LIMIT else UNKNOWN


def _make_plan(
    tokens: NDArray[np.int32],
    offsets: NDArray[np.int64],
    limits: list[tuple[int, int]],
    machine: Machine,
    config: OfflineBatchConfig,
) -> Plan:
    max_new_tokens, known = np.array(limits, dtype=np.int32).reshape(-1, 2).T
    requests = PlanRequests(tokens, offsets, max_new_tokens.copy(), known.copy())
    settings = OrderSettings(seed=config.seed)
    return make_plan(requests, machine, config.policy, settings=settings)
