"""Runs many frontend programs at once, each in a thread, none able to sink the rest."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import tqdm
from sglang.lang.global_config import global_config
from sglang.lang.interpreter import (
    ProgramState,
    StreamExecutor,
    cache_program,
    run_internal,
)

from .errors import ConfigError
from .wave import Run, WaveLane

logger = logging.getLogger(__name__)

# How long a stopped run waits for its programs to notice.
STOP_PATIENCE_S = 5.0


class _Executor(StreamExecutor):  # type: ignore[misc]
    """What our two executors share: forks that report how they fail."""

    forks: list[ForkExecutor]

    def fork(
        self, size: int = 1, position_ids_offset: list[int] | None = None
    ) -> list[Any]:
        children = super().fork(size, position_ids_offset)
        for child in children:
            # Nothing was submitted to it, so its thread has not looked at us yet.
            child.__class__ = ForkExecutor
            child.forks = []
            child.ended = False
        self.forks += children
        return children

    def end_forks(self) -> None:
        """Wait for forks that were never joined, and let their threads end."""
        for child in self.forks:
            child.end()
            child.wait()
            child.end_forks()

    def release(self) -> None:
        """Wake whoever waits for a variable: none will be set any more."""
        for event in list(self.variable_event.values()):
            event.set()


class ForkExecutor(_Executor):
    """One branch of a fork, executed in a thread of its own.

    After an error it executes nothing more. Reading from it or joining it raises the
    error, so that the program fails with the cause and not with a missing variable.
    """

    ended: bool

    def submit(self, expr: Any) -> None:
        if self.ended:
            raise RuntimeError(
                "a fork was extended after its join(); extend the program's state, "
                "or join the fork later."
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
        error: BaseException | None = self.error_
        return error

    def end(self) -> None:
        # A second end would stay in the queue and block whoever waits for it.
        if not self.ended:
            self.ended = True
            super().end()


class ProgramExecutor(_Executor):
    """Executes one program inline, in the thread that its function runs in.

    A generation that fails raises right where the function asked for it.
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
        """Run a program to its end; what it raises becomes the state's error."""
        state = ProgramState(self)
        try:
            run_internal(state, program, (), self.arguments, False)
        except BaseException as error:
            self.error_ = error
        self.end_forks()
        self.release()
        self.is_finished = True
        return state


def run_programs(
    program: Any,
    backend: Any,
    batch_arguments: Sequence[dict[str, Any]],
    sampling_params: Any,
    num_threads: int,
    progress_bar: bool,
) -> Iterator[ProgramState]:
    """Run a program over many arguments on a BatchBackend.

    Yields the states in the order of the arguments, each as soon as it and those
    before it are done. When the caller stops early, or is interrupted, calls under way
    are aborted.
    """
    if not isinstance(num_threads, int) or num_threads < 1:
        raise ConfigError(
            f'num_threads={num_threads!r} must be "auto" or a number of 1 or more.'
        )
    bar = tqdm.tqdm(total=len(batch_arguments)) if progress_bar else None
    try:
        with backend.client.lane() as lane:
            if global_config.enable_precache_with_tracing and len(batch_arguments) > 1:
                _cache_common_prefix(program, backend)
            yield from _ProgramRun(
                program, backend, batch_arguments, sampling_params, lane, bar
            ).states(num_threads)
    finally:
        if bar is not None:
            bar.close()


def _cache_common_prefix(program: Any, backend: Any) -> None:
    """Compute what all programs begin with once, before all of them need it."""
    try:
        cache_program(program, backend)
    except Exception as error:
        # Tracing runs the function on dummies, which not every function stands.
        logger.info("Common prefix of the programs not cached: %r", error)


class _ProgramRun:
    """The threads of one ``run_batch`` and the results they fill in."""

    def __init__(
        self,
        program: Any,
        backend: Any,
        batch_arguments: Sequence[dict[str, Any]],
        sampling_params: Any,
        lane: WaveLane,
        bar: Any,
    ) -> None:
        self._program = program
        self._backend = backend
        self._arguments = batch_arguments
        self._sampling_params = sampling_params
        self._lane = lane
        self._bar = bar
        self._run = Run()
        self._lock = threading.Lock()
        self._todo = iter(range(len(batch_arguments)))
        self._results: list[Future[ProgramState] | None] = [
            Future() for _ in batch_arguments
        ]

    def states(self, num_threads: int) -> Iterator[ProgramState]:
        """Run all programs; yields their states in order."""
        num_failed, first_error = 0, None
        threads: list[threading.Thread] = []
        try:
            self._start(min(num_threads, len(self._results)), threads)
            for index, result in enumerate(self._results):
                assert result is not None
                state = result.result()
                # The caller decides how long a state lives.
                self._results[index] = result = None
                if (error := state.stream_executor.error_) is not None:
                    num_failed += 1
                    first_error = first_error or f"number {index}: {error!r}"
                yield state
                del state
            for thread in threads:
                thread.join()
        except BaseException:
            self._run.stop_reason = (
                "run_batch was stopped before this program was finished."
            )
            self._lane.post(self._lane.cancel, self._run)
            # Until they are gone, the backend is not free for its owner; one that
            # is busy with something else than our calls is not waited for.
            deadline = time.monotonic() + STOP_PATIENCE_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            raise
        if num_failed:
            logger.warning(
                "%d of %d programs failed, see error() of their states; first %s",
                num_failed,
                len(self._results),
                first_error,
            )

    def _start(self, num_threads: int, threads: list[threading.Thread]) -> None:
        self._lane.post(self._lane.begin, num_threads)
        try:
            for number in range(num_threads):
                # A daemon, for a program stuck in code of its own must not keep an
                # interrupted process from ending.
                thread = threading.Thread(
                    target=self._work, name=f"sglang-program-{number}", daemon=True
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
            self._lane.post(self._lane.started, num_threads - len(threads))

    def _work(self) -> None:
        self._run.enter()
        try:
            while (index := self._next()) is not None:
                result = self._results[index]
                assert result is not None
                try:
                    result.set_result(self._run_one(self._arguments[index]))
                except BaseException as error:  # ours; somebody waits to hear of it
                    result.set_exception(error)
                del result
                if self._bar is not None:
                    with self._lock, suppress(Exception):
                        self._bar.update()
        finally:
            self._lane.post(self._lane.leave)

    def _run_one(self, arguments: dict[str, Any]) -> ProgramState:
        return ProgramExecutor(
            self._backend,
            {**arguments, **self._program.bind_arguments},
            self._sampling_params,
            chat_template=None,
            stream=False,
            num_api_spec_tokens=self._program.num_api_spec_tokens,
        ).run(self._program)

    def _next(self) -> int | None:
        with self._lock:
            if self._run.stop_reason is not None:
                return None
            return next(self._todo, None)
