"""The plan of a running job: made early, extended as prompts arrive, improved by answers.

The first plan has the first stretch of the job's requests. At each doubling, and when the last
request is rendered, it is extended to all that have been rendered. In between, and after, plans
learn from answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

from ..config import OfflineBatchConfig
from ..planner.requests import Int32s, Int64s
from ..planner.sharding.speeds import ShardSpeeds
from . import traces
from .answer_feedback import AnswerFeedback
from .dispatcher import Dispatcher
from .engine import Engine
from .job_planner import JobPlanner
from .job_shards import JobProgress
from .rendering import JobRenderer, Prompts

logger = logging.getLogger(__name__)

# The first stretch ends with so many requests, or with so many prompt tokens.
FIRST_REQUESTS = 1 << 8
FIRST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class PlanHints:
    """What the caller of a job knows of it.

    expected_output_len: int32 by number, as of ``PlanRequests``. None: nothing is known.
    whole: whether nothing is sent before the whole job is planned.
    """

    expected_output_len: Int32s | None = None
    whole: bool = False


@dataclass(eq=False)
class LivePlan:
    """Plans one job, and has the engine and the dispatcher carry the plans out. It counts
    the prompt tokens that were planned so far, and those that are left with a perfect
    prefix cache."""

    job_id: str
    engine: Engine
    config: OfflineBatchConfig
    dispatcher: Dispatcher
    renderer: JobRenderer
    hints: PlanHints

    def __post_init__(self) -> None:
        self._planner: JobPlanner | None = None
        self._feedback: AnswerFeedback | None = None
        self._answers: list[tuple[Int64s, Int32s]] = []
        self._lock = asyncio.Lock()
        self.num_prompt_tokens = self.num_unique_tokens = 0

    async def start(self) -> None:
        """Plan the first stretch, or a smaller job as a whole."""
        self.dispatcher.engine_tells = self.engine.watch_job(
            self.job_id, self.dispatcher.joined
        )
        if (changes := self.engine.replica_changes) is not None:
            changes.watch(self.dispatcher.replicas_changed)
        if self.hints.whole:
            await self.renderer.until(math.inf, math.inf)
        else:
            await self.renderer.until(FIRST_REQUESTS, FIRST_TOKENS)
        await self._extend()

    def _speeds(self) -> ShardSpeeds | None:
        if (changes := self.engine.replica_changes) is None:
            return None
        speeds = changes.speeds
        # Where all are gone, whoever comes back continues with the requests it had.
        return speeds if speeds.there.any() else ShardSpeeds.equal(len(speeds))

    def stop(self) -> None:
        """No more plans are needed."""
        if (changes := self.engine.replica_changes) is not None:
            changes.unwatch(self.dispatcher.replicas_changed)

    async def grow(self) -> None:
        """Extend the plan until it covers the whole job."""
        num_requests, num_tokens = FIRST_REQUESTS, FIRST_TOKENS
        while self.dispatcher.grows:
            num_requests, num_tokens = 2 * num_requests, 2 * num_tokens
            await self.renderer.until(num_requests, num_tokens)
            await self._extend()

    @traces.span("plan")
    async def _extend(self) -> None:
        """Plan all that has been rendered so far."""
        async with self._lock:
            grows = not self.renderer.is_done
            prompts = self.renderer.prompts()
            progress = self.dispatcher.progress(whole=not grows)
            speeds = self._speeds()
            planner = await asyncio.to_thread(
                self._make_planner, prompts, progress, speeds
            )
            await self._carry_out(planner, progress, speeds)
            if self._feedback is None:
                self._feedback = AnswerFeedback(
                    planner.sample, planner.num_unknown, grows=grows
                )
                self.dispatcher.replan_from(self._feedback, self._replan)
            else:
                self._feedback.grow(planner.sample, planner.num_unknown, grows=grows)
            self.num_prompt_tokens = planner.tree.num_tokens
            self.num_unique_tokens = planner.tree.num_unique_tokens
        logger.info(
            "Job %s: %s%d requests, %d prompt tokens, %.1f%% of them shareable; order %s",
            self.job_id,
            "the first " if grows else "",
            planner.num_requests,
            planner.tree.num_tokens,
            100 * planner.tree.prefix_sharing_ratio,
            planner.policy,
        )

    def _make_planner(
        self, prompts: Prompts, progress: JobProgress, speeds: ShardSpeeds | None
    ) -> JobPlanner:
        planner = JobPlanner(
            prompts.requests,
            prompts.numbers,
            self.engine.machine,
            self.config,
            self.engine.num_replicas if speeds is None else len(speeds),
            progress,
            speeds,
        )
        planner.observed_before(self._answers, progress.stays)
        return planner

    @traces.span("plan")
    async def _replan(self, numbers: Int64s, output_len: Int32s) -> None:
        """Make a new plan of the same requests, from more answers if there are any."""
        async with self._lock:
            planner = self._planner
            assert planner is not None
            progress = self.dispatcher.progress(whole=not self.dispatcher.grows)
            speeds = self._speeds()
            if len(numbers):
                self._answers.append((numbers, output_len))
                await asyncio.to_thread(planner.observe, numbers, output_len)
            await self._carry_out(planner, progress, speeds)
            logger.info(
                "Job %s: new plan from %d answers; order %s",
                self.job_id,
                len(numbers),
                planner.policy,
            )

    async def _carry_out(
        self, planner: JobPlanner, progress: JobProgress, speeds: ShardSpeeds | None
    ) -> None:
        """Give the engine its part of a plan first, then send by it."""
        shards = await asyncio.to_thread(planner.plans, progress, speeds)
        machine = self.engine.machine
        plans = await asyncio.to_thread(
            lambda: [shard.for_scheduler(machine) for shard in shards]
        )
        await self.engine.open_job(self.job_id, plans)
        self._planner = planner
        self.dispatcher.set_plans(shards, grows=not progress.whole)
        traces.note(policy=planner.policy, requests=planner.num_requests)
