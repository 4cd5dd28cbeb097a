"""The part of a run in which the engine works: from its start to the last answer."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec

from ..batch_api.equal_requests import EqualRequests, find_equal
from ..batch_api.lines import invalid_line, result_line, unrun_line
from ..batch_api.stop_rules import with_stop_rules
from ..errors import SGLangBatchError, StoreError, StoreWriteError
from ..fleet.fleet_engine import FleetEngine
from ..fleet.fleet_worker import WorkerState
from ..inputs.local_input import write_digests
from ..job import traces
from ..job.answer_cache import CachedAnswers, answer_known
from ..job.bucketed_job import BucketedJob
from ..job.early_stop import GIVEN_UP, given_up_message, num_enough
from ..job.job_planner import compile_planner
from ..job.occupancy import Tail
from ..request import BatchRequestInput, RequestOutput, Usage
from ..store.result_log import ResultLog
from .backend_options import EngineSettings
from .engine_log import EngineLog, end_process
from .job_directory import JobRecord
from .model_place import served_name
from .prepare import PreparedRun
from .progress import Display, Progress
from .shared_state import TakenOver
from .stop_signals import StopSignals
from .summary import Counts, LastRequests, Summary

COMMIT_EVERY_S = 0.5
WATCH_EVERY_S = 2.0
SHARE_EVERY_S = 10.0
_T = TypeVar("_T")


@dataclass(eq=False)
class RunningJob:
    """Runs the requests of a job that have no result yet.

    Args:
        prepared: a job that is not complete.
        cached: answers of earlier jobs, and those of this one for later ones.
    """

    prepared: PreparedRun
    settings: EngineSettings
    engine_log: EngineLog
    display: Display
    cached: CachedAnswers | None = None

    def __post_init__(self) -> None:
        assert self.prepared.local is not None and self.prepared.requests is not None
        self._directory = self.prepared.directory
        self._job_id = self.prepared.directory.job_id
        self._local = self.prepared.local
        self._requests = self.prepared.requests
        self._config = self.prepared.config
        self._enough = self.prepared.options.enough
        self._begun = time.monotonic()
        self._started = False
        self._fleet: FleetEngine | None = None
        self._signals = StopSignals()

    def run(self) -> Summary | None:
        """Load the model, run the requests, and write the output.

        Returns:
            None if a signal stopped the job before its end.

        Raises:
            EngineError: the engine failed; the same command may succeed.
            ConfigError: it cannot start with this model and these options.
        """
        requests, known = self._requests, self.prepared.known
        record = JobRecord(
            input_sha256=self._local.sha256(),
            model=known.model_path,
            served_model=served_name(known),
            num_requests=len(requests),
            rows=self.prepared.options.job_input.row_options(),
        )
        self._directory.begin(record, overwrite=self.prepared.afresh)
        write_digests(self._directory.digests_path, self._local)
        self._log = log = self._directory.open_log()
        self._before = Counts.of(log)
        if self._local.fields is not None:
            self.display.say(f"Order of fields: {self._local.fields}.")
        resumed = f", {log.num_done:,} of them done" if log.num_done else ""
        self.display.say(
            f"{len(requests):,} requests{resumed}. Engine's log: {self.engine_log.path}"
        )
        for index, error in requests.invalid.items():
            custom_id, message = requests.custom_id(index), self._local.described(error)
            line = invalid_line(index, custom_id, self._job_id, error.code, message)
            log.put(index, line, ok=False, usage=Usage())
        if not self._is_over:
            summary = self._run_unfinished()
        else:
            summary = Summary.of_log(log, self._before, seconds=0.0)
        if summary is None:
            return None
        if self._local.fields is not None:
            fields = msgspec.structs.asdict(self._local.fields)
            summary = replace(summary, fields=fields)
        return self._directory.finish(summary, self._given_up_line)

    @property
    def _is_over(self) -> bool:
        """Whether every request has a result, or enough of them have an answer."""
        log = self._log
        if self._enough is None:
            return log.num_done == len(log)
        return log.num_completed >= num_enough(self._enough, len(log), log.num_failed)

    def _given_up_line(self, index: int) -> bytes:
        assert self._enough is not None
        message = given_up_message(self._enough)
        return unrun_line(self._requests[index], self._job_id, GIVEN_UP, message)

    def _run_unfinished(self) -> Summary | None:
        try:
            requests = with_stop_rules(self._requests, self._config.stop_rules)
            todo, dedupe = self._log.unfinished(), self._config.dedupe
            compiling = _in_background(
                partial(compile_planner, self._config, dense=self.settings.is_dense)
            )
            equal = _in_background(partial(find_equal, requests, todo, dedupe))
            return self._run(compiling, equal)
        except StoreWriteError as error:
            raise StoreWriteError(f"{error}. {self._room()}") from error
        except SGLangBatchError:
            raise
        except Exception as error:
            traceback.print_exc()
            if self._started:
                raise
            raise self._failure(error) from error

    def _room(self) -> str:
        """The answers that a full disk has left, and the space that the others take."""
        log = self._log
        each = log.path.stat().st_size / max(1, log.num_done)
        need = max(1.0, 2 * each * (len(log) - log.num_done) / 1e6)  # log, then output
        return (
            f"{log.num_done:,} of {len(log):,} answers are kept. Free about {need:,.0f} MB, "
            "and the same command continues."
        )

    def _run(
        self, compiling: Future[None], equal: Future[EqualRequests]
    ) -> Summary | None:
        from ..srt.plugin import engine_death

        engine_death.listen(self._died)
        with ExitStack() as stack:
            with self.display.showing(self._starting):
                place, settings = self.prepared.options.engine, self.settings
                started = place.start(settings, self._directory)
                engine, loop = stack.enter_context(started)
                self._fleet = engine if isinstance(engine, FleetEngine) else None
                loop.run_until_complete(engine.connect())
            export_s = 1.0 if traces.start(self.display.say) else 0.0
            self._started = True
            capacity = f"{engine.machine.limits.kv_capacity_tokens:,} tokens of KV"
            self.display.say(
                f"Engine ready after {time.monotonic() - self._begun:.0f} s: "
                f"{settings.memory_note or capacity}."
            )
            if dashboard := _ray_dashboard():
                self.display.say(f"Ray's dashboard: {dashboard}")
            running = self._run_requests(engine, compiling, equal)
            summary: Summary | None = loop.run_until_complete(running)
            time.sleep(export_s)  # for the last spans, the engine's, too
            return summary

    @traces.span("run", root=True)
    async def _run_requests(
        self, engine: Any, compiling: Future[None], found: Future[EqualRequests]
    ) -> Summary | None:
        started = time.monotonic()
        log = self._log
        stop = asyncio.Event()
        num_requests = len(self._requests)
        traces.note(id=self._job_id, model=served_name(self.prepared.known))
        progress = Progress(
            self.display, num_requests, log, compiling, self._engines_running
        )

        def store(request: BatchRequestInput, output: RequestOutput) -> None:
            line = result_line(request, self._job_id, output)
            log.put_output(request.index, line, output)
            progress.answered()
            if self._enough is not None and self._is_over:
                stop.set()

        equal = await asyncio.wrap_future(found)
        requests, shared = equal.requests, equal.sharing(store)
        todo, sink = await answer_known(self.cached, requests, equal.todo, shared)
        job = BucketedJob(
            self._job_id, requests, todo, engine, self._config, sink,
            on_rendered=progress.rendered,
        )  # fmt: skip
        progress.will_render(len(todo) if job.in_one_piece else 0)
        self._say_savings(len(equal.todo) - len(todo), equal.num_merged, job)
        background = [
            asyncio.create_task(_commit_regularly(log)),
            asyncio.create_task(self._share_regularly(stop)),
            asyncio.create_task(_watch_kv(engine, progress)),
        ]
        with self.display.showing(progress.__str__):
            try:
                stopping = "Stopping. Another signal ends the run at once."
                say_it = partial(self.display.say, stopping)
                with self._signals.setting(stop, say_it):
                    await job.run(stop)
            finally:
                for task in background:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                self._share()
        traces.note(total=num_requests, failed=log.num_failed, **asdict(log.usage))
        if not self._is_over:
            self.display.say(self._stopped())
            traces.note("stopped")
            return None
        return Summary.of_log(
            log,
            self._before,
            time.monotonic() - started,
            optimal_cached_share=job.prefix_sharing_ratio,
            engines=self._engines(),
            tail=self._named(job.tail),
            price=self._config.dollars_per_hour,
            replicas=engine.num_replicas,
        )

    def _say_savings(self, num_known: int, num_merged: int, job: BucketedJob) -> None:
        say = self.display.say
        if num_known:
            say(f"{num_known:,} requests have an answer in the cache.")
        if num_merged:
            say(f"{num_merged:,} requests are equal to others and get their answers.")
        if not job.in_one_piece:
            say(
                f"Planned in buckets of about {self._config.bucket_requests:,} requests "
                "whose prompts begin alike."
            )

    def _named(self, tail: Tail) -> LastRequests:
        ids = tuple(self._requests[number].custom_id for number in tail.last)
        return LastRequests(round(tail.engine_s, 3), tail.requests, ids)

    async def _share_regularly(self, stop: asyncio.Event) -> None:
        """Write results to the state's URL. Stop the job if another run has taken it over."""
        if self._directory.shared is None:
            return
        failing = False
        while True:
            await asyncio.sleep(SHARE_EVERY_S)
            try:
                await asyncio.to_thread(self._share)
                failing = False
            except TakenOver:
                stop.set()
                return
            except StoreError as error:
                if not failing:
                    self.display.say(f"{error}. The job runs on and tries again.")
                failing = True

    def _share(self) -> None:
        """Make all results so far survive a power cut, and the end of this machine."""
        self._log.commit()
        if self._directory.shared is not None:
            self._directory.shared.share()

    def _engines(self) -> list[WorkerState]:
        """All engines of a fleet, none for an engine in this process."""
        return [] if self._fleet is None else self._fleet.states()

    def _engines_running(self) -> str:
        return engines_running(self._engines())

    def _starting(self) -> str:
        activity = self._engines_running() or self.engine_log.activity()
        seconds = time.monotonic() - self._begun
        return (
            f"Starting the engine{f': {activity}' * bool(activity)} ({seconds:.0f} s)"
        )

    def _stopped(self) -> str:
        log = self._log
        return (
            f"Stopped with {log.num_done:,} of {len(log):,} requests done. The same "
            "command resumes the job."
        )

    def _failure(self, error: BaseException | None) -> SGLangBatchError:
        log = self._log
        resumes = (
            f"The same command continues with {log.num_done:,} of {len(log):,} requests "
            "done. "
        )
        return self.engine_log.failure(error, started=self._started, resumes=resumes)

    def _died(self) -> NoReturn:
        """SGLang is about to end this process. End it with the reason instead."""
        with suppress(Exception):
            self._share()
        failure = None if self._signals.received else self._failure(None)
        end_process(self.display.say, failure, self._stopped())


def engines_running(states: Sequence[WorkerState]) -> str:
    """How many of several engines run, such as ``2 of 3 engines``, or ``""``."""
    if len(states) < 2:
        return ""
    running = sum(state.is_running for state in states)
    return f"{running} of {len(states)} engines"


def _in_background(function: Callable[[], _T]) -> Future[_T]:
    """Call a function in a thread. No pool: one would have a run that fails wait for it."""
    found: Future[_T] = Future()

    def call() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return found


def _ray_dashboard() -> str:
    """The URL of the cluster's dashboard, empty without a cluster or a dashboard."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    here = ray.get_runtime_context().gcs_address
    context = ray.init(here, ignore_reinit_error=True, configure_logging=False)
    url = context.dashboard_url
    return f"http://{url}" if url else ""


async def _watch_kv(engine: Any, progress: Progress) -> None:
    """Show that the engine works, until answers do."""
    before = progress.log.num_done
    with suppress(Exception):  # requests fail as well, and say why
        while progress.log.num_done == before:
            progress.kv_use = await engine.kv_use()
            await asyncio.sleep(WATCH_EVERY_S)


async def _commit_regularly(log: ResultLog) -> None:
    while True:
        await asyncio.sleep(COMMIT_EVERY_S)
        await asyncio.to_thread(log.commit)
