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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .config import OfflineBatchConfig
from .engine import Engine, PreparedRequest
from .feed import Feeder, Rendered, Replan, Sink
from .job_planning import JobPlanner, ShardPlan
from .learning import Learning
from .planner.requests import UNKNOWN, Int32s, Int64s, PlanRequests
from .request import BatchRequestInput, RequestOutput, engine_request_id
from .scheduling.job_plan import JobPlan, unplanned
from .send_limit import SendLimit
from .store.token_spool import TokenSpool

logger = logging.getLogger(__name__)

# Of a request that declares none; above any context length.
NO_LIMIT = 1 << 24
# What was rendered for the plan is kept for sending, as far as it takes little memory:
# so many requests, of so many prompt tokens in all. The rest is rendered again.
KEPT_REQUESTS = 1 << 12
KEPT_TOKENS = 1 << 21

Indices = Sequence[int] | NDArray[np.int64]


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
        limit: how many may be in the engine, if that changes while the job runs.
        directory: where the prompts' tokens lie while the job is planned; by default
            where the system has its temporary files.
        priority: of jobs that are open at a time, those of the highest go first.
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
        limit: SendLimit | None = None,
        directory: Path | None = None,
        priority: int = 0,
    ) -> None:
        self._job_id = job_id
        self._requests = requests
        self._todo = todo
        self._engine = engine
        self._config = config
        self._sink = sink
        self._on_rendered = on_rendered
        self._limit = limit
        self._directory = directory
        self._kept: dict[int, PreparedRequest] = {}
        self._priority = priority
        # Share of the prompt tokens that a perfect prefix cache would save; None
        # until the job is planned by a policy that looks at tokens.
        self.optimal_prefix_sharing_ratio: float | None = None

    async def set_priority(self, priority: int) -> None:
        """Change the priority; at once for what the engine has of the job."""
        self._priority = priority
        await self._engine.set_priority(self._job_id, priority)

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
        # A single request has no order to find.
        if self._config.policy == "fcfs" or len(self._todo) < 2:
            feeder = self._feeder()
            feeder.follow(np.asarray(self._todo, dtype=np.int64))
            plans = [unplanned(self._engine.machine)]
        else:
            planner = await self._read_prompts()
            learning = Learning(planner.sample, planner.num_unknown)
            feeder = self._feeder(learning, partial(self._replan, planner))
            shards, plans = await asyncio.to_thread(self._plans, planner)
            self._log(planner, shards)
            feeder.adopt(shards)
        try:
            await self._engine.open_job(self._job_id, plans)
            if self._priority:
                await self.set_priority(self._priority)
            await feeder.run()
        finally:
            await self._engine.close_job(self._job_id)

    async def _read_prompts(self) -> JobPlanner:
        """Render every request, and keep of it what planning needs.

        Requests that cannot be rendered are answered here and left out.
        """
        planned: list[int] = []
        limits: list[tuple[int, int]] = []
        num_tokens = 0
        with (
            TemporaryDirectory(prefix="tokens-", dir=self._directory) as directory,
            TokenSpool(Path(directory) / "tokens.i32") as spool,
        ):
            async with aclosing(self._render_all()) as rendered:
                async for request, prepared in rendered:
                    self._on_rendered()
                    if isinstance(prepared, RequestOutput):
                        self._sink(request, prepared)
                    else:
                        input_ids = prepared.input_ids or ()
                        spool.append(input_ids)
                        num_tokens += len(input_ids)
                        if num_tokens <= KEPT_TOKENS and len(planned) < KEPT_REQUESTS:
                            self._kept[request.index] = prepared
                        limits.append(_output_limits(prepared))
                        planned.append(request.index)
            max_new_tokens, known = np.array(limits, np.int32).reshape(-1, 2).T
            return await asyncio.to_thread(
                JobPlanner,
                PlanRequests(*spool.arrays(), max_new_tokens.copy(), known.copy()),
                np.asarray(planned, dtype=np.int64),
                self._engine.machine,
                self._config,
                self._engine.num_replicas,
            )

    async def _replan(
        self, planner: JobPlanner, numbers: Int64s, output_len: Int32s
    ) -> list[ShardPlan]:
        """Plan again with new answers, and have the engine go by it."""
        shards, plans = await asyncio.to_thread(
            self._plans, planner, numbers, output_len
        )
        logger.info(
            "Job %s: %d answers make a new plan; order %s",
            self._job_id,
            len(numbers),
            shards[0].plan.policy,
        )
        await self._engine.open_job(self._job_id, plans)
        return shards

    def _plans(
        self,
        planner: JobPlanner,
        numbers: Int64s | None = None,
        output_len: Int32s | None = None,
    ) -> tuple[list[ShardPlan], list[JobPlan]]:
        """Each replica's plan, and the part of it that its scheduler carries out."""
        if numbers is not None and output_len is not None:
            planner.observe(numbers, output_len)
        shards = planner.plans()
        return shards, [shard.for_scheduler(self._engine.machine) for shard in shards]

    def _log(self, planner: JobPlanner, shards: list[ShardPlan]) -> None:
        ratio = planner.tree.prefix_sharing_ratio
        self.optimal_prefix_sharing_ratio = ratio
        logger.info(
            "Job %s: %d requests, %d prompt tokens, %.1f%% of them shareable; order %s",
            self._job_id,
            planner.num_requests,
            planner.tree.num_tokens,
            100 * ratio,
            shards[0].plan.policy,
        )

    def _feeder(
        self, learning: Learning | None = None, replan: Replan | None = None
    ) -> Feeder:
        return Feeder(
            self._engine,
            self._config,
            len(self._requests),
            partial(self._render, tokenize=False),
            self._sink,
            learning,
            replan,
            self._limit,
        )

    async def _render(self, number: int, *, tokenize: bool) -> Rendered:
        request = self._requests[number]
        if (kept := self._kept.pop(number, None)) is not None:
            return request, kept
        rid = engine_request_id(self._job_id, request.index)
        return request, await self._engine.prepare(request, rid, tokenize=tokenize)

    async def _render_all(self) -> AsyncGenerator[Rendered]:
        """All requests with their tokens, rendered some ahead of their turn."""
        ahead: deque[asyncio.Task[Rendered]] = deque()
        try:
            for index in self._todo:
                render = self._render(int(index), tokenize=True)
                ahead.append(asyncio.ensure_future(render))
                if len(ahead) == self._config.render_lookahead:
                    yield await ahead.popleft()
            while ahead:
                yield await ahead.popleft()
        finally:
            for task in ahead:
                task.cancel()


def _output_limits(prepared: PreparedRequest) -> tuple[int, int]:
    """The most tokens a request generates, and how many it does if that is known."""
    most = NO_LIMIT
    if prepared.max_new_tokens is not None:
        most = min(prepared.max_new_tokens, NO_LIMIT)
    return most, most if prepared.ignore_eos and most < NO_LIMIT else UNKNOWN
