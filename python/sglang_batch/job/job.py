"""One job, from its requests to their answers: render, plan, dispatch, store.

Every entry point of the product runs its requests as a job. A job reads requests one at
a time from :class:`~.rendering.Requests`, so that only their tokens are ever held for
all of them. It uses the engine through :class:`~sglang_batch.engine.Engine` and passes
each answer to a sink as soon as it arrives. An error of the server is an answer only after
several attempts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..config import OfflineBatchConfig
from ..engine import Engine
from ..planner.requests import Int32s, Int64s
from ..policies import POLICY_TABLE
from ..request import RequestOutput
from ..scheduling.job_plan import JobPlan, unplanned
from .answer_feedback import AnswerFeedback
from .dispatcher import Dispatcher, Sink
from .inflight_limit import InflightLimit
from .job_planner import JobPlanner
from .rendering import Indices, JobRenderer, Rendered, Requests
from .retrying_engine import retrying
from .shard_plan import ShardPlan

logger = logging.getLogger(__name__)


class Job:
    """Runs the requests ``todo`` of ``requests`` and passes each answer to ``sink``.

    Args:
        job_id: prefix of the engine's request ids, unique among running jobs.
        todo: numbers of the requests to run, each once. All others are left alone.
        sink: called once per request, from the event loop.
        on_rendered: called once per request rendered for planning.
        limit: how many requests may be in the engine, for jobs that are throttled
            while they run.
        directory: where the prompts' tokens are kept during planning. The system's
            temporary directory by default.
        priority: jobs of the highest priority are admitted first.

    Attributes:
        prefix_sharing_ratio: share of the prompt tokens that a perfect prefix cache
            would save. None until the job is planned, and for policies without a plan.
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
        limit: InflightLimit | None = None,
        directory: Path | None = None,
        priority: int = 0,
    ) -> None:
        self._job_id = job_id
        self._todo = todo
        engine = retrying(engine, config)
        self._engine = engine
        self._config = config
        self._sink = sink
        self._on_rendered = on_rendered
        self._directory = directory
        self._priority = priority
        self._renderer = JobRenderer(job_id, requests, engine, config.render_lookahead)
        self._dispatcher = Dispatcher(
            engine, config, len(requests), self._renderer.render, sink, limit
        )
        self.prefix_sharing_ratio: float | None = None

    async def set_priority(self, priority: int) -> None:
        """Change the priority, also of the requests that are in the engine."""
        self._priority = priority
        await self._engine.set_priority(self._job_id, priority)

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Run until all requests are answered or ``stop`` is set.

        ``stop`` aborts the requests inside the engine. They get no answer.

        Raises:
            Exception: any error of the engine itself or of the sink. An error of one
                request is that request's answer.
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
        # A single request needs no order.
        if POLICY_TABLE[self._config.policy].uses_prompts and len(self._todo) > 1:
            plans = await self._planned(await self._read_prompts())
        else:
            plans = self._in_input_order()
        try:
            await self._engine.open_job(self._job_id, plans)
            if self._priority:
                await self.set_priority(self._priority)
            await self._dispatcher.run()
        finally:
            await self._engine.close_job(self._job_id)

    def _in_input_order(self) -> list[JobPlan]:
        self._dispatcher.set_order(np.asarray(self._todo, dtype=np.int64))
        return [unplanned(self._engine.machine)]

    async def _read_prompts(self) -> JobPlanner:
        """Render every request for the plan. One that fails is answered here."""

        def rendered(result: Rendered) -> None:
            self._on_rendered()
            request, prepared = result
            if isinstance(prepared, RequestOutput):
                self._sink(request, prepared)

        async with self._renderer.prompts(
            self._todo, self._directory, rendered
        ) as prompts:
            return await asyncio.to_thread(
                JobPlanner,
                prompts.requests,
                prompts.numbers,
                self._engine.machine,
                self._config,
                self._engine.num_replicas,
            )

    async def _planned(self, planner: JobPlanner) -> list[JobPlan]:
        """Plan the job, now and again as answers come."""

        async def replan(numbers: Int64s, output_len: Int32s) -> list[ShardPlan]:
            await asyncio.to_thread(planner.observe, numbers, output_len)
            shards, plans = await asyncio.to_thread(self._plans, planner)
            logger.info(
                "Job %s: new plan from %d answers; order %s",
                self._job_id,
                len(numbers),
                shards[0].plan.policy,
            )
            await self._engine.open_job(self._job_id, plans)
            return shards

        shards, plans = await asyncio.to_thread(self._plans, planner)
        self.prefix_sharing_ratio = planner.tree.prefix_sharing_ratio
        logger.info(
            "Job %s: %d requests, %d prompt tokens, %.1f%% of them shareable; order %s",
            self._job_id,
            planner.num_requests,
            planner.tree.num_tokens,
            100 * planner.tree.prefix_sharing_ratio,
            shards[0].plan.policy,
        )
        feedback = AnswerFeedback(planner.sample, planner.num_unknown)
        self._dispatcher.set_plans(shards)
        self._dispatcher.replan_from(feedback, replan)
        return plans

    def _plans(self, planner: JobPlanner) -> tuple[list[ShardPlan], list[JobPlan]]:
        """Each replica's plan, and the part of it that its scheduler executes."""
        shards = planner.plans()
        return shards, [shard.for_scheduler(self._engine.machine) for shard in shards]
