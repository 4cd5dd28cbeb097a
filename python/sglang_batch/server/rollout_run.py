"""One call for groups of samples, run as a job: groups are answered as they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from ..config import OfflineBatchConfig
from ..job.early_stop import num_enough
from ..job.engine import SAMPLE_URL, Engine
from ..job.inflight_limit import InflightLimit
from ..job.job import Job, JobOptions
from ..job.live_plan import PlanHints
from ..planner.requests import UNKNOWN
from ..request import BatchRequestInput, RequestOutput, engine_request_id
from ..rollout.rollout_call import GroupResult, RolloutCall, SampleResult
from ..rollout.sample_groups import (
    GroupBoard,
    SampleEnd,
    body_of,
    expected_len,
    result_of,
)
from .background import as_they_come


class RolloutRun:
    """The run of one call, which its owner may stop. Its id begins those of requests."""

    def __init__(
        self, rollout_id: str, call: RolloutCall, engine: Engine, owner: str = ""
    ) -> None:
        self.id = rollout_id
        self.owner = owner
        self._call = call
        self._engine = engine
        places = range(len(call.groups))
        sizes = [call.n_of(place) for place in places]
        enough = max(1, num_enough(call.share, len(sizes), failed=0))
        self._board = GroupBoard(sizes, [call.k_of(place) for place in places], enough)
        self._prompts = [group.input_ids for group in call.groups]
        self._results: list[list[SampleResult | None]] = [[None] * n for n in sizes]
        self._over: asyncio.Queue[GroupResult | None] = asyncio.Queue()

    def __len__(self) -> int:
        return self._call.first_numbers[-1]

    def __getitem__(self, number: int) -> BatchRequestInput:
        body = body_of(self._call, *self._board.place(number))
        return BatchRequestInput(number, str(number), SAMPLE_URL, body)

    async def groups(
        self, config: OfflineBatchConfig, limit: InflightLimit, priority: int
    ) -> AsyncGenerator[GroupResult]:
        """Run all samples, and yield each group once its last sample has ended."""
        # A step of training ends with its last sample, so the longest come first.
        config = replace(config, policy="lpt")
        places = map(self._board.place, range(len(self)))
        expected = [expected_len(self._call, *place) for place in places]
        hints = PlanHints(
            expected_output_len=np.array(
                [UNKNOWN if each is None else each for each in expected], np.int32
            ),
            # Rendering is quick, and the longest may be in the last group.
            whole=True,
        )
        job = Job(
            self.id,
            self,
            range(len(self)),
            self._engine,
            config,
            self._answered,
            JobOptions(limit=limit, priority=priority, hints=hints),
        )
        async with aclosing(as_they_come(self._over, job.run())) as groups:
            async for group in groups:
                yield group

    def stop(self) -> None:
        """Abort everything that runs. The groups follow with their tokens."""
        self._abort(self._board.stop())

    def _answered(self, request: BatchRequestInput, output: RequestOutput) -> None:
        place, nth = self._board.place(request.index)
        sample = self._call.sample_of(place, nth)
        result, prompt = result_of(nth, sample, output)
        self._results[place][nth] = result
        self._prompts[place] = self._prompts[place] or prompt
        self._abort(self._board.ended(request.index, SampleEnd(result.status)))
        for over in self._board.pop_over():
            self._over.put_nowait(self._group(over))

    def _abort(self, numbers: list[int]) -> None:
        for number in numbers:
            self._engine.end_early(engine_request_id(self.id, number))

    def _group(self, place: int) -> GroupResult:
        samples = [each for each in self._results[place] if each is not None]
        self._results[place] = []  # its tokens are the caller's now
        return GroupResult(
            index=place,
            id=self._call.groups[place].id,
            status=self._board.end_of(place),
            input_ids=self._prompts[place],
            samples=samples,
        )
