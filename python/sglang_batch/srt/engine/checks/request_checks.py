"""Refuses requests that would end SGLang's processes, on every door of the server.

Two hooks on SGLang's main process see every request, whoever sent it: one before SGLang
expands it, and one when it has become a message to the scheduler. The rules are in
:mod:`.value_checks`. The checks raise FieldError, which names the first field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import msgspec
import numpy as np
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.observability.trace import TraceNullContext
from sglang.srt.runtime_context import get_exec, get_observability, get_serving
from sglang.srt.sampling.sampling_params import SamplingParams

from ...compat.offline_hooks import leave
from ...compat.server_types import EngineRequest, TokenizerManager
from ..request_ids import has_our_id, may_be_ours, name_list
from . import value_checks as checks
from .stop_rule_checks import settle_rules
from .value_checks import FieldError, OfTokens, Refused, Rule, check_value, short

# Most sequences of all prompts of a request.
MAX_ALL_SEQUENCES = 1 << 16
# An attribute of requests that were checked before their turn to be sent.
_CHECKED = "_offline_batch_checked"
BUDGET = "thinking_budget"
# Errors that values of the wrong shape raise in SGLang's code.
_SHAPE_ERRORS = (TypeError, LookupError, AttributeError, OverflowError)
# Made by SGLang itself, of types that are not sent as plain values.
_NOT_PLAIN = frozenset(
    {
        *("sampling_params", "input_ids", "input_embeds", "mm_inputs", "kv_hints"),
        *("token_type_ids", "time_stats", "positional_embed_overrides"),
        "num_items_assigned",
    }
)


# Before SGLang expands a request ------------------------------------------------------


def check_line(adapted: EngineRequest, vocab_size: int) -> None:
    """:func:`check_request` for a line, once, and a check of its prompts' token ids."""
    settle_rules(adapted)
    check_request(adapted)
    check_value("input_ids", adapted.input_ids, OfTokens.IDS, vocab_size)
    vars(adapted)[_CHECKED] = True


def check_request(adapted: EngineRequest) -> None:
    """Refuse values out of range in a request as its client gave it.

    Raises:
        FieldError: names the first field.
    """
    for name, rule, default in _request_fields(type(adapted)):
        value = getattr(adapted, name, None)
        if value is not None and value is not default:
            check_value(name, value, rule)
    # Answers are read within the prompt, which no cached prompt has.
    positions = (
        getattr(adapted, "multi_item_delimiter_indices", None),
        getattr(adapted, "token_indices_to_pool", None),
    )
    given = any(each is not None for each in positions)
    if given and not get_exec().features.enable_mis:
        raise FieldError(
            "multi_item_delimiter_indices", "this server runs without --enable-mis"
        )
    sampling = getattr(adapted, "sampling_params", None)
    for params in sampling if isinstance(sampling, list) else [sampling]:
        if params is not None:
            check_sampling(params)
    if sampling is not None:
        adapted.sampling_params = _without_nulls(sampling)
    _check_prompts(adapted)
    _check_id(adapted)
    _check_tensors(adapted)
    _check_labels(getattr(adapted, "custom_labels", None))


@cache
def _request_fields(kind: Any) -> list[tuple[str, Rule, object]]:
    """Names, rules and default values, which need no check."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    fields = checks.REQUEST_FIELDS.items()
    return [(name, rule, defaults.get(name)) for name, rule in fields]


def check_sampling(params: object) -> None:
    """Refuse sampling parameters of wrong types or out of range.

    Raises:
        FieldError: names the first one.
    """
    if not isinstance(params, dict):
        raise FieldError("sampling_params", f"{short(params)} is not an object")
    types = _sampling_types()
    for name, value in params.items():
        if name not in types:
            rules = checks.SAMPLING_FIELDS.items()
            known = sorted(n for n, rule in rules if not isinstance(rule, Refused))
            raise FieldError(
                str(name)[:100],
                f"there is no such sampling parameter; there are {', '.join(known)}",
                "unknown_parameter",
            )
        if value is None:
            continue
        rule = checks.SAMPLING_FIELDS[name]
        number = isinstance(rule, checks.Whole | checks.Real)
        if number and isinstance(value, list):
            raise FieldError(name, f"{short(value)} is a list", "invalid_type")
        if not (number or isinstance(rule, OfTokens)):
            checks.check_type(name, value, types[name])
        check_value(name, value, rule)


def _without_nulls(sampling: Any) -> Any:
    """Sampling parameters without the nulls that do not mean that there is no limit."""
    if isinstance(sampling, list):
        return [_without_nulls(params) for params in sampling]
    if sampling is None or None not in sampling.values():
        return sampling
    types = _sampling_types()
    return {
        name: value
        for name, value in sampling.items()
        if value is not None or type(None) in get_args(types[name])
    }


@cache
def _sampling_types() -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


def _check_prompts(adapted: EngineRequest) -> None:
    text, ids = adapted.text, adapted.input_ids
    if text is None or not ids:
        return
    num_texts = len(text) if isinstance(text, list) else None
    num_ids = len(ids) if isinstance(ids[0], list) else None
    if num_texts != num_ids:
        raise FieldError("input_ids", "not as many prompts as there are texts")


def _check_id(adapted: EngineRequest) -> None:
    if has_our_id(adapted):
        return
    for rid in adapted.rid if isinstance(adapted.rid, list) else [adapted.rid]:
        if rid is not None and not isinstance(rid, str):
            raise FieldError("rid", f"{short(rid)} is not text")
        if rid is not None and may_be_ours(
            rid
        ):  # by which the scheduler recognises lines
            raise FieldError(
                "rid", f"{rid[:100]!r} is, or begins, the id of a line; choose another"
            )


def _check_tensors(adapted: EngineRequest) -> None:
    """Refuse values in the place of tensors, which only code in this process can give."""
    overrides = getattr(adapted, "positional_embed_overrides", None)
    for each in overrides if isinstance(overrides, list) else [overrides]:
        if not isinstance(each, (PositionalEmbeds, type(None))):
            raise FieldError("positional_embed_overrides", "not for clients")
    plain = (str, int, float, list, dict)
    for per_input in getattr(adapted, "embed_overrides", None) or ():
        if any(isinstance(each, plain) for each in per_input or ()):
            raise FieldError("embed_overrides", "not for clients")


def _check_labels(labels: object) -> None:
    if not labels:
        return
    allowed = get_observability().tokenizer_metrics_allowed_custom_labels or ()
    if not isinstance(labels, dict) or not set(labels) <= set(allowed):
        raise FieldError(
            "custom_labels", "this server allows " + (", ".join(allowed) or "none")
        )


def normalize(original: Callable[[Any], None], adapted: Any) -> None:
    """AROUND hook on ``normalize_batch_and_arguments`` of both request types.

    Raises:
        ValueError: the request cannot be used.
    """
    leave(adapted)
    # SGLang reads it after a refusal too, to abort the requests that were sent.
    adapted.is_single = True
    if not vars(adapted).pop(_CHECKED, False):
        settle_rules(adapted)
        check_request(adapted)
    unnamed = adapted.rid is None
    try:
        original(adapted)
        if adapted.is_single:
            # Lists of other values have a type of their own.
            for name in ("rid", "sampling_params"):
                if isinstance(getattr(adapted, name), list):
                    problem = "it is a list, and the prompt is not"
                    raise FieldError(name, problem, "invalid_type")
        else:
            samples = getattr(adapted, "parallel_sample_num", 1)
            if adapted.batch_size * samples > MAX_ALL_SEQUENCES:
                raise FieldError(
                    "n",
                    f"a request for more than {MAX_ALL_SEQUENCES} answers; send several",
                )
            # Lists of fewer values than there are prompts are found here.
            for i in range(len(adapted.rid)):
                adapted[i]
            if unnamed and adapted.batch_size * samples > 1:
                name_list(adapted)
    except _SHAPE_ERRORS as error:
        raise ValueError(f"The request cannot be used: {error}") from error
    finally:
        # SGLang makes the parts again, with the values that it adds to the request.
        vars(adapted).pop("_sub_obj_cache", None)


# The message to the scheduler ---------------------------------------------------------


def create_message(
    original: Callable[..., Any],
    manager: TokenizerManager,
    obj: EngineRequest,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND hook on ``TokenizerManager._create_tokenized_object``.

    Raises:
        ValueError: the request cannot be used.
    """
    if isinstance(obj, GenerateReqInput) and not manager.is_generation:
        # SGLang has no check of this. Its scheduler would compute a vector, or end.
        raise ValueError("This model makes embeddings and generates no text.")
    try:
        message = original(manager, obj, *args, **kwargs)
    except _SHAPE_ERRORS as error:
        raise ValueError(f"The request cannot be used: {error}") from error
    check_message(message, manager.model_config.vocab_size)
    _check_embeds(message, int(manager.model_config.hidden_size))
    span = getattr(message.time_stats.trace_ctx, "root_span", None)
    if span is not None and not span.is_recording():  # nor are its steps
        message.time_stats.trace_ctx = TraceNullContext()
    return message


def check_message(message: Any, vocab_size: int) -> None:
    """Refuse a message to the scheduler that it cannot read, or that would end it.

    Raises:
        FieldError: names the first field.
    """
    input_ids = message.input_ids
    kind: Any = type(message)
    for name, field_type, default in _message_fields(kind):
        value = getattr(message, name)
        if value is None or value is default:
            continue
        if name not in _NOT_PLAIN:
            checks.check_type(name, value, field_type)
        rule = checks.SCHEDULER_FIELDS[name]
        if name == "input_ids" and message.mm_inputs is not None:
            continue  # the processor's ids of media may be beyond the vocabulary
        check_value(name, value, rule, vocab_size, input_ids)
    session = getattr(message, "session_params", None)
    if not (input_ids or message.mm_inputs or session):
        # The scheduler would have no KV to release.
        raise FieldError("text", "the prompt has no tokens")
    params = message.sampling_params
    check_value("stop_token_ids", params.stop_token_ids, OfTokens.IDS, vocab_size)
    if params.min_new_tokens and 2 * len(params.stop_token_ids or ()) > vocab_size:
        raise FieldError(
            "min_new_tokens", "with so many stop_token_ids, no token would be left"
        )
    _check_thinking_budget(message)


def _check_thinking_budget(message: Any) -> None:
    """Refuse a budget that nothing keeps to. A processor of logits may have its own."""
    budget = (message.sampling_params.custom_params or {}).get(BUDGET)
    if budget is None or message.custom_logit_processor:
        return
    check_value(BUDGET, budget, checks.Whole(-1))
    if not get_serving().enable_strict_thinking:
        raise FieldError(BUDGET, "this server has no --enable-strict-thinking")
    if not message.require_reasoning:
        raise FieldError(BUDGET, "this request does not reason")


@cache
def _message_fields(kind: Any) -> list[tuple[str, Any, Any]]:
    return [(f.name, f.type, f.default) for f in msgspec.structs.fields(kind)]


def _check_embeds(message: Any, hidden_size: int) -> None:
    rows = getattr(message, "input_embeds", None)
    if rows is None:
        return
    numbers = np.asarray(rows, dtype=np.float64)
    if numbers.ndim != 2 or numbers.shape[1] != hidden_size:
        raise FieldError("input_embeds", f"not rows of {hidden_size} numbers")
    if not np.isfinite(numbers).all():
        raise FieldError("input_embeds", "not finite numbers")
