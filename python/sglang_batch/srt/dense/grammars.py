"""Answers that keep to a grammar, by SGLang's compiler of grammars and xgrammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import xgrammar
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.constrained.xgrammar_backend import (
    TokenizerNotSupportedError,
    XGrammarGrammarBackend,
)

from ..scheduler.answer_ends import JsonCompiler

# Kinds of grammars, and SGLang's methods that compile them.
KINDS = {
    "json_schema": XGrammarGrammarBackend.dispatch_json,
    "regex": XGrammarGrammarBackend.dispatch_regex,
    "ebnf": XGrammarGrammarBackend.dispatch_ebnf,
    "structural_tag": XGrammarGrammarBackend.dispatch_structural_tag,
}
# Compiled grammars that are kept for rows to come.
_KEPT = 256


class Grammars:
    """Compiles grammars for one tokenizer and keeps the last ones.

    Args:
        tokenizer: of transformers.
        vocab_size: width of the model's logits, which may be more or less than the
            tokens of the tokenizer.
        eos_ids: the ending tokens of the model, which a finished grammar allows.

    Raises:
        ValueError: xgrammar does not know this kind of tokenizer, or there are no
            ending tokens.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Iterable[int]):
        self._vocab_size = vocab_size
        stop_ids = sorted(set(eos_ids))
        if not stop_ids:
            raise ValueError(
                "eos_ids is empty, so no grammar could end; give the ending tokens "
                "of the model"
            )
        try:
            self._backend = XGrammarGrammarBackend(tokenizer, vocab_size, stop_ids)
        except TokenizerNotSupportedError as error:
            raise ValueError(f"{error}; send requests without a grammar") from error
        info = self._backend._tokenizer_info
        # Its own cache takes some structural tags with tokens for others.
        self._backend.grammar_compiler = JsonCompiler(info, cache_enabled=False)
        self._compiled = lru_cache(maxsize=_KEPT)(self._compile)

    def row(self, kind: str, text: str) -> xgrammar.GrammarMatcher:
        """The start of a grammar, for one row.

        Args:
            kind: one of :data:`KINDS`.
            text: the grammar; of kind ``json_schema`` also ``$$ANY$$``, for any value.

        Raises:
            ValueError: the grammar cannot be compiled, or answers would not be kept to
                all of it.
        """
        return xgrammar.GrammarMatcher(self._compiled(kind, text))

    def mask(
        self, rows: Sequence[xgrammar.GrammarMatcher | None]
    ) -> Callable[[torch.Tensor], None] | None:
        """The mask of a step: sets the logits ``[rows, vocab]`` of tokens that may not follow
        to minus infinity, in place. None if no row needs one.

        Args:
            rows: one per row of the logits, None for a row without a grammar.
        """
        masked: list[int] = []
        bitmask = xgrammar.allocate_token_bitmask(len(rows), self._vocab_size)
        for place, row in enumerate(rows):
            if row is not None and not row.is_terminated():
                row.fill_next_token_bitmask(bitmask, place)
                masked.append(place)

        def apply(logits: torch.Tensor) -> None:
            width, expected = logits.shape[-1], self._vocab_size
            if width != expected:
                raise ValueError(
                    f"the logits have {width} columns, the grammars {expected}; make the "
                    "grammars with the width of the logits"
                )
            xgrammar.apply_token_bitmask_inplace(
                logits, bitmask.to(logits.device), vocab_size=width, indices=masked
            )

        return apply if masked else None

    def _compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        try:
            found = KINDS[kind](self._backend, text)
        except Exception as error:  # of tags that are none
            found = InvalidGrammarObject(f"{type(error).__name__} {error}")
        if isinstance(found, InvalidGrammarObject):
            reason = found.error_message
            raise ValueError(f"the {_named(kind, text)} is invalid: {reason}")
        compiled: xgrammar.CompiledGrammar = found.ctx
        return compiled


def _named(kind: str, text: str) -> str:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{kind} {shown!r}"
