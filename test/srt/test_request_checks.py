"""Values that end SGLang's scheduler are refused for their line alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_batch.srt.request_checks import check_request, check_text

VOCAB = 300


def adapted(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sampling_params": {"top_k": 1 << 70}}, "top_k: 1180591620717411303424 has"),
        ({"sampling_params": {"temperature": math.inf}}, "temperature: inf is no"),
        ({"sampling_params": {"temperature": math.nan}}, "temperature: nan is no"),
        ({"sampling_params": {"logit_bias": {"5": 1e39}}}, "5: 1e+39 is no finite"),
        ({"sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids: -1 is no"),
        ({"sampling_params": [{}, {"stop_token_ids": [VOCAB]}]}, "stop_token_ids: 300"),
        ({"sampling_params": {"n": 1025}}, "n: 1025 answers"),
        (
            {"input_ids": [1, VOCAB]},
            "input_ids: 300 is no token id; they are 0 to 299.",
        ),
        ({"input_ids": [[1], [2, -1]]}, "input_ids: -1"),
        ({"input_ids": [1, 2.5]}, "input_ids: 2.5"),
        ({"input_ids": [1, "a"]}, "input_ids: 'a'"),
        ({"input_ids": [True]}, "input_ids: True"),
        ({"top_logprobs_num": 1 << 40}, "top_logprobs: 1099511627776 is not from 0"),
        ({"top_logprobs_num": [1, -1]}, "top_logprobs: -1"),
        ({"priority": 1 << 40}, "priority: 1099511627776 has more than 32 bits"),
    ],
)
def test_what_is_out_of_range_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_request(adapted(**fields), VOCAB)
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling_params": None, "input_ids": None},
        {"sampling_params": {"top_k": -1, "temperature": 0, "n": 1024, "stop": ["x"]}},
        {"sampling_params": {"stop_token_ids": {1, 2}, "logit_bias": {"5": -100.0}}},
        {"input_ids": [0, VOCAB - 1]},
        {"input_ids": [[], [1]]},
        {"top_logprobs_num": [0, VOCAB], "logprob_start_len": [-1, 0]},
    ],
)
def test_what_is_within_it_is_let_through(fields: dict[str, Any]) -> None:
    check_request(adapted(**fields), VOCAB)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ud83d"])
def test_half_a_character_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        check_text({"messages": [{"content": text}]})


def test_whole_characters_are_not() -> None:
    check_text({"messages": [{"content": "\U0001f600 \u00e9"}]})
