"""Open requests of the decode loop: how they are opened, and how they wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .admission import Row, expected_left
from .model import LoadedModel
from .row_request import DenseRequest, TokenLogprobs
from .sampling import RowSampler, drawn_seed
from .stopping import RowStopping, ending_ids


@dataclass(slots=True)
class Query:
    """One open request.

    number: in the order of arrival.
    tokens: of the answer so far. The last one has no KV yet.
    grammar: the row's place in its grammar, of ``make_grammars``; None without.
    kv: while it does not run and its prompt has been computed. In host memory if it ran.
    """

    request: DenseRequest
    number: int
    sampler: RowSampler
    stopping: RowStopping
    grammar: Any
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    cached_tokens: int = 0
    kv: Any = None

    @property
    def length(self) -> int:
        """Tokens of KV that it has or will have when it joins."""
        return len(self.request.input_ids) + max(0, len(self.tokens) - 1)

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Sorts waiting requests. Those that have run come first."""
        request = self.request
        return (-request.priority, not self.tokens, request.place, self.number)

    def row(self) -> Row:
        """It as admission sees it."""
        most = self.request.stopping.max_new_tokens
        expected = self.request.expected_len or most
        left = expected_left(min(expected, most), len(self.tokens), most)
        return Row(self.length, left, self.request.priority, self.number)


class WaitingQueries:
    """Requests that wait, in their order, which does not change while they wait."""

    def __init__(self) -> None:
        self._ordered: list[Query] = []
        self._by_number: dict[int, Query] = {}

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Query]:
        return iter(self._ordered)

    def first(self, count: int) -> list[Query]:
        """The first ones."""
        return self._ordered[:count]

    def after(self, query: Query, count: int) -> list[Query]:
        """The next ones after a place in the order at which nobody waits."""
        at = self._place(query)
        return self._ordered[at : at + count]

    def add(self, query: Query) -> None:
        """A request waits from now on."""
        insort(self._ordered, query, key=lambda each: each.order)
        self._by_number[query.number] = query

    def take(self, number: int) -> Query:
        """The request of this number, which no longer waits."""
        query = self._by_number.pop(number)
        del self._ordered[self._place(query)]
        return query

    def _place(self, query: Query) -> int:
        return bisect_left(self._ordered, query.order, key=lambda each: each.order)


@dataclass(slots=True)
class LoopCounts:
    """Counts of a loop's work so far.

    steps: forward passes that decode.
    decoded_rows: rows of these, summed.
    peak_cells: most KV cells that were allocated.
    preempted: times that a row went to the host.
    recomputed_tokens: of rows that did not fit the host, or whose step ran out of memory.
    """

    steps: int = 0
    decoded_rows: int = 0
    peak_cells: int = 0
    preempted: int = 0
    recomputed_tokens: int = 0


MakeGrammars = Callable[..., Any]
"""Makes a ``Grammars`` of :mod:`sglang_batch.srt.dense.grammars`, by its arguments."""


class QueryOpener:
    """Opens requests for one model, and numbers them as they come.

    Args:
        seed: of the engine, for rows that name none.
        tokenizer: of transformers, for stop strings. May be None without.
        make_grammars: makes the grammars of all rows, when the first has one.
    """

    def __init__(
        self,
        model: LoadedModel,
        seed: int,
        tokenizer: Any,
        make_grammars: MakeGrammars | None,
    ) -> None:
        self._model = model
        self._seed = seed
        self._tokenizer = tokenizer
        self._make_grammars = make_grammars
        self._num_opened = 0

    @cached_property
    def grammars(self) -> Any:
        """Those of all rows. Raises ValueError without a tokenizer."""
        if self._tokenizer is None or self._make_grammars is None:
            raise ValueError("A grammar needs the model's tokenizer.")
        return self._make_grammars(
            self._tokenizer,
            vocab_size=self._model.vocab_size,
            eos_ids=self._model.eos_token_ids,
        )

    def open(self, request: DenseRequest) -> Query:
        """A row that waits. Raises ValueError if it cannot run."""
        self._check_length(request)
        self._check_tokens(request)
        stopping, sampling = request.stopping, request.sampling
        reads_text = stopping.strings or stopping.regexes or stopping.rules.reads_text
        if self._tokenizer is None and reads_text:
            raise ValueError("Stop strings and regexes need the model's tokenizer.")
        grammar = None
        if sampling.grammar is not None:
            grammar = self.grammars.row(*sampling.grammar)
        number, self._num_opened = self._num_opened, self._num_opened + 1
        ends = self._model.eos_token_ids
        sampler = RowSampler(
            sampling,
            vocab_size=self._model.vocab_size,
            seed=drawn_seed(self._seed, number),
            ending_ids=ending_ids(stopping, ends),
            min_new_tokens=stopping.min_new_tokens,
        )
        row_stopping = RowStopping(
            stopping,
            eos_ids=ends,
            tokenizer=self._tokenizer,
            prompt_ids=request.input_ids,
        )
        return Query(request, number, sampler, row_stopping, grammar, [], [])

    def _check_length(self, request: DenseRequest) -> None:
        length, most = len(request.input_ids), self._model.context_len
        if not length:
            raise ValueError("The prompt has no tokens.")
        if length >= most:
            raise ValueError(
                f"The prompt has {length} tokens, and the model's context {most}; "
                "shorten it."
            )

    def _check_tokens(self, request: DenseRequest) -> None:
        """Raises ValueError for tokens that the model does not have."""
        logprobs, size = request.logprobs, self._model.vocab_size
        asked = () if logprobs is None else logprobs.token_ids
        for name, tokens in (("prompt", request.input_ids), ("logprobs", asked)):
            for token in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= token < size:
                    raise ValueError(
                        f"The {name} has token {token}; give ids from 0 to {size - 1}."
                    )
