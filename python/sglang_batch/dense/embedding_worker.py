"""Computes the vectors of requests in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .embedding_model import EmbeddingModel, length_batches
from .row_request import DenseAnswer, DenseRequest, DenseSettings, OnAnswer

logger = logging.getLogger(__name__)

# Cells of a batch on a CPU, where many rows cost no less than few, and padding costs.
_CPU_CELLS = 1024


@dataclass(frozen=True, slots=True)
class EmbeddingAnswer(DenseAnswer):
    """The end of a row that has no tokens.

    vector: float32 numbers, empty if it failed.
    """

    vector: Sequence[float] = ()


class EmbeddingWorker:
    """Answers requests with :class:`EmbeddingAnswer`. Calls may come from any thread.

    All rows that wait are sorted by length, of one priority at a time, and run in
    batches. Their places in the plan are ignored: no prefix is shared.

    Args:
        settings: ``max_cells`` are most rows times the longest one's tokens, by default
            1024 on a CPU and ``prefill_tokens`` elsewhere. ``max_rows`` is for rows that
            decode.
        on_answer: called in the worker's thread.

    Attributes:
        failure: what ended the thread, if it failed. Every request after that is
            answered with it.
        batches: that have run.
    """

    def __init__(
        self, model: EmbeddingModel, settings: DenseSettings, on_answer: OnAnswer
    ) -> None:
        self._model = model
        self._on_answer = on_answer
        on_cpu = model.device.type == "cpu"
        usual = _CPU_CELLS if on_cpu else settings.prefill_tokens
        self._max_cells = settings.max_cells or usual
        self._wake = threading.Condition()
        self._waiting: dict[str, DenseRequest] = {}
        self._running: dict[str, DenseRequest] = {}
        self._since = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="embed", daemon=True)
        self.failure: Exception | None = None
        self.batches = 0

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its present batch. Open requests are not answered."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:  # it has started
            self._thread.join()

    def submit(self, request: DenseRequest) -> None:
        """Have a request answered. Only its id, tokens and priority matter."""
        with self._wake:
            self._waiting[request.rid] = request
            self._wake.notify()

    def abort(self, rid: str) -> None:
        """End a request, which then has no answer. An unknown one is ignored."""
        with self._wake:
            self._waiting.pop(rid, None)
            self._running.pop(rid, None)

    def running(self) -> dict[str, float]:
        """Seconds since each request that is computed has joined."""
        with self._wake:
            seconds = time.monotonic() - self._since
            return dict.fromkeys(self._running, seconds)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                waiting = list(self._waiting.values())
            if self.failure is None:
                try:
                    self._run_round(waiting)
                except Exception as error:
                    logger.exception("The embedding engine has failed.")
                    self.failure = error
            if self.failure is not None:
                self._fail_all(f"The engine has failed: {self.failure}")

    def _run_round(self, waiting: Sequence[DenseRequest]) -> None:
        """Answer the requests of the highest priority that wait now."""
        highest = max(request.priority for request in waiting)
        rows = [request for request in waiting if request.priority == highest]
        lengths = [len(request.input_ids) for request in rows]
        cells = self._max_cells
        for batch in length_batches(lengths, cells, pads=self._model.pads):
            self._run_batch([rows[index] for index in batch])
            if self._leaves_round(highest) or self._max_cells < cells:
                return

    def _leaves_round(self, priority: int) -> bool:
        with self._wake:
            waiting = self._waiting.values()
            return self._stopping or any(each.priority > priority for each in waiting)

    def _run_batch(self, rows: Sequence[DenseRequest]) -> None:
        with self._wake:
            rows = [row for row in rows if self._waiting.pop(row.rid, None)]
            self._running = {row.rid: row for row in rows}
            self._since = time.monotonic()
        vocab = self._model.vocab_size
        good = [row for row in rows if _in_vocabulary(row.input_ids, vocab)]
        vectors = dict(zip((row.rid for row in good), self._vectors(good), strict=True))
        for row in rows:
            if row.rid in vectors:
                answer = _answer(vectors[row.rid])
            else:
                answer = _failed(f"It needs tokens, all of them less than {vocab}.")
            with self._wake:
                known = self._running.pop(row.rid, None)
            if known:  # not aborted meanwhile
                self._on_answer(row, answer)

    def _vectors(self, rows: Sequence[DenseRequest]) -> list[torch.Tensor | None]:
        """A vector ``[dims]`` of each row, None for one that does not fit into memory."""
        if not rows:
            return []
        try:
            found = self._model.vectors([row.input_ids for row in rows])
            self.batches += 1
            return list(found)
        except torch.OutOfMemoryError:
            pass  # until here the error holds tensors
        if len(rows) == 1:
            return [None]
        half = len(rows) // 2
        self._max_cells = half * max(len(row.input_ids) for row in rows)
        logger.warning("Out of memory with %d rows: %d cells at most from now on.",
                       len(rows), self._max_cells)  # fmt: skip
        return [*self._vectors(rows[:half]), *self._vectors(rows[half:])]

    def _fail_all(self, reason: str) -> None:
        with self._wake:
            rows = [*self._running.values(), *self._waiting.values()]
            self._running, self._waiting = {}, {}
        for row in rows:
            self._on_answer(row, _failed(reason))


def _in_vocabulary(ids: Sequence[int], size: int) -> bool:
    """Another token would end the work of an accelerator, and all rows with it."""
    return len(ids) > 0 and min(ids) >= 0 and max(ids) < size


def _answer(vector: torch.Tensor | None) -> EmbeddingAnswer:
    if vector is None:
        return _failed("The text does not fit into memory.")
    if not bool(vector.isfinite().all()):
        return _failed("The model's vector is not finite.")
    return EmbeddingAnswer((), "length", vector=vector.tolist())


def _failed(error: str) -> EmbeddingAnswer:
    return EmbeddingAnswer((), "abort", error=error)
