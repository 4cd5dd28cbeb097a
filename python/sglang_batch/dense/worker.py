"""The dense engine in a thread of its own, for rows that decode and for embeddings."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .decode_loop import DecodeLoop, MakeGrammars
from .embedding import EmbeddingLoop, EmbeddingModel
from .model import LoadedModel
from .row_request import DenseAnswer, DenseRequest, DenseSettings, OnAnswer
from .rows import rows_for

logger = logging.getLogger(__name__)

RowLoop = DecodeLoop | EmbeddingLoop


class DenseWorker:
    """Runs requests. Calls may come from any thread.

    Args:
        make_loop: makes the loop that runs them, for a function that takes its answers.
        on_answer: called in the worker's thread.

    Attributes:
        failure: the error that ended the thread, if it failed. Every request after that is
            answered with it.
    """

    def __init__(
        self, make_loop: Callable[[OnAnswer], RowLoop], on_answer: OnAnswer
    ) -> None:
        self._on_answer = on_answer
        self._open: dict[str, DenseRequest] = {}
        self._since: dict[str, float] = {}
        self._loop = make_loop(self._answered)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dense", daemon=True)
        self.failure: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its present step. Open requests are not answered."""
        self._stopping = True
        self.call(lambda: None)  # it may wait for one
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def submit(self, request: DenseRequest) -> None:
        self.call(lambda: self._add(request))

    def abort(self, rid: str) -> None:
        self.call(lambda: self._abort(rid))

    def revise(self, revised: Callable[[DenseRequest], DenseRequest]) -> None:
        """Change the plan of open requests in the worker's thread, see
        :meth:`.DecodeLoop.revise`.
        """
        self.call(lambda: self._loop.revise(revised))

    def running(self) -> dict[str, float]:
        """Seconds since each request that is computed has joined."""
        now = time.monotonic()
        return {rid: now - since for rid, since in self._since.items()}

    def call(self, call: Callable[[], None]) -> None:
        """Have a function called in the worker's thread, between two steps."""
        self._calls.put(call)

    def _run(self) -> None:
        while True:
            calls = []
            with suppress(queue.Empty):
                calls.append(self._calls.get(block=not self._can_step()))
                while True:
                    calls.append(self._calls.get_nowait())
            if self._stopping:
                return
            for call in calls:
                self._guarded(call)
            self._note_running()
            if self._can_step():
                self._guarded(self._loop.step)
                self._note_running()

    def _can_step(self) -> bool:
        return self.failure is None and self._loop.can_step

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            logger.exception("The dense engine has failed.")
            self.failure = error
            for request in list(self._open.values()):
                self._answered(request, self._failed())

    def _note_running(self) -> None:
        running = [] if self.failure else self._loop.running()
        if running != list(self._since):
            now = time.monotonic()
            # Other threads read it: it is replaced, and never changed.
            self._since = {rid: self._since.get(rid, now) for rid in running}

    def _add(self, request: DenseRequest) -> None:
        self._open[request.rid] = request
        if self.failure is not None:
            self._answered(request, self._failed())
            return
        try:
            self._loop.add(request)
        except Exception as error:
            logger.exception("A request could not be opened.")
            found = f"The request cannot be read: {type(error).__name__}: {error}"
            self._answered(request, DenseAnswer((), "abort", error=found))

    def _abort(self, rid: str) -> None:
        # After a failure, all requests of the loop have been answered.
        if self.failure is None:
            self._loop.abort(rid)

    def _failed(self) -> DenseAnswer:
        return DenseAnswer((), "abort", error=f"The engine has failed: {self.failure}")

    def _answered(self, request: DenseRequest, answer: DenseAnswer) -> None:
        self._open.pop(request.rid, None)
        self._on_answer(request, answer)


def worker_of(
    loaded: LoadedModel,
    settings: DenseSettings,
    on_answer: OnAnswer,
    tokenizer: Any,
    make_grammars: MakeGrammars,
) -> DenseWorker:
    """The worker of a model, with the loop and the rows that it can have.

    Args:
        tokenizer, make_grammars: see :class:`.DecodeLoop`.

    Raises:
        ConfigError: the model cannot run.
    """

    def loop(answered: OnAnswer) -> RowLoop:
        if isinstance(loaded, EmbeddingModel):
            return EmbeddingLoop(loaded, settings, answered)
        rows, _ = rows_for(loaded, settings)  # which logs a reason against sharing
        return DecodeLoop(loaded, rows, settings, answered, tokenizer, make_grammars)

    return DenseWorker(loop, on_answer)
