"""Requests for the dense engine, runs of its loop, and what transformers answers."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang_batch.dense.decode_loop import DecodeLoop
from sglang_batch.dense.model import LoadedModel
from sglang_batch.dense.prefill import Prefilled
from sglang_batch.dense.row_request import (
    DenseAnswer,
    DenseRequest,
    DenseSettings,
    Stopping,
)
from sglang_batch.dense.rows import Rows, SlabRows
from sglang_batch.dense.worker import DenseWorker

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang's
    from sglang_batch.srt.dense.grammars import Grammars


def prompts(
    count: int, *, seed: int = 0, shortest: int = 2, longest: int = 40
) -> list[list[int]]:
    """Random prompts, of tokens that the tiny models and the demo model have."""
    drawn = random.Random(seed)
    return [
        [drawn.randrange(3, 250) for _ in range(drawn.randint(shortest, longest))]
        for _ in range(count)
    ]


def greedy(rid: str, ids: Sequence[int], count: int, **others: Any) -> DenseRequest:
    """A request for so many most probable tokens. ``others``: of :class:`DenseRequest`."""
    return DenseRequest(rid, ids, Stopping(count, ignore_eos=True), **others)


def prioritized(
    matches: Callable[[str], bool], priority: int
) -> Callable[[DenseRequest], DenseRequest]:
    """For ``revise``: another priority for the requests whose ids match."""
    return lambda request: (
        replace(request, priority=priority) if matches(request.rid) else request
    )


def runs_nothing(worker: DenseWorker) -> bool:
    """Whether it soon runs nothing: the last answer comes before it says so."""
    deadline = time.monotonic() + 10
    while worker.running() and time.monotonic() < deadline:
        time.sleep(0.001)
    return worker.running() == {}


def generated(model: LoadedModel, ids: Sequence[int], count: int) -> list[int]:
    """The tokens that ``generate`` of transformers takes for one prompt alone."""
    with torch.inference_mode():
        found = model.model.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()
    begin = 1 if model.is_encoder_decoder else len(ids)
    tokens: list[int] = found[begin:]
    return tokens


def limit_cells(loop: DecodeLoop, max_cells: int) -> None:
    """Change the limit of a loop between two steps."""
    loop._admission.max_cells, loop._changed = max_cells, True


class Run:
    """A loop, and its answers by request id in the order in which they came.

    rows: of the loop, by default in a slab.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: DenseSettings,
        *,
        rows: Rows | None = None,
        tokenizer: Any = None,
    ) -> None:
        if rows is None:
            rows = SlabRows(model, settings.prefill_tokens, settings.shortest_shared)
        self.rows: Any = rows
        self.answers: dict[str, DenseAnswer] = {}
        self.loop = DecodeLoop(
            model, rows, settings, self._answered, tokenizer, Grammars
        )

    def add(self, requests: Sequence[DenseRequest]) -> Run:
        """Open requests."""
        for request in requests:
            self.loop.add(request)
        return self

    def steps(self, count: int) -> Run:
        """Make so many steps."""
        for _ in range(count):
            self.loop.step()
        return self

    def limit_cells(self, max_cells: int) -> None:
        """Change the limit while rows run, so that some must leave or may come back."""
        limit_cells(self.loop, max_cells)

    def finish(self, limit: int = 3000) -> dict[str, DenseAnswer]:
        """Make steps until no request is open, and return all answers.

        Raises:
            AssertionError: requests are open after ``limit`` steps.
        """
        for _ in range(limit):
            if not self.loop.can_step:
                return self.answers
            self.loop.step()
        raise AssertionError(f"requests are open after {limit} steps")

    def tokens(self) -> dict[str, list[int]]:
        """The tokens of the answers by request id."""
        return {rid: list(answer.output_ids) for rid, answer in self.answers.items()}

    def _answered(self, request: DenseRequest, answer: DenseAnswer) -> None:
        assert request.rid not in self.answers, f"{request.rid} is answered twice"
        self.answers[request.rid] = answer


class ShortOfMemory:
    """Rows whose calls of some numbers, from 1, run out of memory.

    failing: numbers of the calls of ``join`` and ``decode``, and of the prompts of
        ``prefill``.
    """

    def __init__(self, rows: Any, failing: Mapping[str, Collection[int]]) -> None:
        self._rows = rows
        self._failing = failing
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def prefill(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None
    ) -> Iterator[Prefilled]:
        for found in self._rows.prefill(requests, following):
            self._count("prefill")
            yield found

    def join(self, kvs: Sequence[Any]) -> None:
        self._count("join")
        self._rows.join(kvs)

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        self._count("decode")
        logits: torch.Tensor = self._rows.decode(tokens)
        return logits

    def _count(self, name: str) -> None:
        self.calls[name] += 1
        if self.calls[name] in self._failing.get(name, ()):
            raise torch.OutOfMemoryError(f"{name} {self.calls[name]}")
