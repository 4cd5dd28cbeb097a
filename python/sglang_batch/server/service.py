"""The batches and rollouts of one server, as its routes see them.

Every process of a server that answers HTTP has a :class:`BatchService` with a
:class:`~sglang_batch.server.runner.BatchRunner`, and one of these runs the batches. The
processes share only the store, so a cancellation that reaches one process stops a batch
in another.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..batch_api import protocol as api
from ..batch_api.equal_requests import find_equal
from ..batch_api.jsonl import count_lines
from ..config import OfflineBatchConfig
from ..errors import StoreError
from ..fleet.worker_host import WorkerHost
from ..job import traces
from ..job.answer_cache import ModelAnswers
from ..job.early_stop import num_enough
from ..job.engine import SAMPLE_URL, Engine
from ..job.inflight_limit import InflightLimit
from ..job.job import Job, JobOptions
from ..job.live_plan import PlanHints
from ..planner.requests import UNKNOWN
from ..request import BatchRequestInput, RequestOutput, engine_request_id
from ..rollout.rollout_call import (
    GroupBoard,
    GroupResult,
    RolloutCall,
    SampleEnd,
    SampleResult,
    body_of,
    expected_len,
    result_of,
)
from ..scheduling.running_tree import TreeNow
from ..store.batch_store import BatchStore, OnMade, Row, now
from ..store.files import move_into_place, sync_file
from ..store.incoming import Room
from .access.keys import UNLIMITED, Allowance
from .access.usage import add_usage, check_limits, used_today
from .background import as_they_come
from .progress import History, batch_changed
from .runner import BatchRunner


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass(eq=False)
class BatchService:
    """Batches of one server process."""

    store: BatchStore
    config: OfflineBatchConfig
    server_name: str
    answers: ModelAnswers | None = None

    def __post_init__(self) -> None:
        self._engine: Engine | None = None
        self.is_closing: Callable[[], bool] = lambda: False
        # Serves the head of a fleet, if there is one.
        self.worker: WorkerHost | None = None
        self.runner: BatchRunner | None = None
        self.history = History(self.store)
        # Calls for groups of samples that this process answers, by id.
        self.rollouts: dict[str, RolloutRun] = {}
        self.room = Room(
            self.store, self.config.storage_bytes, self.config.min_free_bytes
        )
        # Large bodies that are received or wait, by client, and their turns.
        self.num_receiving: Counter[str] = Counter()
        self.turns: dict[str, asyncio.Semaphore] = {}

    async def start(
        self, engine: Engine, closing: Callable[[], bool] = lambda: False
    ) -> None:
        """Begin to run batches, see :meth:`.runner.BatchRunner.start`."""
        self._engine, self.is_closing = engine, closing
        self.worker = WorkerHost(
            engine, self.server_name, trusts=False, is_closing=closing
        )
        self.history = History(self.store, engine)
        self.runner = BatchRunner(
            self.store,
            self.config,
            self.server_name,
            engine,
            closing,
            self.history.rate,
            self.answers,
        )
        await self.runner.start()
        self.history.sampling.start()

    async def running_tree(self, limit: int) -> list[TreeNow]:
        """The prefix trees of running batches, none without the planned scheduler."""
        assert self._engine is not None
        return await self._engine.running_tree(limit) or []

    @property
    def max_inflight(self) -> int:
        """The number of requests that keeps the engine full, 0 while there is none."""
        if self._engine is None:
            return 0
        return self.config.max_inflight or self._engine.default_max_inflight

    @property
    def model_names(self) -> tuple[str, ...] | None:
        """The models served, or None before the start."""
        return None if self._engine is None else self._engine.model_names

    async def stop(self) -> None:
        """Stop running. The next server runs aborted requests again."""
        if self.worker is not None:
            await self.worker.close()
        await self.history.sampling.stop()
        if self.runner is not None:
            await self.runner.stop()

    def add_file(
        self,
        source: Path,
        filename: str,
        purpose: str,
        kept_s: int | None,
        owner: str = "",
        on_made: OnMade | None = None,
    ) -> Row:
        """Make a file in ``incoming/`` one of the API, for ``kept_s`` seconds."""
        if kept_s is None:
            kept_s = self.default_lifetime(purpose)
        file_id = new_id("file-")
        path = self.store.file_path(file_id)
        sync_file(source)  # not in the transaction, for which others wait
        try:
            # In one, so that its space is never counted twice or not at all.
            with self.store.atomic():
                move_into_place(source, path)
                row = self.store.record_file(file_id, filename, purpose, kept_s, owner)
                if on_made is not None:
                    on_made(row)
                return row
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def default_lifetime(self, purpose: str) -> int | None:
        """Seconds until a file expires by default, or None for never."""
        if purpose not in ("batch", api.BATCH_OUTPUT_PURPOSE):
            return None
        return self.config.file_days * 86_400

    def create_batch(
        self,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        metadata: dict[str, str] | None,
        *,
        owner: str = "",
        allowance: Allowance = UNLIMITED,
        same_since: int | None = None,
        on_made: OnMade | None = None,
        **fields: Any,
    ) -> Row:
        """Accept a batch, which the runner validates and runs.

        The window must be one of ``protocol.window_seconds``. If a batch with
        the same parameters was made at ``same_since`` or later, that one is
        returned, and given to ``on_made``, too. ``fields`` are further columns.
        Raises ApiError: 429, a daily limit of the owner would be exceeded.
        """
        window_s = api.window_seconds(completion_window)
        assert window_s is not None, completion_window
        columns = {
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "completion_window": completion_window,
            "metadata": None if metadata is None else json.dumps(metadata),
            "owner": owner,
            **fields,
        }
        num_lines = self._num_lines(input_file_id, owner)
        with self.store.atomic():
            row = None
            if same_since is not None:
                row = self.store.find_batch(same_since, columns)
            is_new = row is None
            if row is None:
                used = used_today(self.store.rows, owner)
                check_limits(allowance, used, batches=1, lines=num_lines)
                row = self._add_batch(columns, window_s)
                add_usage(self.store, owner, batches=1, lines=num_lines)
            if on_made is not None:
                on_made(row)
        if is_new:
            batch_changed(row)
            self._wake_runner()
        return row

    def _num_lines(self, file_id: str, owner: str) -> int:
        """Lines of a file that are not blank, counted for owners with a name."""
        if not owner or self.store.get_file(file_id, owner) is None:
            return 0
        try:
            with open(self.store.file_path(file_id), "rb") as file:
                return count_lines(file)
        except FileNotFoundError:  # deleted since: the batch will fail
            return 0

    def _add_batch(self, columns: dict[str, Any], window_s: int) -> Row:
        batch_id, created_at = new_id("batch_"), now()
        fields = {
            "id": batch_id,
            "status": api.VALIDATING,
            "created_at": created_at,
            "expires_at": created_at + window_s,
            "trace_context": json.dumps(traces.headers()),
        }
        self.store.insert("batches", fields | columns)
        row = self.store.get_batch(batch_id)
        assert row is not None
        return row

    def _wake_runner(self) -> None:
        # If another process runs the batches, its runner finds them at its next poll.
        if self.runner is not None:
            self.runner.wake()

    def cancel_batch(self, batch_id: str) -> Row | None:
        """Request the cancellation of a batch. Returns its row, None if none exists."""
        cancelling = self.store.transition(
            batch_id,
            (api.VALIDATING, api.IN_PROGRESS),
            api.CANCELLING,
            cancelling_at=now(),
        )
        row = self.store.get_batch(batch_id)
        if cancelling and row is not None:
            batch_changed(row)
            self._wake_runner()
        return row

    async def run_requests(
        self,
        job_id: str,
        requests: list[BatchRequestInput],
        priority: int = api.INTERACTIVE_PRIORITY,
    ) -> AsyncGenerator[tuple[BatchRequestInput, RequestOutput], None]:
        """Run requests that are in no file, and yield each answer as it arrives.

        They get their part of the engine's share like a batch, at any hour,
        because their client waits for the answers.
        """
        answers: asyncio.Queue[tuple[BatchRequestInput, RequestOutput] | None] = (
            asyncio.Queue()
        )
        engine, runner = self._started
        equal = await asyncio.to_thread(
            find_equal, requests, range(len(requests)), self.config.dedupe
        )
        with runner.share.wave() as limit:
            job = Job(
                job_id,
                requests,
                equal.todo,
                engine,
                self.config,
                equal.sharing(lambda *answer: answers.put_nowait(answer)),
                JobOptions(limit=limit, priority=priority),
            )
            async with aclosing(as_they_come(answers, job.run())) as found:
                async for answer in found:
                    yield answer

    async def run_rollouts(
        self, run: RolloutRun, priority: int = api.INTERACTIVE_PRIORITY
    ) -> AsyncGenerator[GroupResult]:
        """Sample groups with a part of the engine's share, and yield each as it ends."""
        _, runner = self._started
        self.rollouts[run.id] = run
        try:
            with runner.share.wave() as limit:
                async with aclosing(run.groups(self.config, limit, priority)) as over:
                    async for group in over:
                        yield group
        finally:
            del self.rollouts[run.id]

    def rollout_run(self, call: RolloutCall, owner: str) -> RolloutRun:
        """A run of a call, which has not begun."""
        engine, _ = self._started
        return RolloutRun(new_id("rollout_"), call, engine, owner)

    @property
    def _started(self) -> tuple[Engine, BatchRunner]:
        if self._engine is None or self.runner is None:
            raise StoreError("the batch service has not been started")
        return self._engine, self.runner


class RolloutRun:
    """One call for groups of samples, run as a job, which its owner may stop.

    Groups are answered as they end. Its id begins those of requests.
    """

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
        return self._call.num_samples

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
