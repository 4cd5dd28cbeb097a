"""The decode loop in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .decode_loop import DecodeLoop
from .model import LoadedModel
from .query import LoopCounts
from .row_request import DenseAnswer, DenseRequest, DenseSettings, OnAnswer
from .rows import Rows

logger = logging.getLogger(__name__)


class DenseWorker:
    """Runs requests. Calls may come from any thread.

    Args:
        rows: of the model, see :func:`.rows.rows_for`.
        on_answer: called in the worker's thread.
        tokenizer: of transformers, for stop strings and grammars.

    Attributes:
        failure: what ended the thread, if it failed. Every request after that is
            answered with it.
    """

    def __init__(
        self,
        model: LoadedModel,
        rows: Rows,
        settings: DenseSettings,
        on_answer: OnAnswer,
        tokenizer: Any = None,
    ) -> None:
        self._on_answer = on_answer
        self._open: dict[str, DenseRequest] = {}
        self._since: dict[str, float] = {}
        self._loop = DecodeLoop(model, rows, settings, self._answered, tokenizer)
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dense", daemon=True)
        self.failure: Exception | None = None

    @property
    def counts(self) -> LoopCounts:
        """What the loop has done."""
        return self._loop.counts

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its present step. Open requests are not answered."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def submit(self, request: DenseRequest) -> None:
        """Have a request answered."""
        self._call(lambda: self._add(request))

    def abort(self, rid: str) -> None:
        """End a request. An unknown one is ignored."""
        self._call(lambda: self._abort(rid))

    def limit_cells(self, max_cells: int) -> None:
        """Change the limit on KV cells, see :meth:`.DecodeLoop.limit_cells`."""
        self._call(lambda: self._loop.limit_cells(max_cells))

    def set_priority(self, matches: Callable[[str], bool], priority: int) -> None:
        """Change the priority of open requests, see :meth:`.DecodeLoop.set_priority`.

        Args:
            matches: of a request's id; called in the worker's thread.
        """
        self._call(lambda: self._loop.set_priority(matches, priority))

    def revise(self, revised: Callable[[DenseRequest], DenseRequest]) -> None:
        """Change what is planned of open requests, see :meth:`.DecodeLoop.revise`.

        Args:
            revised: called in the worker's thread.
        """
        self._call(lambda: self._loop.revise(revised))

    def running(self) -> dict[str, float]:
        """Seconds since each request that decodes has joined."""
        now = time.monotonic()
        with self._wake:
            return {rid: now - since for rid, since in self._since.items()}

    def _call(self, call: Callable[[], None]) -> None:
        with self._wake:
            self._calls.append(call)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._calls or self._can_step() or self._stopping):
                    self._wake.wait()
                calls = list(self._calls)
                self._calls.clear()
                if self._stopping:
                    return
            for call in calls:
                self._guarded(call)
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
            with self._wake:
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
