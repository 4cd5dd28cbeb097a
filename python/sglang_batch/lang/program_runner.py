"""Runs many frontend programs at once, each in a thread of its own, and keeps the results.

SGLang's own executor runs in a thread per program. A program there notices a failure only
when it reads a variable, and waits forever for everything submitted afterwards. Here a
program fails in the line that caused the failure.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import tqdm
from sglang.lang.global_config import global_config
from sglang.lang.interpreter import (
    ProgramState,
    StreamExecutor,
    cache_program,
    run_internal,
)

from ..errors import ConfigError, EngineError
from .program_log import (
    ProgramJob,
    ProgramLog,
    ProgramRecord,
    from_plain,
    program_keys,
    to_plain,
)
from .waves import ProgramGroup, RequestError, WaveLane

logger = logging.getLogger(__name__)

# How long a stopped run waits for its programs to end.
STOP_PATIENCE_S = 5.0
POLL_S = 0.5


def run_programs(
    program: Any,
    backend: Any,
    batch_arguments: Sequence[dict[str, Any]],
    sampling_params: Any,
    num_threads: int | str,
    progress_bar: bool,
) -> Iterator[Any]:
    """Run a program over many arguments on a BatchBackend.

    Yields the states in the order of the arguments, each as soon as it and all before it
    are finished. Calls in flight are aborted if the caller stops early or is interrupted.
    If the backend has a job, its finished programs are not run again.

    Raises:
        ConfigError: ``num_threads`` cannot be used, or arguments cannot be compared between
            runs.
        StoreError: another process runs the job, or its file cannot be used.
    """
    if num_threads == "auto":
        num_threads = int(backend.max_live_programs)
    if not isinstance(num_threads, int) or num_threads < 1:
        raise ConfigError(
            f'num_threads={num_threads!r} must be "auto" or a number of 1 or more.'
        )
    backend.client.transport.check_caller()
    kept = bar = None
    with ExitStack() as stack:
        if backend.job is not None:
            model = [backend.get_model_name(), backend.get_chat_template().name]
            log = stack.enter_context(backend.job.open())
            kept = KeptResults(
                backend.job, log, program, batch_arguments, sampling_params, model
            )
        if progress_bar:
            finished = len(kept.finished) if kept else 0
            bar = tqdm.tqdm(total=len(batch_arguments), initial=finished)
            stack.callback(bar.close)
        yield from _ProgramRun(
            program, backend, batch_arguments, sampling_params, bar, kept
        ).states(num_threads)


@dataclass(eq=False)
class _ProgramRun:
    """The threads of one ``run_batch``, and their results.

    A supervisor thread starts and ends the others. The caller's thread only waits, so an
    interrupt, which can arrive at any point of it, leaves nothing half done.
    """

    program: Any
    backend: Any
    arguments: Sequence[dict[str, Any]]
    sampling_params: Any
    bar: Any
    kept: KeptResults | None

    def __post_init__(self) -> None:
        self._group = ProgramGroup()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        finished = self.kept.finished if self.kept else ()
        todo = [i for i in range(len(self.arguments)) if i not in finished]
        self._num_todo = len(todo)
        self._todo = iter(todo)
        # None: finished in an earlier run, or passed to the caller.
        self._results: list[Future[Any] | None] = [None] * len(self.arguments)
        for index in todo:
            self._results[index] = Future()
        self._num_failed = 0
        self._a_failure = ""

    def states(self, num_threads: int) -> Iterator[Any]:
        """Run all programs, and yield their states in order."""
        supervisor = threading.Thread(
            target=self._supervise, args=(num_threads,), daemon=True
        )
        try:
            if self._num_todo:
                supervisor.start()
            else:
                self._ended.set()
            for index, result in enumerate(self._results):
                state = self._restore(index) if result is None else result.result()
                # Only the caller keeps the state alive.
                self._results[index] = result = None
                yield state
                del state
            self._ended.wait()
        except BaseException:
            self._group.stop("run_batch was stopped before this program was finished.")
            # The backend is in use until the supervisor ends. join() cannot wait for
            # it: an interrupt inside start() leaves a thread that refuses join().
            self._ended.wait(2 * STOP_PATIENCE_S)
            raise
        if self._num_failed:
            logger.warning(
                "%d of %d programs failed, see error() of their states; one is %s",
                self._num_failed,
                len(self._results),
                self._a_failure,
            )

    def _supervise(self, num_threads: int) -> None:
        self._group.enter(program=False)
        try:
            with self.backend.client.lane() as lane:
                self._group.on_stop(lambda: lane.post(lane.cancel, self._group))
                if self._num_todo > 1:
                    cache_common_prefix(self.program, self.backend)
                threads = self._start(lane, min(num_threads, self._num_todo))
                self._wait_for(threads)
        except BaseException as error:
            for result in self._results:
                if result is not None:
                    with suppress(InvalidStateError):  # its program has finished
                        result.set_exception(error)
        finally:
            self._ended.set()

    def _wait_for(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            # A program stuck in its own code is abandoned.
            while thread.is_alive() and not self._group.stopped_for(STOP_PATIENCE_S):
                thread.join(POLL_S)
                if self.kept is not None:
                    self.kept.log.commit_sometimes()
        if self.kept is not None:
            self.kept.log.commit()

    def _start(self, lane: WaveLane, num_threads: int) -> list[threading.Thread]:
        threads: list[threading.Thread] = []
        lane.post(lane.begin, num_threads)
        try:
            for number in range(num_threads):
                if self._group.stop_reason is not None:
                    break
                # A daemon, so that an interrupted process can end.
                thread = threading.Thread(
                    target=self._work,
                    args=(lane,),
                    name=f"sglang-program-{number}",
                    daemon=True,
                )
                thread.start()
                threads.append(thread)
        except RuntimeError as error:
            if not threads:
                raise
            logger.warning(
                "Only %d programs run at a time, since the system allows no more "
                "threads (%s). Pass num_threads=%d to avoid this warning.",
                len(threads),
                error,
                len(threads),
            )
        finally:
            lane.post(lane.started, num_threads - len(threads))
        return threads

    def _work(self, lane: WaveLane) -> None:
        self._group.enter(program=True)
        try:
            while (index := self._next()) is not None:
                result = self._results[index]
                assert result is not None
                with suppress(InvalidStateError):  # the supervisor has failed
                    try:
                        result.set_result(self._run_one(index))
                    except BaseException as error:  # our own; the caller raises it
                        result.set_exception(error)
                del result
                if self.bar is not None:
                    with self._lock, suppress(Exception):
                        self.bar.update()
        finally:
            lane.post(lane.leave)

    def _next(self) -> int | None:
        with self._lock:
            if self._group.stop_reason is not None:
                return None
            return next(self._todo, None)

    def _run_one(self, index: int) -> Any:
        state = self._executor(index).run(self.program)
        # After a stop, calls fail through no fault of the program.
        if self.kept is not None and self._group.stop_reason is None:
            self.kept.keep(index, state)
        self._count_failure(index, state)
        return state

    def _restore(self, index: int) -> Any:
        assert self.kept is not None
        state = self.kept.restore(index, self._executor(index))
        self._count_failure(index, state)
        return state

    def _executor(self, index: int) -> ProgramExecutor:
        return ProgramExecutor(
            self.backend,
            {**self.arguments[index], **self.program.bind_arguments},
            self.sampling_params,
            chat_template=None,
            stream=False,
            num_api_spec_tokens=self.program.num_api_spec_tokens,
        )

    def _count_failure(self, index: int, state: Any) -> None:
        if (error := state.stream_executor.error_) is not None:
            with self._lock:
                self._num_failed += 1
                self._a_failure = f"number {index}: {error!r}"


class _ForkingExecutor(StreamExecutor):  # type: ignore[misc]
    """Base of both executors: its forks report their failures."""

    error_: BaseException | None
    forks: list[ForkExecutor]

    def fork(
        self, size: int = 1, position_ids_offset: list[int] | None = None
    ) -> list[Any]:
        children: list[Any] = super().fork(size, position_ids_offset)
        for child in children:
            # Nothing was submitted yet, so its thread has not used the class so far.
            child.__class__ = ForkExecutor
            child.forks = []
            child.ended = False
        self.forks += children
        return children

    def end_forks(self) -> None:
        """Wait for forks that were never joined, and end their threads."""
        for child in self.forks:
            child.end()
            child.wait()
            child.end_forks()

    def release(self) -> None:
        """Wake all threads that wait for a variable: none will be set any more."""
        for event in list(self.variable_event.values()):
            event.set()


class ForkExecutor(_ForkingExecutor):
    """One branch of a fork, executed in a thread of its own.

    It executes nothing after an error. Reading from it or joining it raises the error, so the
    program fails with the cause and not with a missing variable.
    """

    ended: bool

    def submit(self, expr: Any) -> None:
        if self.ended:
            raise RuntimeError(
                "a fork was extended after its join(); extend the program's state "
                "instead, or join the fork later."
            )
        super().submit(expr)

    def _execute(self, other: Any) -> None:
        if self.error_ is None:
            try:
                super()._execute(other)
            except Exception as error:
                self.error_ = error
        if self.error_ is not None:
            self.release()

    def wait(self) -> None:
        """Wait until everything submitted is executed."""
        super().sync()

    def sync(self) -> None:
        self.wait()
        if self.error_ is not None:
            raise self.error_

    def get_var(self, name: str) -> Any:
        try:
            return super().get_var(name)
        except KeyError:
            if self.error_ is not None:
                raise self.error_ from None
            raise

    def error(self) -> BaseException | None:
        self.wait()
        return self.error_

    def end(self) -> None:
        # A second end would stay in the queue, and wait() would block forever.
        if not self.ended:
            self.ended = True
            super().end()


class ProgramExecutor(_ForkingExecutor):
    """Executes one program inline, in the thread of its function. A generation that fails
    raises in the line that requested it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, use_thread=False)
        self.forks = []

    def submit(self, expr: Any) -> None:
        try:
            super().submit(expr)
        except BaseException:
            self.release()
            raise

    def run(self, program: Any) -> ProgramState:
        """Run a program to its end. An exception becomes the error of the state."""
        state = ProgramState(self)
        try:
            run_internal(state, program, (), self.arguments, False)
        except BaseException as error:
            self.error_ = error
        self.end_forks()
        self.release()
        self.is_finished = True
        return state


def cache_common_prefix(program: Any, backend: Any) -> None:
    """Prefill the common prefix of all programs once, before they run."""
    try:
        if global_config.enable_precache_with_tracing:
            cache_program(program, backend)
    except Exception as error:
        # Tracing calls the function with dummies, which some functions cannot handle.
        logger.info("Common prefix of the programs not cached: %r", error)


class EarlierError(RuntimeError):
    """An error of an earlier run: the name and text of the exception."""


class _KeptError(msgspec.Struct, omit_defaults=True):
    kind: str
    message: str
    status_code: int = 0
    param: str | None = None
    code: str | None = None


class _KeptResult(msgspec.Struct):
    text: str
    variables: dict[str, Any]
    meta_info: Any
    messages: Any
    returned: Any
    error: _KeptError | None


_decoder = msgspec.json.Decoder(_KeptResult)
# The return value of a program that returned its own state.
_ITSELF = {"$state": None}


class KeptResults:
    """The kept results of one ``run_batch``, by the index of the program.

    Args:
        model: identifies the model, such as by its path and chat template.

    Attributes:
        finished: indices of the programs that need not run again.
        log: of the job.

    Raises:
        ConfigError: an argument cannot be compared between runs.
    """

    def __init__(
        self,
        job: ProgramJob,
        log: ProgramLog,
        program: Any,
        batch_arguments: Sequence[dict[str, Any]],
        sampling_params: Any,
        model: list[str],
    ) -> None:
        self._job = job
        self.log = log
        self._ids = program_keys(program, batch_arguments, sampling_params, model)
        wanted = (True,) if job.retry_failed else (True, False)
        self.finished = {
            index
            for index, key in enumerate(self._ids.keys)
            if log.outcome(key) in wanted
        }
        self._warned = False
        self._report()

    def _report(self) -> None:
        versions = self.log.versions(self._ids.name)
        if not versions:
            return
        total = len(self._ids.keys)
        print(
            f"job {self._job.name}: {len(self.finished):,} of {total:,} programs were "
            "finished before",
            file=sys.stderr,
        )
        others = sum(versions.values()) - versions.get(self._ids.version, 0)
        if others and len(self.finished) < total:
            logger.warning(
                "Job %s holds %d results of another version of the program %s. Its code "
                "has changed since, so they are not reused.",
                self._job.name,
                others,
                self._ids.name,
            )

    def restore(self, index: int, executor: ProgramExecutor) -> Any:
        """The state of a program that finished earlier, on a new executor."""
        result = _decoder.decode(self.log.result(self._ids.keys[index]))
        executor.text_ = result.text
        executor.variables = {n: from_plain(v) for n, v in result.variables.items()}
        executor.meta_info = from_plain(result.meta_info)
        executor.messages_ = from_plain(result.messages)
        executor.error_ = _exception(result.error)
        executor.is_finished = True
        state = ProgramState(executor)
        if result.error is None:
            itself = result.returned == _ITSELF
            state.ret_value = state if itself else from_plain(result.returned)
        return state

    def keep(self, index: int, state: Any) -> None:
        """Store a program's result. One that failed because of the engine or the connection
        has none, and is run again next time.
        """
        error = state.stream_executor.error_
        if isinstance(error, EngineError) or (
            isinstance(error, RequestError) and error.status_code >= 500
        ):
            return
        try:
            result = msgspec.json.encode(_result(state))
        except (TypeError, ValueError, OverflowError, RecursionError) as reason:
            self._warn(index, reason)
            return
        self.log.put(
            ProgramRecord(
                self._ids.keys[index],
                self._ids.name,
                self._ids.version,
                error is None,
                msgspec.Raw(result),
            )
        )

    def _warn(self, index: int, reason: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "Job %s cannot keep program number %d of %s, and maybe others: %s. It "
                "will run again next time. Strings, numbers, bytes, lists, tuples and "
                "dicts can be kept.",
                self._job.name,
                index,
                self._ids.name,
                reason,
            )


def _result(state: Any) -> _KeptResult:
    executor = state.stream_executor
    error = executor.error_
    returned = getattr(state, "ret_value", None)
    return _KeptResult(
        executor.text_,
        {n: _plain(v, f"its variable {n!r}") for n, v in executor.variables.items()},
        _plain(executor.meta_info, "its meta info"),
        _plain(executor.messages_, "one of its messages"),
        _ITSELF if returned is state else _plain(returned, "what it returned"),
        None if error is None else _error(error),
    )


def _plain(value: Any, what: str) -> Any:
    def refuse(other: Any) -> Any:
        kind = type(other)
        raise TypeError(f"{what} holds a {kind.__module__}.{kind.__qualname__}")

    return to_plain(value, refuse)


def _error(error: BaseException) -> _KeptError:
    if isinstance(error, RequestError):
        return _KeptError(
            "RequestError", error.message, error.status_code, error.param, error.code
        )
    return _KeptError(type(error).__name__, str(error))


def _exception(error: _KeptError | None) -> Exception | None:
    if error is None:
        return None
    if error.kind == "RequestError":
        return RequestError(
            error.status_code, error.message, param=error.param, code=error.code
        )
    return EarlierError(f"{error.kind}: {error.message}")
