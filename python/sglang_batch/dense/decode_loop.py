"""The decode loop: rows join when there is room, decode together, and leave one by one.

No query waits for the slowest of its batch (Baton, section 4). Prompts are computed apart
from decode (4.2). Rows of lower priority, and those that no longer fit, go to host memory
and come back (4.3).
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from .admission import Admission, ByLength, Row, expected_left
from .model import LoadedModel
from .prefill import Prefilled, prompt_from
from .row_request import (
    DenseAnswer,
    DenseRequest,
    DenseSettings,
    OnAnswer,
    TokenLogprobs,
)
from .rows import Rows
from .sampling import Chosen, RowSampler, choose, drawn_seed, prompt_logprobs
from .stopping import Ending, RowStopping, ending_ids

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 60
# Fewest waiting requests that admission looks at.
_WINDOW = 64
# Prompts that are computed together, if so many wait: at least these, or half of the rows.
_LEAST_PREFILLED = 4
# Steps after which a batch that ran out of memory may have a row more.
_GROW_EVERY = 64


class DecodeLoop:
    """Runs requests on the rows of one model. All calls come from one thread.

    Args:
        tokenizer: of transformers, for stop strings and grammars. May be None without.
        make_grammars: see :class:`.QueryOpener`.
    """

    def __init__(
        self,
        model: LoadedModel,
        rows: Rows,
        settings: DenseSettings,
        on_answer: OnAnswer,
        tokenizer: Any = None,
        make_grammars: MakeGrammars | None = None,
    ) -> None:
        self._model = model
        self._rows = rows
        self._settings = settings
        self._on_answer = on_answer
        self._opener = QueryOpener(model, settings.seed, tokenizer, make_grammars)
        # Those that join in their order, and those that join by length.
        self._waiting, self._by_length = WaitingQueries(), WaitingQueries()
        self._running: list[Query] = []
        self._admission = Admission(
            settings.max_rows,
            _NO_LIMIT if settings.max_cells is None else settings.max_cells,
            step_cells=settings.step_cells,
            most_cells=settings.max_rows * model.context_len,
        )
        self._host_cells = 0
        self._computes_ahead = True
        # Whether something has changed since admission was asked last.
        self._changed = False
        self.counts = LoopCounts()

    @property
    def can_step(self) -> bool:
        """Whether a request is open."""
        return bool(self._waiting or self._by_length or self._running)

    def running(self) -> list[str]:
        """Ids of the requests that decode."""
        return [query.request.rid for query in self._running]

    def revise(self, revised: Callable[[DenseRequest], DenseRequest]) -> None:
        """Change the plan of open requests. Rows leave before the next step for others that
        now have a higher priority.

        Args:
            revised: of each request the same one, or one with another ``place``,
                ``priority``, ``expected_len`` or ``by_length``.
        """
        for query in tuple(self._all_waiting()):
            if (request := revised(query.request)) is not query.request:
                self._queue_of(query).take(query.number)
                query.request = request
                self._let_wait(query)
        for query in self._running:
            query.request = revised(query.request)
            self._admission.runs(query.row(), self._place_of(query))
        self._changed = True

    def add(self, request: DenseRequest) -> None:
        """Open a request. One that cannot run is answered with an error at once."""
        try:
            query = self._opener.open(request)
            if query.length + 1 > self._admission.max_cells:
                raise ValueError(self._no_room_for(query))
        except ValueError as error:
            self._on_answer(request, DenseAnswer((), "abort", error=str(error)))
            return
        self._let_wait(query)
        self._changed = True

    def abort(self, rid: str) -> None:
        """End a request. An unknown one is ignored."""
        error = "The request was aborted."
        for query in self._all_waiting():
            if query.request.rid == rid:
                self._refuse(query, error)
                return
        for row, query in enumerate(self._running):
            if query.request.rid == rid:
                with torch.inference_mode():
                    self._leave(row)
                self._fail(query, error)
                return

    def step(self) -> None:
        """Let rows leave and join, and decode one token of each row."""
        with torch.inference_mode():
            self._step()

    def _step(self) -> None:
        needed = len(self._running) * (max(self._rows.lengths, default=0) + 1)
        is_over = needed > self._admission.max_cells
        if self._changed or is_over or self._admission.is_due:
            self._changed = False
            self._admit()
        if not self._running:
            self._rows.forget()
            return
        logits = self._decode()
        if logits is None and len(self._running) == 1:
            self._free()
            logits = self._decode()
        if logits is None:
            self._halve()
            return
        self._admission.tick()
        self.counts.steps += 1
        self.counts.decoded_rows += len(self._running)
        cells = self._rows.allocated_cells
        self.counts.peak_cells = max(self.counts.peak_cells, cells)
        queries = list(self._running)
        chosen = self._choose(logits, queries)
        ended = [self._take(query, chosen, at) for at, query in enumerate(queries)]
        for row in range(len(queries) - 1, -1, -1):
            if ended[row]:
                self._leave(row, wipe=row in chosen.failed)
        if self.counts.steps % _GROW_EVERY == 0:
            # A row more is allowed after memory was short (4.3, batch size scaling).
            self._computes_ahead = True
            if self._admission.max_rows < self._settings.max_rows:
                self._admission.max_rows += 1
                self._changed = True

    def _decode(self) -> torch.Tensor | None:
        """Logits of the next tokens, None if there is too little memory. It is freed only
        after this returns: until then the error holds the tensors of the step.
        """
        try:
            return self._rows.decode([query.tokens[-1] for query in self._running])
        except torch.OutOfMemoryError:
            return None

    def _admit(self) -> None:
        window = self._waiting.first(max(_WINDOW, 2 * self._admission.max_rows))
        changes = self._admission.changes(
            [query.row() for query in self._running],
            [query.row() for query in window],
            self._settings.host_cells - self._host_cells,
        )
        # Prefixes are shared by neighbours in the plan's order. Of a family that joins by
        # length the last one is chosen last, and the next one follows it.
        joining = [self._waiting.take(window[i].number) for i in changes.joining]
        joining.sort(key=lambda query: query.order)
        joining += [self._by_length.take(number) for number in changes.chosen]
        for row in sorted(changes.leaving, reverse=True):
            self._preempt(row)
        too_long = {*changes.too_long}  # some of them ran, and wait only now
        for query in [q for q in self._all_waiting() if q.number in too_long]:
            self._refuse(query, self._no_room_for(query))
        if joining:
            self._join(joining)

    def _place_of(self, query: Query) -> ByLength | None:
        # Rows that are computed one by one need not be alike.
        return query.request.by_length if self._rows.are_padded else None

    def _queue_of(self, query: Query) -> WaitingQueries:
        return self._by_length if self._place_of(query) else self._waiting

    def _all_waiting(self) -> Iterator[Query]:
        return chain(self._waiting, self._by_length)

    def _let_wait(self, query: Query) -> None:
        self._queue_of(query).add(query)
        if place := self._place_of(query):
            self._admission.add(query.row(), place)
        else:
            self._admission.remove(query.number)

    def _refuse(self, query: Query, error: str) -> None:
        self._queue_of(query).take(query.number)
        self._forget_kv(query)
        self._fail(query, error)

    def _no_room_for(self, query: Query) -> str:
        """Why a row can make no step even alone."""
        return (
            f"{query.length + 1} tokens do not fit into the {self._admission.max_cells} "
            "cells of KV; raise --max-total-tokens."
        )

    def _join(self, joining: Sequence[Query]) -> None:
        ready = [query for query in joining if query.kv is not None]
        new = [query for query in joining if query.kv is None]
        ahead = self._taken_ahead(new)
        following = next((query.request for query in self._next_after(new, 1)), None)
        kvs = [query.kv for query in ready]
        joined = list(ready)
        by_id = {query.request.rid: query for query in (*new, *ahead)}
        waits = {query.request.rid for query in ahead}
        requests = [_with_answer(query) for query in (*new, *ahead)]
        try:
            for found in self._rows.prefill(requests, following):
                rid = found.request.rid
                query = by_id.pop(rid)
                goes_on = self._begin(query, found)
                if goes_on and rid in waits:
                    self._keep_kv(query, found.kv)
                    self._let_wait(query)
                elif goes_on:
                    kvs.append(found.kv)
                    joined.append(query)
            self._rows.allow(self._admission.max_rows, self._admission.max_cells)
            self._rows.join(kvs)
            short = False
        except torch.OutOfMemoryError:
            short = True  # the error holds tensors until here
        if short:
            del kvs
            self._out_of_memory([*joined, *by_id.values()], alone=not ahead)
            return
        for query in ready:
            self._forget_kv(query)
        self._running += joined

    def _next_after(self, new: Sequence[Query], count: int) -> list[Query]:
        """The requests that wait next after new rows, in the plan's order."""
        if new and self._place_of(new[-1]):
            return self._by_length.after(new[-1], count)
        return self._waiting.first(count)

    def _taken_ahead(self, new: Sequence[Query]) -> list[Query]:
        """Take waiting requests whose prompts are computed with those of new rows, and that join
        later (4.2): one prompt alone costs nearly what several do.
        """
        if not (new and self._computes_ahead):
            return []
        room = self._settings.host_cells - self._host_cells
        most = max(_LEAST_PREFILLED, self._admission.max_rows // 2) - len(new)
        found: list[Query] = []
        for query in self._next_after(new, max(0, most)):
            room -= query.length
            if query.tokens or room < 0:
                break
            if prompt_from(query.request) is not None:
                break  # it would be computed alone
            found.append(query)
        for query in found:
            self._queue_of(query).take(query.number)
        return found

    def _out_of_memory(self, joining: Sequence[Query], *, alone: bool) -> None:
        """Rows could not join: try again with half as many, or fail the only one.

        Args:
            alone: no prompts were computed ahead. Otherwise do without that first.
        """
        self._free()
        if alone and not self._running and len(joining) == 1:
            self._forget_kv(joining[0])
            self._fail(joining[0], "The prompt does not fit into memory.")
            return
        if alone:
            self._admission.max_rows = max(1, len(self._running) + len(joining) // 2)
            logger.warning(
                "Out of memory with %d rows and %d that join: at most %d from now on.",
                len(self._running), len(joining), self._admission.max_rows,
            )  # fmt: skip
        for query in joining:
            if query.tokens and query.kv is None:
                self.counts.recomputed_tokens += query.length
            self._let_wait(query)
        self._changed = True

    def _free(self) -> None:
        """Release memory that only waiting rows need: it has run out."""
        self._rows.forget()
        self._computes_ahead = False
        for query in self._all_waiting():
            if query.kv is not None:
                query.kv = self._rows.to_host(query.kv)

    def _halve(self) -> None:
        """A step ran out of memory: half of the rows go to the host."""
        if len(self._running) == 1:
            query = self._running[0]
            self._leave(0)
            self._fail(query, "Its KV does not fit into memory.")
            return
        self._free()
        self._admission.max_rows = max(1, len(self._running) // 2)
        for row in range(len(self._running) - 1, self._admission.max_rows - 1, -1):
            self._preempt(row)

    def _preempt(self, row: int) -> None:
        """Move a row to the host, or drop its KV where the host is full."""
        query = self._running[row]
        fits = self._host_cells + query.length <= self._settings.host_cells
        # The prompt of an encoder-decoder cannot continue with its answer.
        if fits or self._model.is_encoder_decoder:
            self._keep_kv(query, self._rows.take(row))
        else:
            self.counts.recomputed_tokens += query.length
        self._leave(row)
        self.counts.preempted += 1
        self._let_wait(query)

    def _leave(self, row: int, *, wipe: bool = False) -> None:
        self._rows.leave(row, wipe=wipe)
        self._running[row] = self._running[-1]
        self._running.pop()
        self._changed = True

    def _keep_kv(self, query: Query, kv: Any) -> None:
        query.kv = kv
        self._host_cells += query.length

    def _forget_kv(self, query: Query) -> None:
        if query.kv is not None:
            query.kv = None
            self._host_cells -= query.length

    def _begin(self, query: Query, found: Prefilled) -> bool:
        """Take the first token after a prompt, or none if its answer continues. Whether the row
        continues.
        """
        if query.tokens:
            return True  # its last token was chosen before
        query.cached_tokens = found.cached_tokens
        wanted = query.request.logprobs
        if found.prompt_logits is not None and wanted is not None:
            start = wanted.prompt_from or 0
            tokens = query.request.input_ids[start:]
            if len(found.prompt_logits) != len(tokens):
                self._fail(query, "The model gives no log probabilities of a prompt.")
                return False
            if tokens:
                query.prompt_logprobs = [
                    TokenLogprobs(tokens[0], None),
                    *prompt_logprobs(found.prompt_logits[:-1], tokens[1:], wanted),
                ]
        chosen = self._choose(found.logits[None], [query])
        return not self._take(query, chosen, 0)

    def _choose(self, logits: torch.Tensor, queries: Sequence[Query]) -> Chosen:
        grammars = [query.grammar for query in queries]
        mask = None
        if any(grammars):
            mask = self._opener.grammars.mask(grammars)
        return choose(
            logits,
            [query.sampler for query in queries],
            mask=mask,
            wanted=[query.request.logprobs for query in queries],
        )

    def _take(self, query: Query, chosen: Chosen, at: int) -> bool:
        """Add a row's token to its answer. Whether the row has ended."""
        if (error := chosen.failed.get(at)) is not None:
            self._fail(query, error)
            return True
        token = chosen.tokens[at]
        query.tokens.append(token)
        query.sampler.append(token)
        if (logprobs := chosen.logprobs[at]) is not None:
            query.logprobs.append(logprobs)
        ended_grammar = False
        if query.grammar is not None:
            accepted = query.grammar.accept_token(token)
            assert accepted, f"token {token} was chosen under the mask"
            ended_grammar = query.grammar.is_terminated()
        ending = query.stopping.append(token, grammar_ended=ended_grammar)
        if ending is None and query.length + 1 >= self._model.context_len:
            ending = Ending("length")
        if ending is None:
            return False
        self._answer(query, ending)
        return True

    def _fail(self, query: Query, error: str) -> None:
        self._answer(query, Ending("abort", error=error))

    def _answer(self, query: Query, ending: Ending) -> None:
        self._changed = True
        self._admission.remove(query.number)
        answer = DenseAnswer(
            query.tokens, ending.reason, ending.matched, ending.error,
            query.cached_tokens, query.logprobs, query.prompt_logprobs,
        )  # fmt: skip
        self._on_answer(query.request, answer)


def _with_answer(query: Query) -> DenseRequest:
    """A request whose prompt ends with its answer until its KV was dropped."""
    if not query.tokens:
        return query.request
    ids = [*query.request.input_ids, *query.tokens[:-1]]
    return replace(query.request, input_ids=ids, logprobs=None)


# How open requests are opened, and how they wait.


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
        return self._ordered[:count]

    def after(self, query: Query, count: int) -> list[Query]:
        """The next ones after a place in the order at which nobody waits."""
        at = self._place(query)
        return self._ordered[at : at + count]

    def add(self, query: Query) -> None:
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

    steps: forward passes that decode. decoded_rows: rows of these, summed.
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


@dataclass
class QueryOpener:
    """Opens requests for one model, and numbers them as they come.

    seed: of the engine, for rows that name none.
    tokenizer: of transformers, for stop strings. May be None without.
    make_grammars: makes the grammars of all rows, when the first has one.
    """

    model: LoadedModel
    seed: int
    tokenizer: Any
    make_grammars: MakeGrammars | None
    num_opened: int = 0

    @cached_property
    def grammars(self) -> Any:
        """Those of all rows. Raises ValueError without a tokenizer."""
        if self.tokenizer is None or self.make_grammars is None:
            raise ValueError("A grammar needs the model's tokenizer.")
        return self.make_grammars(
            self.tokenizer,
            vocab_size=self.model.vocab_size,
            eos_ids=self.model.eos_token_ids,
        )

    def open(self, request: DenseRequest) -> Query:
        """A row that waits. Raises ValueError if it cannot run."""
        length, most = len(request.input_ids), self.model.context_len
        if not length:
            raise ValueError("The prompt has no tokens.")
        if length >= most:
            raise ValueError(
                f"The prompt has {length} tokens, and the model's context {most}; "
                "shorten it."
            )
        logprobs, size = request.logprobs, self.model.vocab_size
        asked = () if logprobs is None else logprobs.token_ids
        for name, tokens in (("prompt", request.input_ids), ("logprobs", asked)):
            for token in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= token < size:
                    raise ValueError(
                        f"The {name} has token {token}; give ids from 0 to {size - 1}."
                    )
        stopping, sampling = request.stopping, request.sampling
        reads_text = stopping.strings or stopping.regexes or stopping.rules.reads_text
        if self.tokenizer is None and reads_text:
            raise ValueError("Stop strings and regexes need the model's tokenizer.")
        grammar = None
        if sampling.grammar is not None:
            grammar = self.grammars.row(*sampling.grammar)
        number, self.num_opened = self.num_opened, self.num_opened + 1
        ends = self.model.eos_token_ids
        sampler = RowSampler(
            sampling,
            vocab_size=self.model.vocab_size,
            seed=drawn_seed(self.seed, number),
            ending_ids=ending_ids(stopping, ends),
            min_new_tokens=stopping.min_new_tokens,
        )
        row_stopping = RowStopping(
            stopping,
            eos_ids=ends,
            tokenizer=self.tokenizer,
            prompt_ids=request.input_ids,
        )
        return Query(request, number, sampler, row_stopping, grammar, [], [])
