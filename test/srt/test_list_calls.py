"""Calls of SGLang's own API that carry several prompts: planned, and else unchanged."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prompts import MAX_TOKENS, Case
from servers import Server

GREEDY = {"max_new_tokens": MAX_TOKENS, "temperature": 0}
PLANNED = re.compile(r"Job (list_[0-9a-f]+): (\d+) requests, .* order ")


@pytest.fixture
def planned(offline_server: Server) -> Iterator[Any]:
    """The sizes of the lists planned since the test began."""
    start = len(PLANNED.findall(offline_server.log))
    yield lambda: [int(n) for _, n in PLANNED.findall(offline_server.log)[start:]]


def generate(server: Server, **body: Any) -> Any:
    return post(server, "/generate", body).raise_for_status().json()


def post(server: Server, path: str, body: Any, timeout: float = 120.0) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=timeout)


def test_the_answers_are_the_models_in_the_order_of_the_list(
    offline_server: Server, cases: list[Case], planned: Any
) -> None:
    answers = generate(
        offline_server, text=[case.prompt for case in cases], sampling_params=GREEDY
    )
    assert [a["output_ids"] for a in answers] == [case.output_ids for case in cases]
    assert planned() == [len(cases)]
    ids = [answer["meta_info"]["id"] for answer in answers]
    assert len(set(ids)) == len(cases)


def test_ids_of_the_client_are_kept(
    offline_server: Server, cases: list[Case], planned: Any
) -> None:
    ids = [f"mine-{i}-{id(cases)}" for i in range(8)]
    body = {"text": [case.prompt for case in cases[:8]], "rid": ids}
    for _ in range(2):  # free again afterwards
        answers = generate(offline_server, **body, sampling_params=GREEDY)
        assert [answer["meta_info"]["id"] for answer in answers] == ids
        assert answers[3]["output_ids"] == cases[3].output_ids
    assert planned() == [8, 8]


def test_samples_of_prompts(
    offline_server: Server, cases: list[Case], planned: Any
) -> None:
    two = [case.prompt for case in cases[:2]]
    answers = generate(offline_server, text=two, sampling_params={**GREEDY, "n": 3})
    expected = [case.output_ids for case in cases[:2] for _ in range(3)]
    assert [answer["output_ids"] for answer in answers] == expected
    one = generate(offline_server, text=two[0], sampling_params={**GREEDY, "n": 4})
    assert [answer["output_ids"] for answer in one] == [expected[0]] * 4
    assert planned() == [6, 4]
    # Samples share their prompt: the first computes it.
    cached = [answer["meta_info"]["cached_tokens"] for answer in one]
    assert min(cached[1:]) >= one[0]["meta_info"]["prompt_tokens"] - 1


def test_a_stream_has_the_items_as_they_come(
    offline_server: Server, cases: list[Case], planned: Any
) -> None:
    body = {
        "text": [case.prompt for case in cases[:6]],
        "sampling_params": GREEDY,
        "stream": True,
    }
    chunks = [
        json.loads(line[6:])
        for line in post(offline_server, "/generate", body).text.splitlines()
        if line.startswith("data: {")
    ]
    last = {chunk["index"]: chunk for chunk in chunks}
    assert [last[i]["output_ids"] for i in range(6)] == [
        case.output_ids for case in cases[:6]
    ]
    assert len(chunks) > 6
    assert planned() == [6]


def test_a_list_of_completions(
    offline_server: Server, cases: list[Case], planned: Any
) -> None:
    body = {
        "model": "demo",
        "prompt": [case.prompt for case in cases[:5]],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    choices = post(offline_server, "/v1/completions", body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(5))
    body["prompt"] = cases[4].prompt
    alone = post(offline_server, "/v1/completions", body).json()
    assert choices[4]["text"] == alone["choices"][0]["text"]
    assert planned() == [5]


def test_one_bad_prompt_is_sglangs_error(offline_server: Server, planned: Any) -> None:
    refused = post(offline_server, "/generate", {"text": ["a", ""]})
    assert refused.status_code == 400
    refused = post(offline_server, "/generate", {"input_ids": [[1], [1] * 50_000]})
    assert refused.status_code == 400
    assert "longer than" in refused.text
    assert planned() == []
    # Nothing is left, and the same list without it is answered.
    assert len(generate(offline_server, text=["a", "b"], sampling_params=GREEDY)) == 2


def test_an_abort_ends_those_that_wait_and_those_that_run(
    offline_server: Server, cases: list[Case]
) -> None:
    ids = [f"aborted-{i}-{id(cases)}" for i in range(40)]
    answers: list[Any] = []
    long = {"max_new_tokens": 1200, "temperature": 0, "ignore_eos": True}

    def call() -> None:
        answers.extend(
            generate(offline_server, text=["long"] * 40, rid=ids, sampling_params=long)
        )

    thread = threading.Thread(target=call)
    thread.start()
    offline_server.until_busy()
    for each in ids[:39]:
        post(offline_server, "/abort_request", {"rid": each})
    thread.join(120)
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons == ["abort"] * 39 + ["length"]


def num_jobs(server: Server) -> int:
    [state] = httpx.get(f"{server.url}/server_info").json()["internal_states"]
    return int(state["offline_batch"]["jobs"])


def test_a_client_that_leaves_takes_its_list_along(offline_server: Server) -> None:
    body = {
        "text": ["tell me more"] * 30,
        "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True},
    }
    with pytest.raises(httpx.ReadTimeout):
        post(offline_server, "/generate", body, timeout=1.5)
    deadline = time.monotonic() + 60
    while num_jobs(offline_server):
        assert time.monotonic() < deadline
        time.sleep(0.5)
