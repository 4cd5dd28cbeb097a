"""Values that end SGLang's processes are refused for their request alone."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import uuid
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.io_struct import (
    EmbeddingReqInput,
    GenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_batch.request import (
    attempt_request_id,
    engine_request_id,
    named_job_id,
    part_request_id,
)
from sglang_batch.srt.engine.checks.pattern_checks import check_grammar, check_pattern
from sglang_batch.srt.engine.checks.request_checks import (
    check_line,
    check_message,
    check_request,
    normalize,
)
from sglang_batch.srt.engine.checks.stop_rule_checks import has_rules, settle_rules
from sglang_batch.srt.engine.checks.value_checks import (
    REQUEST_FIELDS,
    SAMPLING_FIELDS,
    SCHEDULER_FIELDS,
    FieldError,
    check_text,
)
from sglang_batch.srt.engine.request_ids import (
    OUR_IDS,
    is_of_a_job,
    may_be_ours,
    set_rid,
)
from sglang_batch.srt.engine.sglang_engine import SGLangEngine

VOCAB = 300


# SGLang's types -----------------------------------------------------------------------


def names(*kinds: Any) -> set[str]:
    found: set[str] = set()
    for kind in kinds:
        of_class = dataclasses.is_dataclass(kind)
        fields = dataclasses.fields(kind) if of_class else msgspec.structs.fields(kind)
        found |= {each.name for each in fields}
    return found


def test_every_field_of_sglang_is_decided_once() -> None:
    messages = names(TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)
    assert set(SAMPLING_FIELDS) == names(SamplingParams)
    assert set(SCHEDULER_FIELDS) == messages
    decided = set(SCHEDULER_FIELDS) | set(REQUEST_FIELDS)
    assert decided == names(GenerateReqInput, EmbeddingReqInput) | messages


# As the client sent it ----------------------------------------------------------------


def request(**fields: Any) -> Any:
    return GenerateReqInput(**{"text": "x", **fields})


# The random number of a job's id.
JOB = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("sampling", "field", "code"),
    [
        ({"top_k": 1 << 70}, "top_k", "integer_above_max_value"),
        ({"temperature": math.inf}, "temperature", "decimal_above_max_value"),
        ({"temperature": math.nan}, "temperature", "decimal_below_min_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"logit_bias": {"5": 1e39}}, "logit_bias", "decimal_above_max_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
        ([{}, {"stop_token_ids": [1 << 40]}], "stop_token_ids", "invalid_value"),
        ({"n": 1025}, "n", "integer_above_max_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"max_new_tokens": 2.5}, "max_new_tokens", "invalid_type"),
        ({"max_new_tokens": [5]}, "max_new_tokens", "invalid_type"),
        ({"max_new_tokens": True}, "max_new_tokens", "invalid_type"),
        (
            {"repetition_penalty": 1e-40},
            "repetition_penalty",
            "decimal_below_min_value",
        ),
        ({"stop": [1]}, "stop", "invalid_type"),
        ({"stop_regex": ["(a+)+"]}, "stop_regex", "invalid_value"),
        ({"regex": "(" * 5000 + ")" * 5000}, "regex", "invalid_value"),
        ({"custom_params": {"a": 1 << 70}}, "custom_params", "invalid_value"),
        ({"stop_strs": ["x"]}, "stop_strs", "invalid_value"),
        ({"warmth": 1}, "warmth", "unknown_parameter"),
        ("hot", "sampling_params", "invalid_value"),
    ],
)
def test_sampling_that_cannot_be_is_named(sampling: Any, field: str, code: str) -> None:
    with pytest.raises(FieldError) as raised:
        check_request(request(sampling_params=sampling))
    assert (raised.value.field, raised.value.code) == (field, code)


@pytest.mark.parametrize(
    "fields",
    [
        {"http_worker_ipc": "ipc:///tmp/x"},
        {"need_wait_for_mm_inputs": True},
        {"lora_id": "x"},
        {"positional_embed_overrides": [[1]]},
        {"received_time": math.inf},
        {"input_ids": [5], "text": ["x"]},
        {"rid": 5},
        {"rid": "b"},  # SGLang aborts by the beginning of an id
        {"rid": "batch_1234"},
        {"rid": f"batch_{JOB}"},
        {"rid": f"batch_{JOB}-00000007.try000001.000002"},
        {"rid": ["mine", f"wave_{JOB}-00000007"]},
    ],
)
def test_fields_that_are_not_for_clients_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as raised:
        check_request(request(**fields))
    assert raised.value.field == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"rid": "mine"},
        # Of other forms than ours, so none of ours begins with them.
        {"rid": "batch_of_tuesday"},
        {"rid": "batch_1-00000007"},
        {"rid": f"list_{JOB}0"},
        {"rid": ["lists", "rollout_12th"], "text": ["x", "y"]},
        {"sampling_params": {"top_k": -1, "temperature": 0, "n": 1024, "stop": ["x"]}},
        {"sampling_params": {"stop_token_ids": {1, 2}, "logit_bias": {"5": -100.0}}},
        {"sampling_params": {"stop_regex": r"\d+\s*EUR|USD", "regex": "[a-z]{1,20}"}},
        {"sampling_params": {"max_new_tokens": None, "sampling_seed": 1 << 60}},
        {"sampling_params": [{"n": 1}, {"n": 1}], "text": ["x", "y"]},
    ],
)
def test_what_sglang_can_do_is_let_through(fields: dict[str, Any]) -> None:
    check_request(request(**fields))


@pytest.mark.parametrize("begin", OUR_IDS)
def test_ids_of_lines_are_let_through_and_are_ours(begin: str) -> None:
    for rid in (f"{begin}{JOB}-00000007", f"{begin}{JOB}-00000007.try000001.000003"):
        line = request()
        set_rid(line, rid)
        check_request(line)
        assert is_of_a_job(rid)
        for end in range(len(rid) + 1):  # SGLang would abort it with each of these
            assert may_be_ours(rid[:end])
    for rid in (f"{begin}1-00000007", f"{begin}x", f"x{begin}{JOB}-00000007"):
        assert not is_of_a_job(rid)
        assert not may_be_ours(rid)


@pytest.mark.parametrize(
    ("prompts", "samples", "is_job"), [(1, 1, False), (2, 1, True), (1, 2, True)]
)
def test_several_answers_of_a_call_are_a_job(
    prompts: int, samples: int, is_job: bool
) -> None:
    """One is a single call, also in a list."""
    params = {"n": samples}
    line = GenerateReqInput(input_ids=[[1, 2]] * prompts, sampling_params=params)
    normalize(vars(GenerateReqInput)["normalize_batch_and_arguments"], line)
    assert {is_of_a_job(rid) for rid in line.rid} == {is_job}


@pytest.mark.parametrize(
    "name", ["", "/data/answers.jsonl", "s3://bucket/job [1]", "名"]
)
def test_lines_of_named_jobs_are_known_by_their_ids(name: str) -> None:
    rid = engine_request_id(named_job_id(name), 7)
    assert is_of_a_job(rid)
    assert is_of_a_job(part_request_id(attempt_request_id(rid, 2), 3))
    # In a bucket, and as a prefill server gets it.
    in_bucket = engine_request_id(f"{named_job_id(name)}-000012", 7)
    assert is_of_a_job(in_bucket)
    assert is_of_a_job(f"{uuid.uuid4().hex[:12]}.{in_bucket}")


@pytest.mark.parametrize(
    "job_id",
    ["", "job", "batch_small", f"batch_{JOB[:16]}", f"x.batch_{JOB}", f"batch_{JOB}-1"],
)
def test_an_engine_refuses_jobs_whose_lines_would_be_taken_for_calls(
    job_id: str,
) -> None:
    assert not is_of_a_job(engine_request_id(job_id, 7))
    # The id is looked at before anything of the engine is used.
    opening = SGLangEngine.open_job(SimpleNamespace(), job_id, [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"job id '{job_id}'"):
        asyncio.run(opening)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_params": [{}]},
        {"rid": ["a"]},
        {"text": ["x", "y"], "lora_path": ["a"]},
        {"text": ["x"] * 3, "lora_path": ["a"] * 2, "sampling_params": {"n": 2}},
        {"text": ["x", "y"], "logprob_start_len": [0]},
        {"text": None, "input_embeds": []},
        {"text": ["x"] * 70, "sampling_params": {"n": 1000}},
    ],
)
def test_lists_that_do_not_fit_are_the_requests_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        normalize(
            vars(GenerateReqInput)["normalize_batch_and_arguments"], request(**fields)
        )


def test_parts_are_made_anew_after_the_check() -> None:
    """SGLang adds values to the request, such as an adapter's id, after it."""
    several = request(text=["x", "y"])
    normalize(vars(GenerateReqInput)["normalize_batch_and_arguments"], several)
    several.session_id = "later"
    assert several[0].session_id == "later"


# The message to the scheduler ---------------------------------------------------------


def message(**fields: Any) -> Any:
    params = SamplingParams(**fields.pop("sampling", {}))
    values: dict[str, Any] = dict.fromkeys(names(TokenizedGenerateReqInput))
    values |= {
        each.name: each.default
        for each in msgspec.structs.fields(TokenizedGenerateReqInput)
        if each.default is not msgspec.NODEFAULT
    }
    flags = dict.fromkeys(("return_logprob", "stream"), False)
    return TokenizedGenerateReqInput(
        **{
            **values,
            **flags,
            "input_ids": array("q", [1, 2, 3]),
            "sampling_params": params,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            **fields,
        }
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"logprob_start_len": -77},
        {"logprob_start_len": None, "top_logprobs_num": VOCAB + 1},
        {"top_logprobs_num": -1},
        {"top_logprobs_num": [1]},
        {"token_ids_logprob": [True]},
        {"token_ids_logprob": [VOCAB]},
        {"input_ids": array("q", [VOCAB])},
        {"input_ids": array("q", [])},
        {"token_indices_to_pool": [3]},
        {"multi_item_delimiter_indices": [1, 1]},
        {"priority": 1 << 40},
        {"bootstrap_port": 70_000},
        {"extra_key": 5},
        {"input_text": "\ud800"},
        {"return_logprob": "yes"},
        {"session_id": ["x"]},
        {"sampling": {"stop_token_ids": range(VOCAB), "min_new_tokens": 2}},
    ],
)
def test_what_would_end_the_scheduler_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FieldError):
        check_message(message(**fields), VOCAB)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprob_start_len": 3, "return_logprob": True, "top_logprobs_num": VOCAB},
        {"token_ids_logprob": [0, VOCAB - 1], "priority": -5, "rid": "a"},
        {"token_indices_to_pool": [0, 2], "extra_key": "x"},
    ],
)
def test_messages_that_it_can_read_are_let_through(fields: dict[str, Any]) -> None:
    check_message(message(**fields), VOCAB)


# Values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [([1, VOCAB], "300"), ([[1], [2, -1]], "-1"), ([1, 2.5], "2.5"), ([True], "True")],
)
def test_ids_beyond_the_vocabulary_are_named(ids: Any, wrong: str) -> None:
    with pytest.raises(FieldError, match=f"^input_ids: {wrong} is not a token id; ids"):
        check_line(request(text=None, input_ids=ids), VOCAB)


def test_a_checked_line_is_not_checked_again_unless_it_is_sent_again() -> None:
    line = request(text="x")
    check_line(line, VOCAB)
    line.max_thinking_tokens = "odd"  # after the check, to see it
    normalize(lambda adapted: None, line)
    with pytest.raises(FieldError, match=r"^max_thinking_tokens"):
        normalize(lambda adapted: None, line)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a*)*b",
        "(a|aa)+$",
        ".*.*.*.*x",
        "a?" * 30 + "a" * 30,
        "[",
        "((a?){30})",
    ],
)
def test_patterns_that_may_take_for_ever_are_refused(pattern: str) -> None:
    assert check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["", "END", r"\n\n+", r"(\d{3}-){2}\d+", "(?:yes|no)", r"Q\d+:\s*$", "(?i)x"],
)
def test_other_patterns_are_not(pattern: str) -> None:
    assert check_pattern(pattern) is None


@pytest.mark.parametrize("grammar", ["(" * 101, "x" * 300_000, "a{1,99999}", "[[" * 80])
def test_grammars_that_are_too_large_are_refused(grammar: str) -> None:
    assert check_grammar(grammar)


@pytest.mark.parametrize("grammar", ['{"type": "object"}', "a{1,500}", 'root ::= "a"'])
def test_other_grammars_are_not(grammar: str) -> None:
    assert check_grammar(grammar) is None


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ud83d"])
def test_half_a_character_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        check_text({"messages": [{"content": text}]})


def test_whole_characters_are_not() -> None:
    check_text({"messages": [{"content": "\U0001f600 \u00e9"}]})


# Stop rules ---------------------------------------------------------------------------


def test_stop_rules_become_text_and_other_custom_params_stay() -> None:
    custom = {"stop_rules": {"json": True, "repetition": {}}, "mood": "calm"}
    request = GenerateReqInput(
        text=["a", "b"], sampling_params=[{"custom_params": custom}, {"n": 1}]
    )
    settle_rules(request)
    first, second = request.sampling_params
    text = first["custom_params"]["stop_rules"]
    assert text.startswith('{"json": true, "repetition": {"max_pattern_size": 64')
    assert first["custom_params"]["mood"] == "calm"
    assert (has_rules(first), has_rules(second)) == (True, False)
    settle_rules(request)
    assert first["custom_params"]["stop_rules"] == text


@pytest.mark.parametrize(
    "fields", [{"custom_params": {"stop_rules": 5}}, {"beam_width": 2}]
)
def test_stop_rules_that_cannot_be_used_are_refused(fields: dict[str, Any]) -> None:
    params = {"custom_params": {"stop_rules": {"json": True}}, **fields}
    with pytest.raises(FieldError, match=r"^stop_rules: ") as caught:
        settle_rules(GenerateReqInput(text="a", sampling_params=params))
    assert caught.value.param == "body.stop_rules"
