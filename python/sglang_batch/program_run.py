"""Runs many frontend programs at once, each in a thread, none able to sink the rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import tqdm

from .errors import ConfigError
from .programs import ProgramExecutor, cache_common_prefix
from .wave import Run, WaveLane

logger = logging.getLogger(__name__)

# How long a stopped run waits for its programs to notice.
STOP_PATIENCE_S = 5.0
POLL_S = 0.5


def run_programs(
    program: Any,
    backend: Any,
    batch_arguments: Sequence[dict[str, Any]],
    sampling_params: Any,
    num_threads: int,
    progress_bar: bool,
) -> Iterator[Any]:
    """Run a program over many arguments on a BatchBackend.

    Yields the states in the order of the arguments, each as soon as it and those
    before it are done. When the caller stops early, or is interrupted, calls under way
    are aborted.
    """
    if not isinstance(num_threads, int) or num_threads < 1:
        raise ConfigError(
            f'num_threads={num_threads!r} must be "auto" or a number of 1 or more.'
        )
    backend.client.check_caller()
    bar = tqdm.tqdm(total=len(batch_arguments)) if progress_bar else None
    try:
        yield from _ProgramRun(
            program, backend, batch_arguments, sampling_params, bar
        ).states(num_threads)
    finally:
        if bar is not None:
            bar.close()


class _ProgramRun:
    """The threads of one ``run_batch`` and the results they fill in.

    A supervisor thread starts and ends the others. The caller's thread only waits: an
    interrupt, which comes there and anywhere, finds nothing half done.
    """

    def __init__(
        self,
        program: Any,
        backend: Any,
        batch_arguments: Sequence[dict[str, Any]],
        sampling_params: Any,
        bar: Any,
    ) -> None:
        self._program = program
        self._backend = backend
        self._arguments = batch_arguments
        self._sampling_params = sampling_params
        self._bar = bar
        self._run = Run()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._todo = iter(range(len(batch_arguments)))
        self._results: list[Future[Any] | None] = [Future() for _ in batch_arguments]
        self._num_failed = 0
        self._a_failure = ""

    def states(self, num_threads: int) -> Iterator[Any]:
        """Run all programs; yields their states in order."""
        supervisor = threading.Thread(
            target=self._supervise, args=(num_threads,), daemon=True
        )
        try:
            supervisor.start()
            for index, result in enumerate(self._results):
                assert result is not None
                state = result.result()
                # The caller decides how long a state lives.
                self._results[index] = result = None
                yield state
                del state
            self._ended.wait()
        except BaseException:
            self._run.stop("run_batch was stopped before this program was finished.")
            # Until it has ended, the backend is not free for its owner. No join():
            # an interrupt inside start() leaves a thread that refuses it.
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
        self._run.enter(program=False)
        try:
            with self._backend.client.lane() as lane:
                self._run.on_stop(lambda: lane.post(lane.cancel, self._run))
                if len(self._results) > 1:
                    cache_common_prefix(self._program, self._backend)
                threads = self._start(lane, min(num_threads, len(self._results)))
                for thread in threads:
                    # One that is stuck in code of its own is left behind.
                    while thread.is_alive() and not self._run.stopped_for(
                        STOP_PATIENCE_S
                    ):
                        thread.join(POLL_S)
        except BaseException as error:
            for result in self._results:
                if result is not None and not result.done():
                    result.set_exception(error)
        finally:
            self._ended.set()

    def _start(self, lane: WaveLane, num_threads: int) -> list[threading.Thread]:
        threads: list[threading.Thread] = []
        lane.post(lane.begin, num_threads)
        try:
            for number in range(num_threads):
                if self._run.stop_reason is not None:
                    break
                # A daemon, so as not to keep an interrupted process from ending.
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
                "Only %d programs run at a time: the system gives no more threads "
                "(%s). num_threads=%d asks for no more.",
                len(threads),
                error,
                len(threads),
            )
        finally:
            lane.post(lane.started, num_threads - len(threads))
        return threads

    def _work(self, lane: WaveLane) -> None:
        self._run.enter(program=True)
        try:
            while (index := self._next()) is not None:
                result = self._results[index]
                assert result is not None
                try:
                    result.set_result(self._run_one(index))
                except BaseException as error:  # ours; somebody waits to hear of it
                    result.set_exception(error)
                del result
                if self._bar is not None:
                    with self._lock, suppress(Exception):
                        self._bar.update()
        finally:
            lane.post(lane.leave)

    def _next(self) -> int | None:
        with self._lock:
            if self._run.stop_reason is not None:
                return None
            return next(self._todo, None)

    def _run_one(self, index: int) -> Any:
        state = ProgramExecutor(
            self._backend,
            {**self._arguments[index], **self._program.bind_arguments},
            self._sampling_params,
            chat_template=None,
            stream=False,
            num_api_spec_tokens=self._program.num_api_spec_tokens,
        ).run(self._program)
        if (error := state.stream_executor.error_) is not None:
            with self._lock:
                self._num_failed += 1
                self._a_failure = f"number {index}: {error!r}"
        return state
