"""What a call may say, what its samples are asked, and what their answers become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_batch.errors import InputError
from sglang_batch.request import RequestOutput
from sglang_batch.rollout.rollout_call import (
    RolloutSample,
    body_of,
    expected_len,
    parse_call,
    result_of,
)

PROMPT = {"input_ids": [1, 2]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Invalid value for 'groups': Field required, not {}."),
        (
            {"groups": [PROMPT], "n": 4, "k": 5},
            "groups.0: k=5 is above n=4, the samples of the group.",
        ),
        (
            {"groups": [PROMPT, {**PROMPT, "n": -1}]},
            "Invalid value for 'groups.1.n': Input should be greater than or equal to 1, "
            "not -1.",
        ),
        (
            {"groups": [PROMPT], "share": 1.5},
            "Invalid value for 'share': Input should be less than or equal to 1, not 1.5.",
        ),
        (
            {"groups": [{**PROMPT, "grup": 1}]},
            "Invalid value for 'groups.0.grup': Extra inputs are not permitted, not 1.",
        ),
        (
            {"groups": [{**PROMPT, "text": "x"}]},
            "groups.0: give the prompt either as input_ids or as text.",
        ),
        (
            {"groups": [{"text": "x", "samples": [{"output_ids": [1]}]}]},
            "groups.0: a sample continues after output_ids, so give the prompt as "
            "input_ids, which the earlier answer has.",
        ),
        (
            {"groups": [{**PROMPT, "samples": [{}, {}]}]},
            "groups.0: 2 samples are above n=1.",
        ),
        (
            {"groups": [PROMPT], "sampling_params": {"n": 2}},
            "groups.0: sampling_params have 'n'; give 'n' next to the prompt.",
        ),
        (
            {
                "groups": [{**PROMPT, "samples": [{"output_ids": [5, 6]}]}],
                "sampling_params": {"max_new_tokens": 2},
            },
            "groups.0.samples.0: 2 output_ids leave nothing of max_new_tokens=2.",
        ),
        (
            {
                "groups": [{**PROMPT, "samples": [{"output_ids": [5]}]}],
                "sampling_params": {"regex": "a*"},
            },
            "groups.0.samples.0: a sample with 'regex' cannot continue; leave out its "
            "output_ids.",
        ),
        (
            {"groups": [{"input_ids": [True]}]},
            "Invalid value for 'groups.0.input_ids.0': Input should be a valid integer, "
            "not True.",
        ),
        (
            {
                "groups": [
                    {**PROMPT, "samples": [{"output_ids": [1], "output_logprobs": []}]}
                ]
            },
            "groups.0.samples.0: 0 output_logprobs are not those of 1 output_ids.",
        ),
    ],
)
def test_a_bad_call_is_refused_in_one_sentence(
    body: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        parse_call(body)
    assert str(refused.value) == message


def test_sampling_parameters_are_the_sample_s_then_the_group_s_then_the_call_s() -> (
    None
):
    call = parse_call(
        {
            "groups": [
                {
                    **PROMPT,
                    "sampling_params": {"top_p": 0.5},
                    "samples": [{}, {"sampling_params": {"top_p": 0.1}}],
                }
            ],
            "n": 3,
            "sampling_params": {"top_p": 1.0, "sampling_seed": 7},
        }
    )
    params = [json.loads(body_of(call, 0, i))["sampling_params"] for i in range(3)]
    assert [each["top_p"] for each in params] == [0.5, 0.1, 0.5]
    assert [each["sampling_seed"] for each in params] == [7, 8, 9]
    # After the last seed comes 0: a sample is not refused for a seed that nobody sent.
    last = call.model_copy(update={"sampling_params": {"sampling_seed": 2**63 - 2}})
    seeds = [last.sampling_of(0, nth)["sampling_seed"] for nth in range(3)]
    assert seeds == [2**63 - 2, 2**63 - 1, 0]


def test_earlier_tokens_are_a_part_of_the_prompt_and_count_against_the_limit() -> None:
    earlier = {"output_ids": [7, 8, 9], "sampling_params": {"max_new_tokens": 10}}
    group = {**PROMPT, "samples": [earlier], "expected_tokens": 8.0}
    call = parse_call({"groups": [group], "n": 2})
    body = json.loads(body_of(call, 0, 0))
    assert body["input_ids"] == [1, 2, 7, 8, 9]
    assert body["sampling_params"] == {"max_new_tokens": 7}
    assert [expected_len(call, 0, i) for i in range(2)] == [5, 8]


def answer(**meta: Any) -> RequestOutput:
    body = {
        "text": "cd",
        "output_ids": [12, 13],
        "meta_info": {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, 12, None], [-1.0, 13, None]],
            "weight_version": "2",
            **meta,
        },
    }
    return RequestOutput(200, "", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("version", "spans"),
    [
        ("1", [("1", 0, 1), ("2", 1, 3)]),
        ("2", [("2", 0, 3)]),
    ],
)
def test_a_sample_that_continues_has_all_tokens_and_their_versions(
    version: str, spans: list[tuple[str, int, int]]
) -> None:
    earlier = RolloutSample(
        output_ids=[11],
        output_logprobs=[-2.0],
        weight_versions=[{"version": version, "start": 0, "end": 1}],
        text="b",
    )
    found, _ = result_of(0, earlier, answer())
    assert (found.status, found.text) == ("finished", "bcd")
    assert found.output_ids == [11, 12, 13]
    assert found.output_logprobs == [-2.0, -0.5, -1.0]
    assert [tuple(each.values()) for each in found.weight_versions] == spans
    assert found.so_far().output_ids == found.output_ids


def test_weights_that_change_within_an_answer_are_told_apart() -> None:
    earlier = RolloutSample(output_ids=[11])
    changing = [
        {"version": "2", "start": 0, "end": 1},
        {"version": "3", "start": 1, "end": 2},
    ]
    found, _ = result_of(0, earlier, answer(weight_versions=changing))
    assert found.output_logprobs is None  # those of the first token are unknown
    assert [tuple(each.values()) for each in found.weight_versions] == [
        ("2", 1, 2),
        ("3", 2, 3),
    ]


def test_a_failed_sample_keeps_its_earlier_tokens() -> None:
    failed = RequestOutput(400, "", b'{"error": {"message": "no"}}')
    found, _ = result_of(3, RolloutSample(output_ids=[4]), failed)
    assert (found.index, found.status, found.output_ids) == (3, "failed", [4])
    assert found.error == {"message": "no"}
