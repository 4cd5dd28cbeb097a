"""An open request of the decode loop, those that wait, and what the loop counts."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..scheduling.dense_batches.dense_rows import Row, expected_left
from .grammar import GrammarRow
from .row_request import DenseRequest, TokenLogprobs
from .sampling import RowSampler
from .stopping import RowStopping


@dataclass(slots=True)
class Query:
    """One open request.

    number: in the order of arrival.
    tokens: of the answer so far. The last one has no KV yet.
    kv: while it does not run and its prompt has been computed. In host memory if it ran.
    """

    request: DenseRequest
    number: int
    sampler: RowSampler
    stopping: RowStopping
    grammar: GrammarRow | None
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
    """Requests that wait, in their order. What the order depends on stays the same."""

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
    """What a loop has done so far.

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
