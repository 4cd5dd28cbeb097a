"""Runs many frontend programs at once, each in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any

import tqdm

from ..errors import ConfigError
from .program_results import KeptResults, ProgramExecutor, cache_common_prefix
from .waves import ProgramGroup, WaveLane

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
    backend.client.check_caller()
    with _kept_results(program, backend, batch_arguments, sampling_params) as kept:
        num_finished = len(kept.finished) if kept else 0
        bar = None
        if progress_bar:
            bar = tqdm.tqdm(total=len(batch_arguments), initial=num_finished)
        try:
            yield from _ProgramRun(
                program, backend, batch_arguments, sampling_params, bar, kept
            ).states(num_threads)
        finally:
            if bar is not None:
                bar.close()


@contextmanager
def _kept_results(
    program: Any,
    backend: Any,
    batch_arguments: Sequence[dict[str, Any]],
    sampling_params: Any,
) -> Iterator[KeptResults | None]:
    """The results that the backend's job keeps. None: the backend has no job."""
    if backend.job is None:
        yield None
        return
    model = [backend.get_model_name(), backend.get_chat_template().name]
    with backend.job.open() as log:
        yield KeptResults(
            backend.job, log, program, batch_arguments, sampling_params, model
        )


class _ProgramRun:
    """The threads of one ``run_batch``, and their results.

    A supervisor thread starts and ends the others. The caller's thread only waits, so an
    interrupt, which can arrive at any point of it, leaves nothing half done.
    """

    def __init__(
        self,
        program: Any,
        backend: Any,
        batch_arguments: Sequence[dict[str, Any]],
        sampling_params: Any,
        bar: Any,
        kept: KeptResults | None,
    ) -> None:
        self._program = program
        self._backend = backend
        self._arguments = batch_arguments
        self._sampling_params = sampling_params
        self._bar = bar
        self._group = ProgramGroup()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._kept = kept
        finished = kept.finished if kept else ()
        todo = [i for i in range(len(batch_arguments)) if i not in finished]
        self._num_todo = len(todo)
        self._todo = iter(todo)
        # None: finished in an earlier run, or passed to the caller.
        self._results: list[Future[Any] | None] = [None] * len(batch_arguments)
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
            with self._backend.client.lane() as lane:
                self._group.on_stop(lambda: lane.post(lane.cancel, self._group))
                if self._num_todo > 1:
                    cache_common_prefix(self._program, self._backend)
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
                if self._kept is not None:
                    self._kept.log.commit_sometimes()
        if self._kept is not None:
            self._kept.log.commit()

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
                if self._bar is not None:
                    with self._lock, suppress(Exception):
                        self._bar.update()
        finally:
            lane.post(lane.leave)

    def _next(self) -> int | None:
        with self._lock:
            if self._group.stop_reason is not None:
                return None
            return next(self._todo, None)

    def _run_one(self, index: int) -> Any:
        state = self._executor(index).run(self._program)
        # After a stop, calls fail through no fault of the program.
        if self._kept is not None and self._group.stop_reason is None:
            self._kept.keep(index, state)
        self._count_failure(index, state)
        return state

    def _restore(self, index: int) -> Any:
        assert self._kept is not None
        state = self._kept.restore(index, self._executor(index))
        self._count_failure(index, state)
        return state

    def _executor(self, index: int) -> ProgramExecutor:
        return ProgramExecutor(
            self._backend,
            {**self._arguments[index], **self._program.bind_arguments},
            self._sampling_params,
            chat_template=None,
            stream=False,
            num_api_spec_tokens=self._program.num_api_spec_tokens,
        )

    def _count_failure(self, index: int, state: Any) -> None:
        if (error := state.stream_executor.error_) is not None:
            with self._lock:
                self._num_failed += 1
                self._a_failure = f"number {index}: {error!r}"
