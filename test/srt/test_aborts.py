"""Requests that somebody else aborts are sent again, and are never taken for answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from batches import client, jsonl, line, results, submit, wait
from prompts import questions
from servers import Server

# Attempts of a line by default.
MOST = 3
NUM_LINES = 40
LONG = {"max_tokens": 400, "ignore_eos": True}


def abort_all(server: Server) -> None:
    answer = httpx.post(f"{server.url}/abort_request", json={"abort_all": True})
    assert answer.status_code == 200


@contextmanager
def aborting_without_end(server: Server) -> Iterator[None]:
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.1):
            abort_all(server)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def lines() -> list[dict[str, Any]]:
    """Chats, several choices, several prompts: what one abort can leave half done."""
    found = []
    for i, question in enumerate(questions(NUM_LINES)):
        body: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
        if i % 4 == 1:
            body["n"] = 2
        found.append(line(f"line-{i}", {**body, **LONG}))
    return found


def contents(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        item["custom_id"]: [
            (choice["message"]["content"], choice["finish_reason"])
            for choice in item["response"]["body"]["choices"]
        ]
        for item in found
    }


def test_lines_that_are_aborted_get_the_answers_of_an_undisturbed_run(
    offline_server: Server,
) -> None:
    api = client(offline_server.url)
    undisturbed = wait(api, submit(api, jsonl(lines())).id)
    expected = contents(results(api, undisturbed.output_file_id))
    assert len(expected) == NUM_LINES

    disturbed = submit(api, jsonl(lines()))
    for _ in range(MOST - 1):
        offline_server.until_busy()
        abort_all(offline_server)
    batch = wait(api, disturbed.id)
    assert batch.error_file_id is None
    assert contents(results(api, batch.output_file_id)) == expected


def test_lines_that_are_always_aborted_are_errors(offline_server: Server) -> None:
    api = client(offline_server.url)
    # An abort may come half a second late, where the server collects garbage.
    longer = LONG | {"max_tokens": 600}
    content = jsonl(
        line(
            f"line-{i}", {"prompt": prompt, "n": 1 + i % 2, **longer}, "/v1/completions"
        )
        for i, prompt in enumerate(["One", ["Two", "Three"], "Four"] * 4)
    )
    with aborting_without_end(offline_server):
        batch = wait(api, submit(api, content, "/v1/completions").id)
    assert batch.status == "completed"
    found = results(api, batch.error_file_id)
    assert len(found) == 12
    assert batch.output_file_id is None
    for item in found:
        assert item["response"]["status_code"] == 503
        error = item["response"]["body"]["error"]
        assert error["code"] == "request_aborted"
        assert error["type"] == "server_error"


def wave(server: Server, requests: list[Any]) -> dict[int, dict[str, Any]]:
    answer = httpx.post(
        f"{server.url}/offline_batch/wave", json={"requests": requests}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    found = [json.loads(each) for each in answer.text.splitlines()]
    return {each["index"]: each for each in found}


# So many tokens that they run while they are aborted, also on a fast machine.
GREEDY = {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}
CALLS = [{"text": f"Call {i}", "sampling_params": GREEDY} for i in range(12)]


def test_calls_of_programs_that_are_aborted_are_sent_again(
    offline_server: Server,
) -> None:
    expected = wave(offline_server, CALLS)
    found: dict[int, Any] = {}
    thread = threading.Thread(target=lambda: found.update(wave(offline_server, CALLS)))
    thread.start()
    offline_server.until_busy()
    abort_all(offline_server)
    thread.join()
    texts = [
        {i: (each["status_code"], each["body"].get("text")) for i, each in some.items()}
        for some in (found, expected)
    ]
    assert texts[0] == texts[1]


def test_calls_that_are_always_aborted_are_errors(offline_server: Server) -> None:
    with aborting_without_end(offline_server):
        found = wave(offline_server, CALLS)
    assert len(found) == len(CALLS)
    assert {each["status_code"] for each in found.values()} == {503}


def test_a_refused_prompt_is_the_lines_own_error(offline_server: Server) -> None:
    before = time.monotonic()
    found = wave(offline_server, [{"input_ids": [5] * 30_000}])
    assert found[0]["status_code"] == 400
    assert time.monotonic() - before < 1  # no pause before a second attempt
