"""The usage in answers of each API, whole and as streams in any pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sglang_batch.server.http.front_server import ForwardedUsage

COUNTS = {"calls": 1, "input_tokens": 9, "cached_tokens": 4, "output_tokens": 5}
OPENAI = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 4},
}
RESPONSES = {
    "input_tokens": 9,
    "output_tokens": 5,
    "input_tokens_details": {"cached_tokens": 4},
}
ANTHROPIC = {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 5}


def passed(usage: ForwardedUsage, data: bytes, size: int, *, is_stream: bool) -> bytes:
    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(data), size):
            yield data[begin : begin + size]

    async def joined() -> bytes:
        found = [piece async for piece in usage.passed(pieces(), is_stream=is_stream)]
        return b"".join(found)

    return asyncio.run(joined())


def stream(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)


@pytest.mark.parametrize("usage", [OPENAI, RESPONSES, ANTHROPIC])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_whole_answer(usage: dict[str, Any], size: int) -> None:
    found = ForwardedUsage("/v1/messages", b"{}")
    data = json.dumps({"choices": [], "usage": usage}).encode()
    assert passed(found, data, size, is_stream=False) == data
    assert found.counts == COUNTS


@pytest.mark.parametrize(
    "events",
    [
        [{"choices": [], "usage": OPENAI}],
        [{"type": "response.completed", "response": {"usage": RESPONSES}}],
        [
            {"type": "message_start", "message": {"usage": {"input_tokens": 0}}},
            {"type": "message_delta", "usage": {"output_tokens": 2}},
            {"type": "message_delta", "usage": ANTHROPIC},
        ],
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream(events: list[dict[str, Any]], size: int) -> None:
    found = ForwardedUsage("/v1/responses", b'{"stream": true}')
    assert found.body == b'{"stream": true}'
    data = stream({"delta": 'says "usage"'}, *events) + b"data: [DONE]\n\n"
    assert passed(found, data, size, is_stream=True) == data
    assert found.counts == COUNTS


@pytest.mark.parametrize("asked", [False, True])
def test_the_usage_of_a_chat_is_hidden_unless_asked_for(asked: bool) -> None:
    body: dict[str, Any] = {"stream": True, "n": 2}
    if asked:
        body["stream_options"] = {"include_usage": True}
    found = ForwardedUsage("/v1/chat/completions", json.dumps(body).encode())
    sent = json.loads(found.body)
    assert sent == {**body, "stream_options": {"include_usage": True}}
    text = stream({"choices": [{"delta": {}}], "usage": None})
    last = stream({"choices": [], "usage": OPENAI})
    shown = passed(found, text + last, 11, is_stream=True)
    assert shown == (text + last if asked else text)
    assert found.counts == COUNTS


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b"{}", b'{"stream_options": 1}']
)
def test_a_body_that_does_not_stream_is_sent_as_it_is(body: bytes) -> None:
    found = ForwardedUsage("/v1/completions", body)
    assert found.body == body
    data = b"not json either"
    assert passed(found, data, 4, is_stream=False) == data
    assert found.counts == {"calls": 1}
