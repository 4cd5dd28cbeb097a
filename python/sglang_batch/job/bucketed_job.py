"""A job of any size: one :class:`~.job.Job`, or one for each bucket of its requests.

A plan in one piece takes half a kilobyte for each request. A larger job is dealt to buckets of
requests whose prompts begin alike, each of which is planned as a job of its own. Two of them are
in the engine at a time. The earlier one goes first, and the other one has requests ready when
it ends, so that the engine never waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..config import OfflineBatchConfig
from ..planner.requests import Int64s
from ..policies import POLICY_TABLE
from ..request import BatchRequestInput, RequestOutput, Requests, Sink
from .accounting.occupancy import Tail
from .engine import Engine
from .job import Job, sharing_ratio
from .prompt_buckets import deal_requests
from .rendering import Indices

logger = logging.getLogger(__name__)

# Buckets that are in the engine at a time.
OPEN_BUCKETS = 2


class BucketedJob:
    """Runs the requests ``todo`` of ``requests``, as :class:`~.job.Job` does.

    Attributes:
        in_one_piece: whether it is one job.
        tail: of the job in one piece, or of its last bucket.
        num_buckets: 1 for a job in one piece. Of another one, 0 until it is dealt.
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
        directory: Path | None = None,
    ) -> None:
        self._job_id = job_id
        self._requests = requests
        self._todo = todo
        self._engine = engine
        self._config = config
        self._sink = sink
        self._on_rendered = on_rendered
        self._directory = directory
        self._prompt_tokens = self._unique_tokens = 0
        planned = POLICY_TABLE[config.policy].uses_prompts
        self.in_one_piece = not planned or len(requests) <= config.bucket_requests
        self.num_buckets = int(self.in_one_piece)
        self.tail = Tail()

    @property
    def prefix_sharing_ratio(self) -> float | None:
        """As of :class:`~.job.Job`, of the buckets that have ended."""
        return sharing_ratio(self._prompt_tokens, self._unique_tokens)

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Run until all requests are answered or ``stop`` is set.

        Raises:
            Exception: as of :meth:`.job.Job.run`.
        """
        if self.in_one_piece:
            job = self._job(self._job_id, self._requests, self._todo, self._sink)
            return await self._finish(job, stop)
        buckets = await asyncio.to_thread(
            deal_requests,
            self._requests,
            self._config.bucket_requests,
            self._config.seed,
        )
        self.num_buckets = len(buckets)
        logger.info(
            "Job %s: %d requests in %d buckets, the largest of %d",
            self._job_id,
            len(self._requests),
            len(buckets),
            max(map(len, buckets)),
        )
        is_left = np.zeros(len(self._requests), np.bool_)
        is_left[np.asarray(self._todo, np.int64)] = True
        try:
            async with asyncio.TaskGroup() as group:
                room = asyncio.Semaphore(OPEN_BUCKETS)
                for bucket, numbers in enumerate(buckets):
                    left = np.flatnonzero(is_left[numbers]).astype(np.int64)
                    if not len(left):
                        continue
                    await room.acquire()
                    if stop is not None and stop.is_set():
                        break
                    job = self._bucket_job(bucket, numbers, left)
                    running = group.create_task(self._finish(job, stop, numbers))
                    running.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as failures:
            # The first failure cancelled the rest; it is the one to report.
            raise failures.exceptions[0] from None

    async def _finish(
        self, job: Job, stop: asyncio.Event | None, numbers: Int64s | None = None
    ) -> None:
        """Run a job, of the bucket of ``numbers`` unless it is the whole one."""
        await job.run(stop)
        self.tail = tail = job.tail()
        if numbers is not None:
            last = tuple(numbers[list(tail.last)].tolist())
            self.tail = dataclasses.replace(tail, last=last)
        self._prompt_tokens += job.num_prompt_tokens
        self._unique_tokens += job.num_unique_tokens

    def _bucket_job(self, bucket: int, numbers: Int64s, todo: Int64s) -> Job:
        members = _Members(self._requests, numbers)

        def sink(request: BatchRequestInput, output: RequestOutput) -> None:
            index = int(numbers[request.index])
            self._sink(dataclasses.replace(request, index=index), output)

        # All ids of a job have one length.
        job_id = f"{self._job_id}-{bucket:06d}"
        return self._job(job_id, members, todo, sink, self.num_buckets - bucket)

    def _job(
        self,
        job_id: str,
        requests: Requests,
        todo: Indices,
        sink: Sink,
        priority: int = 0,
    ) -> Job:
        config = self._config
        if not self.in_one_piece and config.max_inflight is not None:
            share = max(1, config.max_inflight // OPEN_BUCKETS)
            config = dataclasses.replace(config, max_inflight=share)
        return Job(
            job_id, requests, todo, self._engine, config, sink,
            on_rendered=self._on_rendered,
            directory=self._directory,
            priority=priority,
            # Of several buckets, the next one needs all replicas.
            releases=self.in_one_piece,
        )  # fmt: skip


class _Members(Sequence[BatchRequestInput]):
    """The requests of a bucket, by their place in it."""

    def __init__(self, requests: Requests, numbers: Int64s) -> None:
        self._requests = requests
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> BatchRequestInput:  # type: ignore[override]
        request = self._requests[int(self._numbers[index])]
        return dataclasses.replace(request, index=index)
