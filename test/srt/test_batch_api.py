"""The batch API on a real server: what goes wrong, and that batches act as online."""

from __future__ import annotations

import time
from typing import Any

import pytest
from batches import client, jsonl, line, results, submit, wait
from servers import Server

QUESTION = {"messages": [{"role": "user", "content": "What is a tuple?"}]}
SHORT = {**QUESTION, "max_tokens": 4}


def volatile_free(body: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from call to call."""
    kept = {k: v for k, v in body.items() if k not in ("id", "created", "usage")}
    kept["usage"] = {
        k: v for k, v in body["usage"].items() if k != "prompt_tokens_details"
    }
    return kept


@pytest.mark.parametrize(
    "wish",
    [
        pytest.param({"n": 3, "temperature": 0.0}, id="n"),
        pytest.param({"logprobs": True, "top_logprobs": 2}, id="logprobs"),
        pytest.param({"stop": ["O", "r"]}, id="stop"),
        pytest.param(
            {
                "frequency_penalty": 1.5,
                "presence_penalty": 0.5,
                "logit_bias": {"65": 9},
            },
            id="sampling",
        ),
        pytest.param(
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "answer",
                        "schema": {
                            "type": "object",
                            "properties": {"yes": {"type": "boolean"}},
                            "required": ["yes"],
                        },
                    },
                }
            },
            id="response_format",
        ),
        pytest.param(
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "look", "parameters": {"type": "object"}},
                    }
                ],
                "tool_choice": "none",
            },
            id="tools",
        ),
        # Of an online answer SGLang sends parts of 50 tokens inside, of a line none.
        pytest.param(
            {"max_tokens": 130, "ignore_eos": True, "logprobs": True},
            id="long",
        ),
    ],
)
def test_a_line_is_answered_as_online(
    offline_server: Server, wish: dict[str, Any]
) -> None:
    api = client(offline_server.url)
    body = {"model": "demo", "temperature": 0, **SHORT, "max_tokens": 16, **wish}
    online = api.post("/chat/completions", body=body, cast_to=object)
    batch = wait(api, submit(api, jsonl([line("only", body)])).id)
    [offline] = results(api, batch.output_file_id)
    assert isinstance(online, dict)
    assert volatile_free(offline["response"]["body"]) == volatile_free(online)


def test_a_bad_line_is_answered_with_an_error_and_the_rest_is_not_lost(
    offline_server: Server,
) -> None:
    api = client(offline_server.url)
    bad = {
        "wrong type": {"messages": "hello"},
        "wrong value": {**SHORT, "temperature": -1},
        "too long": {
            "messages": [{"role": "user", "content": "x" * 3000}],
            "max_tokens": 4,
        },
        "too many wanted": {**QUESTION, "max_tokens": 100_000},
        "bad schema": {**SHORT, "response_format": {"type": "json_schema"}},
        # No token may ever follow: of that, SGLang's sampler dies.
        "dead grammar": {**SHORT, "temperature": 1, "ebnf": "root ::= root"},
        # The only token is the last: SGLang would end the request for its length.
        "dead at once": {**SHORT, "max_tokens": 1, "ebnf": "root ::= root"},
        "same rid": {**SHORT, "rid": "mine"},
        "same rid again": {**SHORT, "rid": "mine"},
    }
    lines = [line(name, body) for name, body in bad.items()]
    lines += [line(f"good {i}", SHORT) for i in range(8)]
    batch = wait(api, submit(api, jsonl(lines)).id)
    assert batch.status == "completed"
    good = {item["custom_id"] for item in results(api, batch.output_file_id)}
    errors = {item["custom_id"]: item for item in results(api, batch.error_file_id)}
    # Ids inside a body are not ours to trust: they collide, and do no harm.
    assert good == {f"good {i}" for i in range(8)} | {"same rid", "same rid again"}
    assert set(errors) == set(bad) - good
    for name in ("dead grammar", "dead at once"):
        dead = errors[name]["response"]["body"]["error"]
        assert "allows no complete text" in dead["message"]
    for item in errors.values():
        assert item["error"] is None
        assert item["response"]["status_code"] == 400
        error = item["response"]["body"]["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert errors["wrong type"]["response"]["body"]["error"]["param"] == (
        "body.messages"
    )
    for name in ("too long", "too many wanted"):
        code = errors[name]["response"]["body"]["error"]["code"]
        assert code == "context_length_exceeded"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (len(good), len(errors))


def test_cancelling_keeps_what_is_finished(offline_server: Server) -> None:
    api = client(offline_server.url)
    total = 600
    lines = [
        line(f"l{i}", {**QUESTION, "seed": i, "max_tokens": 200, "ignore_eos": True})
        for i in range(total)
    ]
    batch = submit(api, jsonl(lines))
    while True:
        batch = api.batches.retrieve(batch.id)
        counts = batch.request_counts
        assert batch.status in ("validating", "in_progress"), batch
        if counts is not None and counts.completed:
            break
        time.sleep(0.02)
    assert api.batches.cancel(batch.id).status == "cancelling"
    batch = wait(api, batch.id)
    assert batch.status == "cancelled"
    done = results(api, batch.output_file_id)
    unrun = results(api, batch.error_file_id)
    assert 0 < len(done) < total
    assert len(done) + len(unrun) == total
    assert {item["error"]["code"] for item in unrun} == {"batch_cancelled"}
    assert batch.request_counts is not None
    assert batch.request_counts.completed == len(done)
    assert batch.request_counts.failed == 0
    # The engine is free again at once.
    again = wait(api, submit(api, jsonl([line("after", SHORT)])).id)
    assert again.request_counts is not None
    assert again.request_counts.completed == 1


def test_online_requests_are_served_beside_a_batch(offline_server: Server) -> None:
    api = client(offline_server.url)
    lines = [
        line(f"l{i}", {**QUESTION, "seed": i, "max_tokens": 60}) for i in range(200)
    ]
    batch_id = submit(api, jsonl(lines)).id
    answer = api.chat.completions.create(model="demo", **SHORT)
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    batch = wait(api, batch_id)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 200
