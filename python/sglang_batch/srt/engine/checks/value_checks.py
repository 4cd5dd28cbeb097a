"""Checks of single values of a request, which need neither SGLang nor torch."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from .request_fields import (
    Biases,
    Positions,
    Real,
    Refused,
    Rule,
    Text,
    TokenCount,
    TokenIds,
    Whole,
)

# OpenAI's names for fields of SGLang.
OPENAI_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs_num": "top_logprobs",
    "sampling_seed": "seed",
}
# What a body has in the place of such a field, by the endpoint's names.
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
    name: str, value: Any, rule: Rule, vocab_size: int | None, input_ids: Any
) -> None:
    match rule:
        case Whole(low, high):
            for each in _each(value):
                _check_whole(name, each, low, high)
        case TokenCount():
            _check_whole(name, value, 0, vocab_size or 0)
        case Real(low, high, above):
            for each in _each(value):
                _check_real(name, each, low, high, above)
        case TokenIds():
            _check_ids(name, value, vocab_size)
        case Positions():
            _check_positions(name, value, len(input_ids or ()))
        case Biases(limit):
            _check_biases(name, value, limit)
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
        raise FieldError(
            name,
            f"{short(value)} is not from {low} to {high}",
            "integer_below_min_value" if value < low else "integer_above_max_value",
        )


def _check_real(name: str, value: Any, low: float, high: float, above: bool) -> None:
    if type(value) not in (int, float):
        raise FieldError(name, f"{short(value)} is not a number", "invalid_type")
    if value != value or not low <= value <= high or (above and value == low):
        span = (
            f"above {low:g} and at most {high:g}"
            if above
            else f"from {low:g} to {high:g}"
        )
        raise FieldError(
            name,
            f"{short(value)} is not {span}",
            "decimal_above_max_value" if value > high else "decimal_below_min_value",
        )


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
    if set(map(type, ids)) <= {int} and (
        not ids or (min(ids) >= 0 and max(ids) < limit)
    ):
        return
    wrong = next(each for each in ids if type(each) is not int or not 0 <= each < limit)
    raise FieldError(
        name, f"{short(wrong)} is not a token id; ids are 0 to {limit - 1}"
    )


def _check_positions(name: str, value: Any, num_tokens: int) -> None:
    last = -1
    for each in value:
        if type(each) is not int or not last < each < num_tokens:
            raise FieldError(
                name,
                f"{short(each)} is not a place in a prompt of {num_tokens} tokens",
            )
        last = each


def _check_biases(name: str, value: Any, limit: float) -> None:
    if not isinstance(value, dict):
        raise FieldError(name, f"{short(value)} is not an object", "invalid_type")
    for key, bias in value.items():
        if not isinstance(key, str) or not (key.isascii() and key.isdecimal()):
            raise FieldError(name, f"{short(key)} is not a token id")
        _check_real(name, bias, -limit, limit, False)


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
