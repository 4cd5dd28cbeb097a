"""Executes one frontend program and its forks, so that no failure hangs or is hidden.

SGLang's own executor runs in a thread per program. A program there notices a failure
only when it reads a variable, and waits forever for everything submitted afterwards.
Here a program fails in the line that caused the failure.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.lang.global_config import global_config
from sglang.lang.interpreter import (
    ProgramState,
    StreamExecutor,
    cache_program,
    run_internal,
)

logger = logging.getLogger(__name__)


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

    It executes nothing more after an error. Reading from it or joining it raises the
    error, so the program fails with the cause and not with a missing variable.
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
    """Executes one program inline, in the thread of its function.

    A generation that fails raises in the line that requested it.
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

    def restore(
        self,
        text: str,
        variables: dict[str, Any],
        meta_info: dict[str, Any],
        messages: list[Any],
        error: BaseException | None,
    ) -> ProgramState:
        """The state of a program that finished in an earlier run."""
        self.text_ = text
        self.variables = variables
        self.meta_info = meta_info
        self.messages_ = messages
        self.error_ = error
        self.is_finished = True
        return ProgramState(self)

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
