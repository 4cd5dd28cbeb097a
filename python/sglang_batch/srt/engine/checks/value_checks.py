"""The allowed values of each field of a request, and the check of a value.

SGLang passes most values to its scheduler as they are. A value that it did not expect
ends the process there, with the requests of everybody. Each field of SGLang's request
types is in exactly one of the tables below, with its allowed range or the reason why
nothing is to be checked. A test compares them with SGLang's types.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec
import numpy as np

from .pattern_checks import check_grammar, check_pattern, check_schema

_INT32 = (1 << 31) - 1
_INT63 = (1 << 63) - 1
_FLOAT32 = 3e38
# Most sequences of one prompt. Each takes memory before it runs.
MAX_SEQUENCES = 1024
# A larger bias, divided by a low temperature, is infinite.
_MAX_BIAS = 1e9


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in a range."""

    low: int = 0
    high: int = _INT32


@dataclass(frozen=True, slots=True)
class Real:
    """A number in a range, the lower end excluded if ``above``."""

    low: float = -_FLOAT32
    high: float = _FLOAT32
    above: bool = False


class OfTokens(Enum):
    """Values that depend on the vocabulary or on the prompt.

    IDS: of the vocabulary: one, a list, or a list of lists.
    COUNT: a number of tokens of the vocabulary, from 0.
    PLACES: of tokens in the prompt, in ascending order.
    BIASES: numbers by token id.
    """

    IDS = auto()
    COUNT = auto()
    PLACES = auto()
    BIASES = auto()


@dataclass(frozen=True, slots=True)
class Text:
    """Text with a check of its own, which returns its fault."""

    check: Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Typed:
    """The type of the field is all there is to check, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Not for clients: somebody else sets the field."""

    reason: str


Rule = Whole | Real | OfTokens | Text | Typed | Refused

_TEXT = Typed("text of any content")
_FLAG = Typed("true or false")
_DEPLOYED = Typed("SGLang refuses it unless the server was launched for it")
_MEDIA = Typed("only read by a multimodal processor, in the main process")
_SET_BY_SGLANG = Refused("set by SGLang")
_DISAGGREGATED = Typed("a router sets it for servers that prefill for others")


def _fields(rule: Rule, *names: str) -> dict[str, Rule]:
    """A rule for fields whose names are separated by spaces."""
    return dict.fromkeys(" ".join(names).split(), rule)


# Fields of ``SamplingParams``.
SAMPLING_FIELDS: dict[str, Rule] = {
    "max_new_tokens": Whole(),
    "stop": Typed("SGLang counts and encodes the texts"),
    "stop_token_ids": OfTokens.IDS,
    "stop_regex": Text(check_pattern),
    "temperature": Real(0),
    "top_p": Real(0, 1, above=True),
    "top_k": Whole(-1),
    "min_p": Real(0, 1),
    "frequency_penalty": Real(-2, 2),
    "presence_penalty": Real(-2, 2),
    # A smaller one makes logits infinite.
    "repetition_penalty": Real(1e-6, 2),
    "min_new_tokens": Whole(),
    "n": Whole(1, MAX_SEQUENCES),
    "beam_width": Whole(1, 128),
    "json_schema": Text(check_schema),
    "regex": Text(check_grammar),
    "ebnf": Text(check_grammar),
    "structural_tag": Text(check_schema),
    "stream_interval": Whole(1),
    "logit_bias": OfTokens.BIASES,
    "sampling_seed": Whole(-_INT63 - 1, _INT63),
    "custom_params": Typed(
        "read by custom logit processors; our own checks read its stop_rules"
    ),
    "watermark": Typed("SGLang checks each of its fields"),
    "ebnf_full_assistant": Typed("set by SGLang's chat templates with their grammar"),
    **_fields(
        _FLAG,
        "ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim",
    ),
    **_fields(
        _SET_BY_SGLANG,
        "stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized",
    ),
}

# Fields of ``GenerateReqInput`` and ``EmbeddingReqInput`` that stay in the main process,
# and those that SGLang fills in before it sends the request.
REQUEST_FIELDS: dict[str, Rule] = {
    **_fields(
        _MEDIA,
        "image_data video_data audio_data mm_hashes mm_content_hashes modalities",
        "use_audio_in_video video_config images_config mm_processor_kwargs",
    ),
    **_fields(
        Whole(0, 1024),
        "max_dynamic_patch min_dynamic_patch",
        "image_max_dynamic_patch video_max_dynamic_patch",
    ),
    **_fields(_TEXT, "text conversation_id"),
    **_fields(
        _FLAG,
        "return_text_in_logprobs return_flat_raw_output_top_logprobs log_metrics",
        "return_flat_raw_top_logprobs_b64 background return_prompt_token_ids",
        "is_cross_encoder_request",
    ),
    "watermark": Typed("SGLang checks each of its fields"),
    "lora_path": Typed("SGLang looks the adapter up"),
    "data_parallel_rank": Whole(),
    "max_thinking_tokens": Whole(),
    "custom_labels": Typed("compared with the labels that the server allows"),
    "external_trace_header": Typed("only read by a tracer"),
    "received_time": Real(0),
    "embed_override_token_id": OfTokens.IDS,
    "embed_overrides": Typed("tensors, which no client can send"),
    # These reach the scheduler with SGLang's value.
    **_fields(
        _SET_BY_SGLANG,
        "http_worker_ipc lora_id need_wait_for_mm_inputs num_items_assigned",
        "encoder_urls",
    ),
}

# Fields of the messages to the scheduler, ``TokenizedGenerateReqInput`` and
# ``TokenizedEmbeddingReqInput``: of one sequence, with the prompt's tokens.
SCHEDULER_FIELDS: dict[str, Rule] = {
    **_fields(
        _TEXT,
        "http_worker_ipc input_text session_id lora_id lora_name routing_key",
        "extra_key cache_salt",
    ),
    **_fields(
        _FLAG,
        "return_logprob stream return_sampling_mask return_flat_raw_top_logprobs",
        "return_routed_experts return_indexer_topk require_reasoning no_logs",
        "return_bytes return_entropy need_wait_for_mm_inputs pp_prefetch_ticketed",
        "return_pooled_hidden_states",
    ),
    **_fields(_DEPLOYED, "return_hidden_states custom_logit_processor"),
    **_fields(
        Typed("made by SGLang"),
        "mm_inputs token_type_ids num_items_assigned encoder_urls time_stats",
    ),
    "rid": Typed("compared with the ids of jobs"),
    "input_embeds": Typed("its shape is compared with the model's"),
    "sampling_params": Typed("see SAMPLING_FIELDS"),
    "session_params": Typed("SGLang looks the session up"),
    "positional_embed_overrides": Typed("tensors, which no client can send"),
    "decision_layout": Typed("SGLang checks it against the prompt"),
    "kv_hints": Typed("SGLang decodes it"),
    "sampling_logprobs_mode": Typed("one of SGLang's words"),
    **_fields(OfTokens.IDS, "input_ids token_ids_logprob"),
    **_fields(OfTokens.PLACES, "multi_item_delimiter_indices token_indices_to_pool"),
    "logprob_start_len": Whole(-1),
    "top_logprobs_num": OfTokens.COUNT,
    "routed_experts_start_len": Whole(),
    "priority": Whole(-_INT32),
    "dimensions": Whole(1),
    **_fields(_DISAGGREGATED, "bootstrap_host bootstrap_pair_key"),
    "bootstrap_port": Whole(0, 65_535),
    "bootstrap_room": Whole(0, _INT63),
    "decode_tp_size": Whole(1, 65_535),
    **_fields(Whole(), "routed_dp_rank disagg_prefill_dp_rank"),
}

# OpenAI's names for fields of SGLang.
OPENAI_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs_num": "top_logprobs",
    "sampling_seed": "seed",
}
# The endpoints' names of such a field in a body.
_SENT_AS = {
    "max_new_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "min_new_tokens": ("min_tokens",),
    "top_logprobs_num": ("top_logprobs", "logprobs"),
    "sampling_seed": ("seed",),
    "stop": ("stop_sequences",),
    "json_schema": ("response_format",),
    "text": ("prompt", "input", "messages"),
    "input_ids": ("prompt", "input", "messages"),
}


class FieldError(ValueError):
    """A field of a request that cannot be used.

    field: SGLang's name of it.
    param: its name in an OpenAI body.
    code: OpenAI's code for the kind of error.
    """

    def __init__(self, field: str, problem: str, code: str = "invalid_value") -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
        self.param = f"body.{OPENAI_NAMES.get(field, field)}"
        self.code = code

    def as_sent(self, body: Mapping[str, object]) -> FieldError:
        """The error by the name that the client's body has for the field."""
        names = (name for name in _SENT_AS.get(self.field, ()) if name in body)
        return FieldError(next(names, self.field), self.problem, self.code)


def check_text(value: object) -> None:
    """Refuse text that UTF-8 cannot encode, in a JSON value.

    Raises:
        ValueError: a string has half of a surrogate pair.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The body has a lone surrogate, {error.object[error.start]!a}, which is "
            "not a character."
        ) from None


_encoder = msgspec.msgpack.Encoder()


def check_type(name: str, value: object, kind: Any) -> None:
    """Refuse a value that another process could not read as this type."""
    try:
        msgspec.msgpack.decode(_encoder.encode(value), type=kind)
    except msgspec.ValidationError as error:
        raise FieldError(name, f"{short(value)}: {error}", "invalid_type") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FieldError(name, f"{short(value)} cannot be sent: {error}") from None


def check_value(
    name: str,
    value: Any,
    rule: Rule,
    vocab_size: int | None = None,
    input_ids: Any = (),
) -> None:
    match rule:
        case Whole(low, high):
            for each in _each(value):
                _check_whole(name, each, low, high)
        case OfTokens.COUNT:
            _check_whole(name, value, 0, vocab_size or _INT32)
        case Real(low, high, above):
            for each in _each(value):
                _check_real(name, each, low, high, above)
        case OfTokens.IDS:
            _check_ids(name, value, vocab_size)
        case OfTokens.PLACES:
            last, most = -1, len(input_ids or ())
            for each in value:
                if type(each) is not int or not last < each < most:
                    wrong = f"{short(each)} is not a place in a prompt of {most} tokens"
                    raise FieldError(name, wrong)
                last = each
        case OfTokens.BIASES:
            if not isinstance(value, dict):
                wrong = f"{short(value)} is not an object"
                raise FieldError(name, wrong, "invalid_type")
            for key, bias in value.items():
                if not isinstance(key, str) or not (key.isascii() and key.isdecimal()):
                    raise FieldError(name, f"{short(key)} is not a token id")
                _check_ids(name, int(key), vocab_size)
                _check_real(name, bias, -_MAX_BIAS, _MAX_BIAS, False)
        case Text(check):
            for each in _each(value):
                if problem := check(each):
                    raise FieldError(name, problem)
        case Refused(reason):
            if value not in (None, False, 0):
                raise FieldError(name, f"it is not for clients: {reason}")


def _each(value: Any) -> Iterable[Any]:
    return [v for v in value if v is not None] if isinstance(value, list) else (value,)


def _check_whole(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int:
        raise FieldError(name, f"{short(value)} is not a whole number", "invalid_type")
    if not low <= value <= high:
        code = "integer_below_min_value" if value < low else "integer_above_max_value"
        raise FieldError(name, f"{short(value)} is not from {low} to {high}", code)


def _check_real(name: str, value: Any, low: float, high: float, above: bool) -> None:
    if type(value) not in (int, float):
        raise FieldError(name, f"{short(value)} is not a number", "invalid_type")
    if value != value or not low <= value <= high or (above and value == low):
        span = f"from {low:g} to {high:g}"
        if above:
            span = f"above {low:g} and at most {high:g}"
        code = "decimal_above_max_value" if value > high else "decimal_below_min_value"
        raise FieldError(name, f"{short(value)} is not {span}", code)


def _check_ids(name: str, value: Any, vocab_size: int | None) -> None:
    if value is None:
        return
    limit = 1 << 31 if vocab_size is None else vocab_size
    if isinstance(value, array):
        numbers = np.frombuffer(value, np.int64)
        if not len(numbers) or (numbers.min() >= 0 and numbers.max() < limit):
            return
    ids = list(value) if isinstance(value, (list, set, tuple, array)) else [value]
    if ids and isinstance(ids[0], list):
        for prompt in ids:
            _check_ids(name, prompt, vocab_size)
        return
    # In the interpreter's built-in loops, because prompts are long.
    whole = set(map(type, ids)) <= {int}
    if whole and (not ids or (min(ids) >= 0 and max(ids) < limit)):
        return
    wrong = next(each for each in ids if type(each) is not int or not 0 <= each < limit)
    raise FieldError(
        name, f"{short(wrong)} is not a token id; ids are 0 to {limit - 1}"
    )


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
