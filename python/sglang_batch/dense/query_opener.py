"""Requests as the decode loop opens them: what it must know before they run."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from .grammar import Grammars
from .model import LoadedModel
from .query import Query
from .row_request import DenseRequest
from .sampling import RowSampler, drawn_seed
from .stopping import RowStopping, ending_ids


class QueryOpener:
    """Opens requests for one model, and numbers them as they come.

    Args:
        seed: of the engine, for rows that name none.
        tokenizer: of transformers, for stop strings and grammars. May be None without.
    """

    def __init__(self, model: LoadedModel, seed: int, tokenizer: Any) -> None:
        self._model = model
        self._seed = seed
        self._tokenizer = tokenizer
        self._num_opened = 0

    @cached_property
    def grammars(self) -> Grammars:
        """Those of all rows. Raises ValueError without a tokenizer."""
        if self._tokenizer is None:
            raise ValueError("A grammar needs the model's tokenizer.")
        return Grammars(
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
