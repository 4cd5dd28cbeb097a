"""Requests that must have equal answers, and their answers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from builders import CHAT, Answers, make_body, make_output
from hypothesis import given
from hypothesis import strategies as st

from sglang_batch.batch_api.equal_requests import find_equal, request_key
from sglang_batch.batch_api.lines import result_line
from sglang_batch.job.bucketed_job import prompt_text
from sglang_batch.request import BatchRequestInput, RequestOutput

EMBEDDINGS = "/v1/embeddings"
TEXT_URLS = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")


def request(
    index: int = 0, url: str = CHAT, text: str = "hello", **fields: Any
) -> BatchRequestInput:
    body = json.dumps(make_body(text, **fields)).encode()
    return BatchRequestInput(index, f"r{index}", url, body)


def raw(body: str, url: str = CHAT) -> bytes | None:
    return request_key(BatchRequestInput(0, "a", url, body.encode()))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.0, "top_p": 0.5, "n": 3},
        {"top_k": 1},
        {"temperature": 0, "seed": 7},
    ],
)
@pytest.mark.parametrize("url", TEXT_URLS)
def test_greedy_requests_have_a_key(url: str, fields: dict[str, Any]) -> None:
    key = request_key(request(url=url, **fields))
    assert key is not None and len(key) == 16
    assert request_key(request(1, url=url, rid="x", **fields)) == key
    # A response has its user in it.
    named = request_key(request(1, url=url, user="ann", **fields))
    assert (named == key) == (url != "/v1/responses")
    fields = {**fields, "url": url}
    assert request_key(request(text="other", **fields)) != key
    assert request_key(request(max_tokens=3, **fields)) != key


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0},
        {"temperature": None},
        {"temperature": False},
        {"temperature": "0"},
        {"top_k": True},
        {"top_k": 5},
        {"seed": None},
        {"temperature": 0.7, "metadata": {"temperature": "0"}},
        # SGLang draws from a seed only with a flag.
        {"seed": 7},
        {"temperature": 1.0, "seed": 7, "n": 4},
        {"temperature": 1.0, "sampling_seed": 7},
        # Where other endpoints have them.
        {"temperature": 1.0, "sampling_params": {"temperature": 0}},
        {"sampling_params": {"top_k": 1}},
        {"extra_body": {"temperature": 0}},
    ],
)
@pytest.mark.parametrize("url", TEXT_URLS)
def test_sampled_requests_have_none(url: str, fields: dict[str, Any]) -> None:
    assert request_key(request(url=url, **fields)) is None
    assert request_key(request(url="/v1/unknown", **fields)) is None


def test_a_transcription_has_no_top_k() -> None:
    url = "/v1/audio/transcriptions"
    assert raw('{"file_url": "a", "temperature": 0}', url) is not None
    assert raw('{"file_url": "a", "temperature": 1, "top_k": 1}', url) is None


def test_embeddings_need_no_sampling() -> None:
    assert raw('{"input": "a"}', EMBEDDINGS) == raw('{"input":"a"}', EMBEDDINGS)
    assert raw('{"input": "a"}', EMBEDDINGS) != raw('{"input": "a"}', "/v1/classify")
    assert raw('{"input": "a"}') is None


def test_the_order_of_keys_counts_where_it_is_in_the_prompt() -> None:
    assert raw('{"temperature": 0, "prompt": "a"}') == raw(
        '{"prompt": "a", "temperature": 0}'
    )
    tools = '{"temperature": 0, "tools": [{"a": %s}]}'
    assert raw(tools % '{"x": 1, "y": 2}') != raw(tools % '{"y": 2, "x": 1}')


def test_a_call_of_a_program_has_its_sampling_in_an_object() -> None:
    greedy = '{"text": "a", "sampling_params": {"temperature": 0}}'
    assert raw(greedy, "/generate") == raw(greedy, "/generate") is not None
    named = '{"text": "a", "rid": "r", "sampling_params": {"temperature": 0}}'
    assert raw(named, "/generate") == raw(greedy, "/generate")
    body = '{"text": "a", "temperature": 0, "sampling_params": %s}'
    for params in (
        *('{"temperature": 1}', "null", "[]", "{}", '"0"', '[{"temperature": 0}, {}]'),
        *('{"sampling_seed": 1}', '{"seed": 1}', "[0]"),
    ):
        assert raw(body % params, "/generate") is None
    assert raw('{"text": "a", "temperature": 0}', "/generate") is None
    several = body % '[{"temperature": 0}, {"top_k": 1}]'
    assert raw(several, "/generate") is not None


def test_a_body_of_any_depth_and_with_any_number_has_a_key() -> None:
    deep = "[" * 900 + "]" * 900
    assert raw('{"temperature": 0, "x": ' + deep + "}") is not None
    long = '{"temperature": 0, "prompt": "a", "x": %d}'
    assert raw(long % (10**30)) != raw(long % (10**30 + 1))
    # Names and values do not run into each other.
    assert raw('{"temperature": 0, "ab": 1}') != raw('{"temperature": 0, "a": "b1"}')


def test_bytes_that_are_no_text_and_any_depth_end_nothing() -> None:
    bodies = [b'{"top_k": 1, "x": %b}' % (b"[" * 99_999), b'{"top_k": 1, "\xff": 1}']
    for body in bodies:
        made = BatchRequestInput(0, "a", CHAT, body)
        assert request_key(made) is None
        assert prompt_text(made) == b""


@pytest.mark.parametrize("body", ["[]", "{", '{"temperature": 0, "x": NaN}', '"top_k"'])
def test_what_cannot_be_read_is_equal_to_nothing(body: str) -> None:
    assert raw(body) is None
    assert raw(body, EMBEDDINGS) is None


def test_each_gets_the_answer_of_the_first() -> None:
    texts = ["a", "b", "a", "c", "b", "a"]
    requests = [
        request(i, text=text, temperature=1 if text == "c" else 0)
        for i, text in enumerate(texts)
    ]
    equal = find_equal(requests, range(1, 6))
    assert equal.todo.tolist() == [1, 2, 3]
    assert equal.num_merged == 2
    answers = Answers()
    sink = equal.sharing(answers)
    for number in equal.todo.tolist():
        sink(requests[number], make_output(body={"answer": texts[number]}))
    assert list(answers) == ["r1", "r4", "r2", "r5", "r3"]
    assert {
        name: out.merged_with for name, out in answers.items() if out.merged_with
    } == {
        "r4": "r1",
        "r5": "r2",
    }
    assert answers["r5"].body == answers["r2"].body
    line = json.loads(result_line(requests[5], "batch_1", answers["r5"]))
    assert (line["custom_id"], line["merged_with"]) == ("r5", "r2")
    assert line["id"].endswith("00000005")
    assert "merged_with" not in json.loads(
        result_line(requests[2], "batch_1", answers["r2"])
    )


def test_some_come_before_all_others() -> None:
    requests = [request(i, temperature=0) for i in range(4)]
    equal = find_equal(requests, range(4), first={2, 9})
    assert equal.todo.tolist() == [2]
    assert equal.merged[2].tolist() == [0, 1, 3]


def test_none_are_merged_if_that_is_off() -> None:
    requests = [request(i, temperature=0) for i in range(4)]
    equal = find_equal(requests, range(4), "off")
    assert equal.todo.tolist() == [0, 1, 2, 3] and not equal.num_merged


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([0, 1])), max_size=30),
    st.data(),
)
def test_any_job_has_one_of_each(
    kinds: list[tuple[str, int]], data: st.DataObject
) -> None:
    requests = [
        request(i, text=text, temperature=temperature)
        for i, (text, temperature) in enumerate(kinds)
    ]
    numbers = list(range(len(kinds)))
    todo = sorted(data.draw(st.sets(st.sampled_from(numbers)))) if numbers else []
    equal = find_equal(requests, todo)
    expected: dict[Any, int] = {}
    for number in todo:
        text, temperature = kinds[number]
        expected.setdefault((text, number if temperature else None), number)
    assert equal.todo.tolist() == sorted(expected.values())
    assert np.all(np.diff(equal.todo) > 0)
    answers = Answers()

    def sink(request: BatchRequestInput, output: RequestOutput) -> None:
        answers(request, output)
        text, temperature = kinds[request.index]
        if output.merged_with is not None:
            assert not temperature and output.body == f'"{text}"'.encode()

    share = equal.sharing(sink)
    for number in equal.todo.tolist():
        share(requests[number], make_output(body=kinds[number][0]))
    assert sorted(answers) == sorted(f"r{number}" for number in todo)
