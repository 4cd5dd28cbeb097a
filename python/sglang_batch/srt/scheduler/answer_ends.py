"""When a request ends besides SGLang's own rules: by stop rules, and by grammars.

SGLang calls ``update_finish_state`` of a request after each of its steps. For a request
with stop rules, that call also asks the rules. A cut answer is released by SGLang as after
a stop string: before the next step, and with the tokens behind the end of a step of
several.

A grammar may allow no token: after ``root ::= root``, for example, none may follow.
SGLang's sampler then finds no token with a probability above 0, and its scheduler dies with
the requests of everyone. Here only the request with that grammar fails.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import torch
import xgrammar
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    BaseFinishReason,
    ScheduleBatch,
)
from sglang.srt.sampling.sampling_params import get_request_reasoning_end_token_ids

from ...batch_api.stop_rules import (
    FIELD,
    AnswerText,
    AnswerWatch,
    Cut,
    RegexTooComplex,
    StopRules,
    without_extra,
)
from ..compat.scheduler_types import Req


class FinishedByRule(BaseFinishReason):  # type: ignore[misc]
    """The reason of a request that a rule has ended."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut

    def to_json(self) -> dict[str, str | int]:
        return self.cut.to_reason()


def watch_request(
    req: Req, tokenizer: Any, model_config: ModelConfig, on_cut: Callable[[str], None]
) -> None:
    """Have a request end by its stop rules, if it has any.

    Args:
        tokenizer: None for a server that has none.
        on_cut: called with the rule that ends it.
    """
    custom = req.sampling_params.custom_params
    text = custom.get(FIELD) if isinstance(custom, dict) else None
    if not isinstance(text, str):
        return
    rules = StopRules.from_text(text)
    if not rules:
        return
    if rules.reads_text and tokenizer is None:
        req.set_finish_with_abort(
            "stop_rules json and regex need a tokenizer, which this server has none of; "
            "use repetition only",
            HTTPStatus.BAD_REQUEST,
            "BadRequestError",
        )
        return
    # In the place of the method: it costs nothing for requests without rules.
    reasoning_end = _reasoning_end(req, model_config)
    endings = _RuleEndings(req, rules, tokenizer, reasoning_end, on_cut)
    vars(req)["update_finish_state"] = endings


def _reasoning_end(req: Req, model_config: ModelConfig) -> Sequence[int] | None:
    """The tokens that end the reasoning of a request, None if it does not reason."""
    if not req.require_reasoning:
        return None
    chosen: Sequence[int] | None = get_request_reasoning_end_token_ids(
        req.sampling_params.custom_params,
        allowed_sequences=model_config.request_selectable_think_end_id_sequences,
    )
    return chosen or model_config.think_end_ids


class _RuleEndings:
    """``update_finish_state`` of one request."""

    def __init__(
        self,
        req: Req,
        rules: StopRules,
        tokenizer: Any,
        reasoning_end: Sequence[int] | None,
        on_cut: Callable[[str], None],
    ) -> None:
        # The request has this object, and should be freed with its last reference.
        self._req = weakref.ref(req)
        text = None
        if rules.reads_text:
            text = AnswerText(
                tokenizer,
                req.origin_input_ids,
                skip_special_tokens=req.sampling_params.skip_special_tokens,
            )
        self._watch = AnswerWatch(rules, text, reasoning_end)
        self._on_cut = on_cut
        self._num_read = 0

    def __call__(self, new_accepted_len: int = 1) -> None:
        req = self._req()
        if req is None or req.finished():
            return
        type(req).update_finish_state(req, new_accepted_len)
        if not isinstance(req.finished_reason, FINISH_ABORT):
            self._read(req)

    def _read(self, req: Req) -> None:
        reason = req.finished_reason
        end = len(req.output_ids)
        if reason is not None and req.finished_len is not None:
            end = req.finished_len
        try:
            cut = self._next_cut(req.output_ids, end)
        except RegexTooComplex as error:
            if reason is None:
                req.finished_reason = FINISH_ABORT(
                    f"stop_rules: {error}.", HTTPStatus.BAD_REQUEST, "BadRequestError"
                )
            return
        # SGLang's own reason counts for the same token, unless the rule says more.
        if cut is not None and (
            reason is None or self._num_read < end or isinstance(reason, FINISH_LENGTH)
        ):
            req.finished_reason = FinishedByRule(cut)
            req.finished_len = self._num_read
            self._on_cut(cut.rule)

    def _next_cut(self, ids: Sequence[int], end: int) -> Cut | None:
        """The first cut among the new tokens, of which those up to it are read then."""
        while self._num_read < end:
            token = ids[self._num_read]
            self._num_read += 1
            if (cut := self._watch.feed(token)) is not None:
                return cut
        return None


def trim_matched_stop(
    original: Callable[..., str | list[int]],
    detokenizer: object,
    output: str | list[int],
    finished_reason: Any,
    no_stop_trim: bool,
) -> str | list[int]:
    """AROUND hook on ``DetokenizerManager.trim_matched_stop``.

    A rule ends a text within its last token, and what matched stays.
    """
    if isinstance(output, str) and not no_stop_trim:
        trimmed = without_extra(output, finished_reason)
        if trimmed is not None:
            return trimmed
    return original(detokenizer, output, finished_reason, no_stop_trim)


# xgrammar's set of the characters of a string whose length is limited, and that set without
# the control characters that a JSON string has to escape.
_LIMITED, _JSON_LIMITED = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
_LENGTHS = ("minLength", "maxLength")


class JsonCompiler(xgrammar.GrammarCompiler):
    """A compiler of xgrammar whose answers to JSON schemas are JSON.

    xgrammar 0.2 allows bare tabs and other control characters in strings with ``minLength`` or
    ``maxLength``.
    """

    def compile_json_schema(
        self, schema: Any, **kwargs: Any
    ) -> xgrammar.CompiledGrammar:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        if not any(name in text for name in _LENGTHS):
            return super().compile_json_schema(schema, **kwargs)
        return self.compile_grammar(_json_grammar(schema, **kwargs))

    def compile_structural_tag(
        self, *args: Any, **kwargs: Any
    ) -> xgrammar.CompiledGrammar:
        if len(args) == 1 and not kwargs:
            tag = args[0]
            text = tag if isinstance(tag, str) else tag.model_dump_json()
            if any(name in text for name in _LENGTHS):
                args = (json.dumps(_with_grammars(json.loads(text))),)
        return super().compile_structural_tag(*args, **kwargs)


def _json_grammar(schema: Any, **kwargs: Any) -> str:
    grammar = str(xgrammar.Grammar.from_json_schema(schema, **kwargs))
    return grammar.replace(_LIMITED, _JSON_LIMITED)


def _with_grammars(part: Any) -> Any:
    """A part of a structural tag, with the grammars of its schemas in their place."""
    if isinstance(part, list):
        return [_with_grammars(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.get("style") in (None, "json"):
        text = json.dumps(part.get("json_schema"))
        if any(name in text for name in _LENGTHS):
            return {"type": "grammar", "grammar": _json_grammar(text)}
        return part
    return {name: _with_grammars(value) for name, value in part.items()}


def keep_to_json(_result: object, backend: Any, *_args: object, **_kw: object) -> None:
    """AFTER hook on ``XGrammarGrammarBackend.__init__``: its schemas are compiled by ours."""
    backend.grammar_compiler.__class__ = JsonCompiler


_MARK = "_sglang_batch_allows_no_token"


def allow_one(
    _result: object,
    grammar: object,
    vocab_mask: torch.Tensor,
    idx: int,
    *_args: object,
    **_kwargs: object,
) -> None:
    """AFTER hook on ``XGrammarGrammar.fill_vocab_mask``: if no token may follow, allow
    all, and mark the grammar. ``abort_marked`` then ends its request.

    Args:
        vocab_mask: int32 ``[rows, vocab / 32]``, a bit for each token that may follow.
        idx: the row of the request.
    """
    if not vocab_mask[idx].any():
        vocab_mask[idx].fill_(-1)
        setattr(grammar, _MARK, True)


def abort_marked(_processor: object, batch: ScheduleBatch, *_args: object) -> None:
    """BEFORE hook on the processing of a step's results: abort what ``allow_one`` marked.

    The grammar rejects the sampled token, but SGLang looks for ends first: a token of
    its end, or the last of ``max_tokens``, would pass for an answer.
    """
    for req in batch.reqs:
        if req.grammar is None or req.finished() or not _is_marked(req.grammar):
            continue
        if req.inflight_middle_chunks <= 0:
            req.to_finish = FINISH_ABORT(
                "Grammar accept_token failed: no token may follow.",
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "InternalServerError",
            )


def _is_marked(grammar: Any) -> bool:
    # Behind a reasoning parser, the grammar is inside another.
    return hasattr(getattr(grammar, "grammar", grammar), _MARK)
