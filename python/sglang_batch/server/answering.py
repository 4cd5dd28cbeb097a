"""Answers the lines of one batch that have no result yet: suspects last, alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from ..batch_api.default_stop_rules import with_stop_rules
from ..batch_api.equal_requests import find_equal
from ..batch_api.lines import result_line
from ..config import OfflineBatchConfig
from ..job.answers.cached_answers import CachedAnswers, answer_known
from ..job.inflight_limit import InflightLimit
from ..job.job import Job
from ..job.retrying_engine import RetryingEngine, engine_died
from ..request import (
    BatchRequestInput,
    RequestOutput,
    Requests,
    Sink,
    engine_request_id,
)
from ..store.suspects import Suspects
from .result_saver import ResultSaver

# A block during which the engine has no lines of other batches.
AloneInEngine = Callable[[], AbstractAsyncContextManager[None]]


class Answering:
    """One batch's way through the engine.

    Args:
        requests: all lines of the batch.
        saver: stores each result, and has those of earlier servers.
        suspects: lines that may have taken the engine down.
        alone: entered for the suspects.
        cached: answers of earlier batches of the owner. None if there are none.
        on_answer: called after each result.
        limit: how many lines may be in the engine.
        directory: holds temporary files.
        priority: higher goes first among the batches that run.
        count_every_s: how often the batch's counts are written.
    """

    def __init__(
        self,
        requests: Requests,
        saver: ResultSaver,
        suspects: Suspects,
        engine: RetryingEngine,
        alone: AloneInEngine,
        config: OfflineBatchConfig,
        *,
        cached: CachedAnswers | None,
        on_answer: Callable[[], None],
        limit: InflightLimit,
        directory: Path,
        priority: int,
        count_every_s: float,
    ) -> None:
        self._requests = with_stop_rules(requests, config.stop_rules)
        self._saver = saver
        self._suspects = suspects
        self._engine = engine
        self._alone = alone
        self._config = config
        self._cached = cached
        self._on_answer = on_answer
        self._sink: Sink = self._store
        self._limit = limit
        self._directory = directory
        self._priority = priority
        self._count_every_s = count_every_s
        self._job: Job | None = None
        self._equal = find_equal(self._requests, (), config.dedupe)

    async def set_priority(self, priority: int) -> None:
        """Change the priority of the lines that are sent from now on."""
        if self._job is not None:
            await self._job.set_priority(priority)
        self._priority = priority

    async def run(self, stop: asyncio.Event) -> None:
        """Answer the lines without a result, until ``stop`` is set.

        Returns only when every answer is on disk, or ``stop`` is set.
        """
        counting = asyncio.create_task(self._count_regularly())
        try:
            groups = self._suspects.groups()
            suspects = {index for group in groups for index in group}
            # Lines that are equal to a suspect wait for its answer.
            self._equal = await asyncio.to_thread(
                find_equal,
                self._requests,
                self._saver.log.unfinished(),
                self._config.dedupe,
                suspects | set(self._suspects.never()),
            )
            self._reject_deadly()
            left, self._sink = await answer_known(
                self._cached,
                self._requests,
                self._equal.todo,
                self._equal.sharing(self._store),
            )
            computed = left.tolist()
            done = suspects | set(self._suspects.never())
            todo = [index for index in computed if index not in done]
            await self._run_job(todo, stop)
            unfinished = set(self._unfinished()) & suspects & set(computed)
            for group in groups:
                if todo := [index for index in group if index in unfinished]:
                    async with self._alone():
                        await self._run_job(todo, stop)
            await self._saver.all_saved(stop)
        finally:
            counting.cancel()
            # Awaiting the task itself could swallow the cancellation of this one.
            await asyncio.wait({counting})
            await self._saver.save_counts()

    def _unfinished(self) -> list[int]:
        found: list[int] = self._saver.log.unfinished().tolist()
        return found

    def _reject_deadly(self) -> None:
        """Answer the lines that took the engine down while they were alone in it."""
        for index in self._suspects.never():
            rid = engine_request_id(self._saver.batch_id, index)
            died = engine_died(rid, self._suspects.num_deaths)
            self._equal.sharing(self._store)(self._requests[index], died)

    async def _run_job(self, todo: list[int], stop: asyncio.Event) -> None:
        if not todo or stop.is_set():
            return
        self._job = Job(
            self._saver.batch_id,
            self._requests,
            todo,
            self._engine,
            self._config,
            self._sink,
            limit=self._limit,
            directory=self._directory,
            priority=self._priority,
        )
        try:
            await self._job.run(stop)
        finally:
            ratio = self._job.prefix_sharing_ratio
            self._job = None
            # The ratio of only some of the lines would not describe the batch.
            num_answered = len(todo) + self._equal.num_merged
            if ratio is not None and num_answered == len(self._requests):
                self._saver.save_optimal_share(ratio)

    def _store(self, request: BatchRequestInput, output: RequestOutput) -> None:
        line = result_line(request, self._saver.batch_id, output)
        self._saver.put(request.index, line, output)
        self._on_answer()

    async def _count_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._count_every_s)
            await self._saver.save_counts()
