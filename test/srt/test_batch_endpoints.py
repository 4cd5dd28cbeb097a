"""Endpoints beyond OpenAI's first three: lines are answered as the server answers."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest
from batches import client, jsonl, results, submit, wait
from openai.types import Batch
from servers import Server

ASK = [{"role": "user", "content": "What is a tuple?"}]
LONG = "x" * 3000  # a token per character
WEATHER = {
    "name": "weather",
    "description": "Today's weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}

# Endpoint -> name of a case -> what its body has besides the model.
GOOD: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/responses": {
        "text": {"input": "What is a tuple?"},
        "list": {"input": [*ASK, {"role": "assistant", "content": "No."}, *ASK]},
        "instructions": {"input": "A tuple?", "instructions": "Be short."},
        "tools": {
            "input": "Rain?",
            "tools": [{"type": "function", **WEATHER}],
            "tool_choice": "none",
        },
        "logprobs": {
            "input": "Yes?",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
        "stored": {"input": "Kept?", "store": True, "metadata": {"a": "b"}},
        "unknown key": {"input": "And this?", "unheard_of": 1},
    },
    "/v1/messages": {
        "text": {"messages": ASK},
        "blocks": {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "A?"}]}],
            "system": "Be short.",
            "stop_sequences": ["e"],
        },
        "tools": {
            "messages": ASK,
            "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
            "tool_choice": {"type": "none"},
        },
        "unknown key": {"messages": ASK, "unheard_of": 1},
    },
    "/v1/score": {
        "text": {"query": "Is it?", "items": [" yes", " no"], "label_token_ids": [65]},
        "token ids": {
            "query": [65, 66],
            "items": [[67], [68, 69]],
            "label_token_ids": [70, 71],
            "apply_softmax": True,
        },
        "labels per item": {
            "items": ["one", "two"],
            "label_token_ids": [[65], [66, 67]],
            "return_token_logprobs": True,
        },
        "nothing to do": {"items": [], "label_token_ids": [65]},
    },
}
BAD: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/responses": {
        "wrong type": {"input": 5},
        "too long": {"input": LONG},
        "background": {"input": "x", "background": True},
        "unknown response": {"input": "x", "previous_response_id": "resp_1"},
        "no tool to require": {"input": "x", "tool_choice": "required"},
    },
    "/v1/messages": {
        "wrong type": {"messages": "hello"},
        "wrong value": {"messages": ASK, "max_tokens": 0},
        "too long": {"messages": [{"role": "user", "content": LONG}]},
        "no such tool": {
            "messages": ASK,
            "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
            "tool_choice": {"type": "tool", "name": "clock"},
        },
    },
    "/v1/score": {
        "wrong type": {"items": 5},
        "too long": {"query": LONG, "items": ["a", "b"], "label_token_ids": [65]},
        "no labels": {"query": "Is it?", "items": ["yes"]},
        "unknown label": {"items": ["yes"], "label_token_ids": [10_000_000]},
    },
    # Not for a model that generates.
    "/v1/rerank": {
        "unserved": {"query": "Which?", "documents": ["this", "that"]},
        "empty": {"query": " ", "documents": ["this"]},
        "wrong type": {"query": "Which?", "documents": 5},
    },
    "/v1/classify": {
        "unserved": {"input": "What is it?"},
        "several": {"input": ["What is it?", "And this?"]},
        "empty": {"input": ""},
        "wrong type": {"input": {"a": 1}},
    },
}
LIMITS = {
    "/v1/responses": {"max_output_tokens": 8, "temperature": 0},
    "/v1/messages": {"max_tokens": 6, "temperature": 0},
}
# Fields that differ from call to call or by the cache's contents at the time.
VOLATILE = {"id", "created_at", "input_tokens_details", "cache_read_input_tokens"}


def full(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "demo", **LIMITS.get(url, {}), **body}


def post(server: Server, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        server.url + url,
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def run(
    server: Server, url: str, bodies: dict[str, dict[str, Any]]
) -> tuple[Batch, dict[str, dict[str, Any]]]:
    """A batch of these bodies; the response of each."""
    api = client(server.url)
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": full(url, body)}
        for name, body in bodies.items()
    ]
    batch = wait(api, submit(api, jsonl(lines), url).id)
    assert batch.status == "completed", batch
    found = results(api, batch.output_file_id) + results(api, batch.error_file_id)
    return batch, {item["custom_id"]: item["response"] for item in found}


def steady(value: Any) -> Any:
    """An answer without what differs from call to call."""
    if isinstance(value, list):
        return [steady(item) for item in value]
    if isinstance(value, float):  # sums differ with what runs beside it
        return round(value, 3)
    if not isinstance(value, dict):
        return value
    kept = {key: steady(item) for key, item in value.items() if key not in VOLATILE}
    if "cache_read_input_tokens" in value:  # which are not among the others
        kept["input_tokens"] += value["cache_read_input_tokens"]
    return kept


def counted(bodies: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Input, cached and output tokens, as the answers have them."""
    usages = [body["usage"] for body in bodies]
    cached = sum(
        usage.get("cache_read_input_tokens", 0)
        + usage.get("input_tokens_details", {}).get("cached_tokens", 0)
        for usage in usages
    )
    not_in_input = sum(usage.get("cache_read_input_tokens", 0) for usage in usages)
    return (
        not_in_input
        + sum(u.get("input_tokens", u.get("prompt_tokens")) for u in usages),
        cached,
        sum(usage.get("output_tokens", 0) for usage in usages),
    )


@pytest.mark.parametrize("url", GOOD)
def test_lines_are_answered_as_online(offline_server: Server, url: str) -> None:
    online = {
        name: post(offline_server, url, full(url, body))
        for name, body in GOOD[url].items()
    }
    batch, offline = run(offline_server, url, GOOD[url])
    assert set(offline) == set(online)
    for name, (status, body) in online.items():
        assert status == 200, body
        assert offline[name]["status_code"] == 200, offline[name]
        assert steady(offline[name]["body"]) == steady(body), name
    assert batch.usage is not None
    num_input, num_cached, num_output = counted([r["body"] for r in offline.values()])
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (
        num_input,
        num_output,
    )
    found = batch.usage.input_tokens_details.cached_tokens
    # A score's answer does not say what of it was cached.
    assert found == num_cached or url == "/v1/score"
    assert num_input > 0


@pytest.mark.parametrize("url", BAD)
def test_bad_lines_are_refused_as_online(offline_server: Server, url: str) -> None:
    online = {
        name: post(offline_server, url, full(url, body))
        for name, body in BAD[url].items()
    }
    _, offline = run(offline_server, url, BAD[url])
    assert set(offline) == set(online)
    for name, (status, body) in online.items():
        answer = offline[name]
        assert answer["status_code"] == status >= 400, name
        if url == "/v1/messages":
            assert answer["body"] == body, name
            continue
        error = answer["body"]["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        if name == "wrong type":  # ours names the place, SGLang's prints the body
            assert error["param"].startswith("body."), error
        else:
            said = body.get("error", body)
            assert error["message"] == said["message"], name
            assert error["param"] == said["param"], name
        if name == "too long":
            assert error["code"] == "context_length_exceeded"


# The serving code's call, without a server -------------------------------------------


class Manager:
    """A tokenizer manager that answers when it is told to, and keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.answered = asyncio.Event()
        self.aborted = False

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[Any]:
        self.given.append(obj)
        try:
            await self.answered.wait()
        except BaseException:
            self.aborted = True
            raise
        yield {"text": obj.text}


def make_call(manager: Manager, *texts: str) -> Any:
    """Serving code that asks for one text after another, and says when it is stopped."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    from sglang_batch.srt.engine.serving_call import HoldingManager, ServingCall

    holding = HoldingManager(manager)

    async def serve() -> Any:
        answers = []
        try:
            for text in texts:
                request = GenerateReqInput(text=text)
                answers.append(await anext(holding.generate_request(request)))
        except asyncio.CancelledError:
            return "Client disconnected"
        return answers

    return ServingCall(serve(), "job-00000007")


def test_a_request_is_held_with_our_id_until_its_turn() -> None:
    async def check() -> None:
        manager = Manager()
        call = make_call(manager, "a", "b")
        assert call.render().rid == "job-00000007"
        assert not manager.given
        manager.answered.set()
        answers = await call.run(routed_dp_rank=1)
        assert answers == [{"text": "a"}, {"text": "b"}]
        assert [obj.rid for obj in manager.given] == [
            "job-00000007",
            "job-00000007.call000001",
        ]
        assert {obj.routed_dp_rank for obj in manager.given} == {1}
        assert [each.answer for each in call.submissions] == answers

    asyncio.run(check())


def test_a_cancelled_call_is_no_answer_though_serving_code_makes_one() -> None:
    async def check() -> None:
        manager = Manager()
        call = make_call(manager, "a")
        call.render()
        running = asyncio.ensure_future(call.run())
        while not manager.given:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert manager.aborted

    asyncio.run(check())


def test_a_call_without_a_request_has_its_answer_at_once() -> None:
    call = make_call(Manager())
    assert call.render() is None
    assert call.answer == []


def test_a_call_that_needs_more_than_the_engine_is_refused() -> None:
    from sglang_batch.srt.engine.serving_call import ServingCall

    with pytest.raises(RuntimeError, match="more of the server"):
        ServingCall(asyncio.sleep(0), "job-00000000").render()
