"""Values that SGLang hands on unchecked and its scheduler dies of.

One such request ends the engine, with all that others have in it. So a line that holds
one is refused, before it gets there.
"""

from __future__ import annotations

import json
from typing import Any

_INT32 = 1 << 31
_FLOAT32_MAX = 3e38
# Sequences that one request may ask for; each takes memory before it runs.
MAX_SEQUENCES = 1024
_INTEGERS = (
    "logprob_start_len",
    "priority",
    "routed_dp_rank",
    "bootstrap_room",
    "bootstrap_port",
)


def check_text(value: Any) -> None:
    """Refuse text that UTF-8 cannot hold.

    Raises:
        ValueError: a string holds half of a surrogate pair.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The body holds a lone surrogate, {error.object[error.start]!a}, which "
            "is no character."
        ) from None


def check_request(adapted: Any, vocab_size: int) -> None:
    """Refuse numbers that are out of range, in SGLang's internal request.

    Raises:
        ValueError: names the first.
    """
    sampling = getattr(adapted, "sampling_params", None)
    for params in sampling if isinstance(sampling, list) else [sampling]:
        _check_range(params, "sampling_params")
        if isinstance(params, dict):
            _check_ids(params.get("stop_token_ids"), "stop_token_ids", vocab_size)
            _check_sequences(params.get("n"))
    _check_ids(getattr(adapted, "input_ids", None), "input_ids", vocab_size)
    tops = getattr(adapted, "top_logprobs_num", None)
    for top in tops if isinstance(tops, list) else [tops]:
        if top is not None and not 0 <= top <= vocab_size:
            raise ValueError(
                f"top_logprobs: {top} is not from 0 to {vocab_size}, the number of "
                "tokens that the model knows."
            )
    for name in _INTEGERS:
        _check_range(getattr(adapted, name, None), name)


def _check_sequences(count: Any) -> None:
    if isinstance(count, int) and count > MAX_SEQUENCES:
        raise ValueError(
            f"n: {count} answers to one request are too many; at most "
            f"{MAX_SEQUENCES} are given. Send the request several times."
        )


def _check_ids(value: Any, name: str, vocab_size: int) -> None:
    if value is None:
        return
    ids = list(value) if isinstance(value, (list, set, tuple)) else [value]
    if ids and isinstance(ids[0], list):
        for prompt in ids:
            _check_ids(prompt, name, vocab_size)
        return
    # In loops of the interpreter's own: prompts are long.
    if set(map(type, ids)) <= {int} and (
        not ids or (min(ids) >= 0 and max(ids) < vocab_size)
    ):
        return
    wrong = next(
        each for each in ids if type(each) is not int or not 0 <= each < vocab_size
    )
    raise ValueError(
        f"{name}: {wrong!r} is no token id; they are 0 to {vocab_size - 1}."
    )


def _check_range(value: Any, name: str) -> None:
    if isinstance(value, int):
        if not -_INT32 <= value < _INT32:
            raise ValueError(f"{name}: {value} has more than 32 bits.")
    elif isinstance(value, float):
        if not abs(value) <= _FLOAT32_MAX:
            raise ValueError(f"{name}: {value} is no finite number.")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_range(item, str(key))
    elif isinstance(value, list):
        for item in value:
            _check_range(item, name)
