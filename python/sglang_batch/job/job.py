"""One job, from its requests to their answers: render, plan, dispatch, store.

Every entry point of the product runs its requests as a job. A job reads requests one at a
time from :class:`~.rendering.Requests` and keeps them on disk once they are rendered. The
first ones run while the others are being rendered. It uses the engine through
:class:`~sglang_batch.job.engine.Engine` and passes each answer to a sink as soon as it
arrives. An error of the server is an answer only after several attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..config import POLICY_TABLE, OfflineBatchConfig
from ..request import RequestOutput, Requests, Sink
from ..scheduling.job_plan import unplanned
from .dispatcher import Dispatcher
from .engine import Engine
from .inflight_limit import InflightLimit
from .live_plan import LivePlan, PlanHints
from .occupancy import Tail
from .rendering import Indices, JobRenderer, Rendered, task_group
from .retrying_engine import retrying

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How a job runs, besides its engine and settings.

    on_rendered: called once per request rendered for planning.
    limit: how many requests may be in the engine, for jobs that are throttled while they run.
    directory: where rendered requests are kept until they are sent, by default the system's
        temporary directory.
    priority: jobs of the highest priority are admitted first.
    hints: facts about the job, for its plan.
    releases: whether replicas may end once nothing is left for them, as no other job follows.
    """

    on_rendered: Callable[[], None] = lambda: None
    limit: InflightLimit | None = None
    directory: Path | None = None
    priority: int = 0
    hints: PlanHints = field(default_factory=PlanHints)
    releases: bool = False


class Job:
    """Runs the requests ``todo`` of ``requests`` and passes each answer to ``sink``.

    Args:
        job_id: prefix of the engine's request ids, unique among running jobs.
        todo: numbers of the requests to run, each once. All others are left alone.
        sink: called once per request, from the event loop.

    Attributes:
        prefix_sharing_ratio: share of the prompt tokens that a perfect prefix cache
            would save, among the requests that have been planned so far. None without any.
        plan: of the requests so far, with their numbers of tokens.
    """

    def __init__(
        self,
        job_id: str,
        requests: Requests,
        todo: Indices,
        engine: Engine,
        config: OfflineBatchConfig,
        sink: Sink,
        options: JobOptions | None = None,
    ) -> None:
        options = options or JobOptions()
        self._job_id = job_id
        self._todo = todo
        self._engine = engine = retrying(engine, config)
        self._config = config
        self._sink = sink
        self._options = options
        self._priority = options.priority
        self._renderer = JobRenderer(
            job_id,
            requests,
            engine,
            config.render_lookahead,
            options.hints.expected_output_len,
        )
        self._dispatcher = Dispatcher(
            engine,
            config,
            len(requests),
            self._renderer.render,
            sink,
            options.limit,
            releases=options.releases,
            job_id=job_id,
        )
        self.plan = LivePlan(
            job_id, engine, config, self._dispatcher, self._renderer, options.hints
        )

    def tail(self) -> Tail:
        """Its tail, if it ends now."""
        return self._dispatcher.tail()

    @property
    def prefix_sharing_ratio(self) -> float | None:
        return sharing_ratio(self.plan.num_prompt_tokens, self.plan.num_unique_tokens)

    async def set_priority(self, priority: int) -> None:
        """Change the priority, also of the requests that are in the engine."""
        self._priority = priority
        await self._engine.set_priority(self._job_id, priority)

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Run until all requests are answered or ``stop`` is set, which aborts the requests
        inside the engine: they get no answer.

        Raises:
            Exception: any error of the engine itself or of the sink. An error of one
                request is that request's answer.
        """
        await until_stopped(self._run(), stop)

    async def _run(self) -> None:
        try:
            # A single request needs no order.
            if POLICY_TABLE[self._config.policy].uses_prompts and len(self._todo) > 1:
                with self._renderer.spool(self._options.directory):
                    async with task_group() as group:
                        read = self._renderer.read(self._todo, self._rendered)
                        group.create_task(read)
                        await self.plan.start()
                        await self._apply_priority()
                        group.create_task(self.plan.grow())
                        await self._dispatcher.run()
                return
            self._dispatcher.engine_tells = self._engine.watch_job(
                self._job_id, self._dispatcher.joined
            )
            self._dispatcher.set_order(np.asarray(self._todo, dtype=np.int64))
            await self._engine.open_job(self._job_id, [unplanned(self._engine.machine)])
            await self._apply_priority()
            await self._dispatcher.run()
        finally:
            self.plan.stop()
            await self._engine.close_job(self._job_id)

    async def _apply_priority(self) -> None:
        if self._priority:
            await self.set_priority(self._priority)

    def _rendered(self, result: Rendered) -> None:
        """A request was rendered. One that failed is answered here."""
        self._options.on_rendered()
        request, prepared = result
        if isinstance(prepared, RequestOutput):
            self._sink(request, prepared)


def sharing_ratio(num_tokens: int, num_unique: int) -> float | None:
    """The share of tokens that prompts share. None if there are none."""
    return (num_tokens - num_unique) / num_tokens if num_tokens else None


async def until_stopped(
    work: Coroutine[Any, Any, T], stop: asyncio.Event | None
) -> T | None:
    """The result of ``work``, or None once ``stop`` is set, which cancels it."""
    task = asyncio.ensure_future(work)
    if stop is None:
        return await task
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
        result: T | None = None
        try:
            result = await task
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
    return result
