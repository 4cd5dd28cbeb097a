"""One batch of a server, from whatever status it is in to its end.

::

    validating -> in_progress -> finalizing -> completed
         |             |
         |             +-> expired
         |             +-> cancelling -> cancelled
         +-> failed

Only the latest results are in memory alone, and not for long: another server can resume
the batch at any point.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from ..batch_api import protocol as api
from ..batch_api.equal_requests import find_equal
from ..batch_api.jsonl import BatchFile, FileErrors, validate
from ..batch_api.lines import BodyCheck, LineRules, result_line
from ..batch_api.stop_rules import with_stop_rules
from ..config import OfflineBatchConfig
from ..errors import StoreError
from ..job import traces
from ..job.answer_cache import ModelAnswers, answer_known
from ..job.early_stop import num_enough
from ..job.engine import Engine
from ..job.inflight_limit import InflightLimit
from ..job.job import Job, JobOptions
from ..job.retrying_engine import RetryingEngine, engine_died
from ..request import (
    BatchRequestInput,
    RequestOutput,
    Requests,
    Sink,
    engine_request_id,
)
from ..store.batch_store import BatchStore, Row, now
from ..store.files import atomic_write
from ..store.result_log import ResultLog
from .access.keys import find_allowance
from .access.usage import enqueued_refusal
from .background import Repeated, in_thread
from .bills import Bill
from .progress import batch_changed
from .result_saver import Pauses, ResultSaver, finish


@dataclass
class Stop:
    """An order to stop a batch with this final status.

    None: the next server resumes it.
    """

    event: asyncio.Event
    end: str | None = None

    def set(self, end: str | None) -> None:
        if not self.event.is_set():
            self.end = end
            self.event.set()


# A block during which the engine has no lines of other batches.
AloneInEngine = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class RunnerHooks:
    """The runner's side of a batch that it runs.

    The batch enters ``alone`` while it has to be alone in the engine, and calls
    ``settle`` to have the costs of batches written.
    """

    alone: AloneInEngine
    on_valid: Callable[[], None]
    settle: Callable[[], Awaitable[None]]
    count_every_s: float


class BatchRun:
    """A batch while a server works on it.

    The runner sets ``may_run`` to start it and ``stop`` to end it. ``limit`` says
    how many of its lines may be in the engine, and ``engine`` retries them.
    """

    def __init__(
        self,
        batch_id: str,
        store: BatchStore,
        config: OfflineBatchConfig,
        engine: Engine,
        bill: Bill,
        hooks: RunnerHooks,
        answers: ModelAnswers | None = None,
    ) -> None:
        self.batch_id = batch_id
        self.store = store
        self.config = config
        self.engine = RetryingEngine(engine, config, bill.account)
        self._bill = bill
        self.hooks = hooks
        self.answers = answers
        self.may_run = asyncio.Event()
        self.stop = Stop(asyncio.Event())
        self.limit = InflightLimit()
        self.pauses = Pauses(batch_id, store, self.limit)
        self.priority = 0
        self._num_finishing = 0
        self._num_left: int | None = None
        self._saver: ResultSaver | None = None
        self._suspects: Suspects | None = None
        self._answering: Answering | None = None

    async def process(self) -> None:
        """Take the batch to its end, or to where it stops. Another run can resume it."""
        traces.enter(json.loads(self.row()["trace_context"]))
        async with traces.span("batch", root=True):
            traces.note(id=self.batch_id)
            await self._process()
            if (row := self.store.get_batch(self.batch_id)) is not None:
                # Counts and times. Texts are the client's.
                traces.note(**{k: v for k, v in row.items() if isinstance(v, int)})
                traces.note(row["status"], model=row["model"] or "")

    async def _process(self) -> None:
        if not await self._validate():
            return
        self.hooks.on_valid()
        await self._wait_until_allowed()
        row = self.row()
        if row["status"] not in api.ACTIVE_STATUSES:
            return
        if self.stop.event.is_set() and self.stop.end is None:
            return
        requests = await asyncio.to_thread(open_input, self.store, self.batch_id)
        with requests.closing():
            await self._run(requests)

    @property
    def num_left(self) -> int | None:
        """Lines without a result, or None until the input is validated."""
        if self._saver is None:
            return self._num_left
        return len(self._saver.log) - self._saver.log.num_done

    @property
    def is_started(self) -> bool:
        """Whether it runs. If its client's limit is used up, others take its place."""
        return self.may_run.is_set() and "limit" not in self.pauses

    def finishing(self) -> str:
        """Of a batch that is paused, the lines that run nevertheless, as a sentence."""
        num = len(self.engine.in_flight)
        # The number at first: what becomes of it is in the batch's counts.
        self._num_finishing = (self._num_finishing or num) if num else 0
        if not self._num_finishing:
            return ""
        return f" {self._num_finishing:,} of its lines had begun and run to their end."

    def row(self) -> Row:
        row = self.store.get_batch(self.batch_id)
        if row is None:
            raise StoreError(f"batch {self.batch_id} vanished from the store")
        return row

    def stop_if_due(self, row: Row, closing: bool) -> None:
        """Stop a batch that is cancelled or past its window, or as the server closes."""
        if row["status"] == api.CANCELLING:
            self.stop.set(api.CANCELLED)
        elif now() >= row["expires_at"] and row["status"] != api.FINALIZING:
            self.stop.set(api.EXPIRED)
        elif closing:
            self.stop.set(None)

    async def set_priority(self, priority: int) -> None:
        if priority != self.priority:
            self.priority = priority
            if self._answering is not None:
                await self._answering.set_priority(priority)

    def blame(self, num_lines: int, num_others: int) -> None:
        """Record that the engine died with lines in flight, online requests included."""
        if self._suspects is not None and self.engine.in_flight:
            self._suspects.blame(self.engine.in_flight, num_lines, num_others)

    def fail(self, errors: FileErrors) -> None:
        listed = errors_json(errors)
        # A client that was told that its batch is being cancelled never sees it fail.
        for statuses, end in (
            ((api.CANCELLING,), api.CANCELLED),
            (api.ACTIVE_STATUSES, api.FAILED),
        ):
            ended = {f"{end}_at": now(), "errors": listed, "paused_reason": None}
            if self.store.transition(self.batch_id, statuses, end, **ended):
                row = self.store.get_batch(self.batch_id)
                if row is not None:  # its client may have deleted it already
                    batch_changed(row)
                break

    async def give_up(self, errors: FileErrors) -> None:
        """End the batch because the server failed, or raise StoreError."""
        if not self.row()["total"]:
            self.fail(errors)
            return
        requests = await asyncio.to_thread(open_input, self.store, self.batch_id)
        with requests.closing():
            saver = await self._open_results(len(requests))
            try:
                days, listed = self.config.file_days, errors_json(errors)
                await finish(saver, requests, api.FAILED, days, listed)
            finally:
                saver.log.close()

    def clean_up(self) -> None:
        shutil.rmtree(self.store.work_dir(self.batch_id), ignore_errors=True)

    @traces.span("validate")
    async def _validate(self) -> bool:
        """Check the input if it was not checked before. False if that ended the batch."""
        row = self.row()
        if row["status"] not in (api.VALIDATING, api.CANCELLING):
            self._num_left = row["total"] - row["completed"] - row["failed"]
            return True
        if row["status"] == api.CANCELLING and row["total"]:
            return True  # cancelled after an earlier server had found it valid
        found = await asyncio.to_thread(
            check_input,
            self.store,
            row,
            self.engine.model_names,
            self.config.max_batch_requests,
        )
        if isinstance(found, FileErrors):
            self.fail(found)
            return False
        with found.closing():
            num_lines, model = len(found), found.model()
        most = self.config.max_enqueued_tokens
        # At once, since other batches of the client may be at this point.
        with self.store.atomic():
            why = enqueued_refusal(self.store, row, most, model)
            if why is None:
                self._num_left = num_lines
                self.store.update_batch(
                    self.batch_id, total=num_lines, model=model or None
                )
                begun = self.store.transition(
                    self.batch_id,
                    (api.VALIDATING,),
                    api.IN_PROGRESS,
                    in_progress_at=now(),
                )
        if why is not None:
            self.fail(FileErrors.of("token_limit_exceeded", why))
        elif begun:
            batch_changed(self.row())
        return why is None

    @traces.span("wait")
    async def _wait_until_allowed(self) -> None:
        if self.row()["status"] == api.FINALIZING:
            return  # an earlier server was about to end it
        events = (self.may_run, self.stop.event)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _run(self, requests: BatchFile) -> None:
        row = self.row()
        directory = self.store.work_dir(self.batch_id)
        self._suspects = Suspects(directory / "suspects.json")
        self._saver = saver = await self._open_results(len(requests))
        log = saver.log
        stop = self.stop
        try:
            if row["status"] == api.FINALIZING and row["expired_at"]:
                stop.set(api.EXPIRED)  # an earlier server had begun to expire it
            self.stop_if_enough(row["enough"], log)
            if row["paused_reason"]:
                self.pauses.tell()
            if len(log.unfinished()) and not stop.event.is_set():
                self._answering = Answering(self, row, requests, saver, self._suspects)
                await self._answering.run(stop.event)
            if stop.event.is_set() and stop.end is None:
                return
            end = stop.end or api.COMPLETED
            if not len(log.unfinished()):
                # Every line was answered before the batch could be stopped.
                end = api.CANCELLED if end == api.CANCELLED else api.COMPLETED
            await self.hooks.settle()
            async with traces.span("finish"):
                await finish(saver, requests, end, self.config.file_days)
        finally:
            log.close()

    def stop_if_enough(self, share: float | None, log: ResultLog) -> None:
        """Complete the batch once this share of its lines has an answer."""
        if share is None or self.stop.event.is_set():
            return
        if log.num_completed >= num_enough(share, len(log), log.num_failed):
            self.stop.set(api.COMPLETED)

    async def _open_results(self, num_requests: int) -> ResultSaver:
        """The results so far. Reading a large log back takes seconds."""

        def opened() -> ResultSaver:
            path = self.store.work_dir(self.batch_id) / "results.jsonl"
            return ResultSaver(
                self.batch_id,
                self.store,
                ResultLog(path, num_requests),
                self.pauses,
                lambda: self._bill.seconds,
            )

        return await in_thread(opened)


@dataclass(eq=False)
class Answering:
    """One batch's way through the engine.

    Of its lines, the suspects may have taken the engine down. ``saver`` has the
    results of earlier servers, too.
    """

    batch: BatchRun
    row: Row
    requests: Requests
    saver: ResultSaver
    suspects: Suspects

    def __post_init__(self) -> None:
        self.config = self.batch.config
        if self.row["dedupe"] is not None:
            self.config = dataclasses.replace(self.config, dedupe=self.row["dedupe"])
        self._requests = with_stop_rules(self.requests, self.config.stop_rules)
        self._sink: Sink = self._store
        self._job: Job | None = None
        self._equal = find_equal(self._requests, (), self.config.dedupe)

    async def set_priority(self, priority: int) -> None:
        if self._job is not None:
            await self._job.set_priority(priority)

    async def run(self, stop: asyncio.Event) -> None:
        """Answer lines until each answer is on disk, or ``stop`` is set."""
        hooks, kept = self.batch.hooks, self.batch.answers
        counting = Repeated(
            self.saver.save_counts, hooks.count_every_s, "Counting lines"
        )
        counting.start()
        try:
            groups = self.suspects.groups()
            suspects = {index for group in groups for index in group}
            # Lines that are equal to a suspect wait for its answer.
            self._equal = await asyncio.to_thread(
                find_equal,
                self._requests,
                self.saver.log.unfinished(),
                self.config.dedupe,
                suspects | set(self.suspects.never()),
            )
            # Lines that took the engine down while they were alone in it.
            for index in self.suspects.never():
                rid = engine_request_id(self.saver.batch_id, index)
                died = engine_died(rid, self.suspects.num_deaths)
                self._equal.sharing(self._store)(self._requests[index], died)
            left, self._sink = await answer_known(
                None if kept is None else kept.of(self.row["owner"]),
                self._requests,
                self._equal.todo,
                self._equal.sharing(self._store),
            )
            computed = left.tolist()
            done = suspects | set(self.suspects.never())
            todo = [index for index in computed if index not in done]
            await self._run_job(todo, stop)
            unfinished = set(self.saver.log.unfinished().tolist())
            unfinished &= suspects & set(computed)
            for group in groups:
                if todo := [index for index in group if index in unfinished]:
                    async with hooks.alone():
                        await self._run_job(todo, stop)
            await self.saver.all_saved(stop)
        finally:
            await counting.stop()
            await self.saver.save_counts()

    async def _run_job(self, todo: list[int], stop: asyncio.Event) -> None:
        if not todo or stop.is_set():
            return
        self._job = Job(
            self.saver.batch_id,
            self._requests,
            todo,
            self.batch.engine,
            self.config,
            self._sink,
            JobOptions(
                limit=self.batch.limit,
                directory=self.batch.store.work_dir(self.batch.batch_id),
                priority=self.batch.priority,
            ),
        )
        try:
            await self._job.run(stop)
        finally:
            ratio = self._job.prefix_sharing_ratio
            self._job = None
            # The ratio of only some of the lines would not describe the batch.
            num_answered = len(todo) + self._equal.num_merged
            if ratio is not None and num_answered == len(self._requests):
                self.saver.save_optimal_share(ratio)

    def _store(self, request: BatchRequestInput, output: RequestOutput) -> None:
        line = result_line(request, self.saver.batch_id, output)
        self.saver.put(request.index, line, output)
        self.batch.stop_if_enough(self.row["enough"], self.saver.log)


# How a line runs again, from least to most suspect.
IN_GROUPS, ALONE, ALONE_AGAIN, NEVER = 1, 2, 3, 4
# The most lines that run one at a time without running in groups first.
FEW = 64


class Suspects:
    """Lines of one batch that may have taken the engine down, kept across restarts.

    When an engine dies, any line that it had in flight may be the reason. These suspects
    run again after all other lines, alone in the engine: one at a time, or in groups first
    if there are many. A line that is alone when the engine dies is the reason. If online
    requests were running too, it is taken for the reason only the second time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_deaths = 0
        self._how: dict[int, int] = {}
        if path.exists():
            kept = json.loads(path.read_bytes())
            self.num_deaths = kept["num_deaths"]
            self._how = {int(index): how for index, how in kept["lines"].items()}

    def blame(
        self, in_flight: Iterable[int], num_lines: int, num_others: int = 0
    ) -> None:
        """Record that the engine died with these lines, of ``num_lines``, and others."""
        self.num_deaths += 1
        for index in in_flight:
            how = self._how.get(index)
            if num_lines == 1 and how in (ALONE, ALONE_AGAIN):
                sure = not num_others or how == ALONE_AGAIN
                self._how[index] = NEVER if sure else ALONE_AGAIN
            elif num_lines <= FEW or how is not None:
                self._how[index] = max(ALONE, how or ALONE)
            else:
                self._how[index] = IN_GROUPS
        with atomic_write(self._path) as file:
            kept = {"num_deaths": self.num_deaths, "lines": self._how}
            file.write(json.dumps(kept).encode())

    def never(self) -> list[int]:
        return self._of(NEVER)

    def groups(self) -> list[list[int]]:
        """Groups of lines. Each group runs alone in the engine."""
        many = self._of(IN_GROUPS)
        size = max(1, round(len(many) ** 0.5))
        groups = [many[at : at + size] for at in range(0, len(many), size)]
        alone = self._of(ALONE) + self._of(ALONE_AGAIN)
        return groups + [[index] for index in sorted(alone)]

    def _of(self, how: int) -> list[int]:
        return sorted(index for index, one in self._how.items() if one == how)


def check_input(
    store: BatchStore, row: Row, models: tuple[str, ...], max_requests: int | None
) -> BatchFile | FileErrors:
    """Copy and validate the file that a batch names.

    Returns the file, ready to be read, or the errors for which the batch cannot
    run.
    """
    if not _copy_input(store, row):
        message = f"Cannot find file {row['input_file_id']}."
        return FileErrors.of("invalid_request", message, "file_id")
    rules = LineRules(
        endpoint=row["endpoint"],
        models=models,
        check_body=model_check(store, row["owner"], models),
    )
    found = validate(_input_path(store, row["id"]), rules)
    if (
        isinstance(found, BatchFile)
        and max_requests is not None
        and len(found) > max_requests
    ):
        with found.closing():
            message = (
                f"The input file has {len(found):,} requests. This server accepts "
                f"at most {max_requests:,} in a batch. Split it into several files."
            )
            return FileErrors.of("too_many_tasks", message)
    return found


def model_check(
    store: BatchStore, owner: str, served: tuple[str, ...]
) -> BodyCheck | None:
    """The check of a line's model for a client with a list of models, or None."""
    rules = find_allowance(store.rows, owner).model_rules(served)
    if rules is None:
        return None

    def check(url: str, body: bytes) -> list[tuple[str, str | None]]:
        why = rules.body_refusal(url, body)
        return [] if why is None else [why]

    return check


def open_input(store: BatchStore, batch_id: str) -> BatchFile:
    """The input of a valid batch. Raises StoreError if its file has changed since."""
    # Nothing but the position of each line is needed again.
    rules = LineRules(require_model=False)
    found = validate(_input_path(store, batch_id), rules)
    if isinstance(found, BatchFile):
        return found
    raise StoreError(f"the input of {batch_id} changed on disk: {found.listed[0]}")


def errors_json(errors: FileErrors) -> str:
    """A batch's errors as its object shows them. ``total``, of all, is not OpenAI's."""
    data = [
        {"code": e.code, "line": e.line, "message": e.message, "param": e.param}
        for e in errors.listed
    ]
    return json.dumps({"object": "list", "data": data, "total": errors.total})


def _input_path(store: BatchStore, batch_id: str) -> Path:
    return store.work_dir(batch_id) / "input.jsonl"


def _copy_input(store: BatchStore, row: Row) -> bool:
    """Make a copy that outlives the client's file. False if that does not exist."""
    copy = _input_path(store, row["id"])
    copy.parent.mkdir(exist_ok=True)
    if copy.exists():
        return True
    # The id comes from a client: it is a path only if it names a file of the store.
    if store.get_file(row["input_file_id"], row["owner"]) is None:
        return False
    source = store.file_path(row["input_file_id"])
    try:
        os.link(source, copy)
    except FileNotFoundError:
        return False
    except OSError:  # a file system without hard links
        with open(source, "rb") as given, atomic_write(copy) as file:
            shutil.copyfileobj(given, file, 1 << 20)
    return True
