"""Bodies for each endpoint that have its answers take every shape, and how to ask for them."""

from __future__ import annotations

import json
from typing import Any

import httpx

Body = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RESPONSES, MESSAGES = "/v1/embeddings", "/v1/responses", "/v1/messages"

ASK = [{"role": "user", "content": "What is a tuple?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
FORCED = {"type": "function", "function": {"name": "weather"}}
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
MESSAGE_TOOLS = [{"name": "weather", "input_schema": SCHEMA}]

# Endpoint -> name -> fields of a body besides the model, the limit and temperature 0.
GENERATING: dict[str, dict[str, Body]] = {
    CHAT: {
        "plain": {"messages": ASK},
        "n": {"messages": ASK, "n": 3},
        "logprobs": {"messages": ASK, "logprobs": True},
        "top logprobs": {"messages": ASK, "logprobs": True, "top_logprobs": 3, "n": 2},
        "stopped": {"messages": ASK, "stop": [*LETTERS]},
        "one token": {"messages": ASK, "max_tokens": 1},
        "schema": {
            "messages": ASK,
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": SCHEMA},
            },
        },
        "schema logprobs": {
            "messages": ASK,
            "logprobs": True,
            "top_logprobs": 5,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": SCHEMA},
            },
        },
        "nulls": {
            "messages": ASK,
            **dict.fromkeys(("n", "logprobs", "stop", "tools", "presence_penalty")),
        },
        "tools": {"messages": ASK, "tools": TOOLS},
        "forced tool": {
            "messages": ASK,
            "tools": TOOLS,
            "tool_choice": FORCED,
            "max_tokens": 80,
        },
        "required tool": {
            "messages": ASK,
            "tools": TOOLS,
            "tool_choice": "required",
            "max_tokens": 80,
            "n": 2,
        },
        "reasoning": {
            "messages": ASK,
            "chat_template_kwargs": {"enable_thinking": True},
        },
        "extras": {
            "messages": ASK,
            "seed": 7,
            "user": "u",
            "return_meta_info": True,
            "return_token_ids": True,
            "metadata": {"a": "b"},
        },
    },
    COMPLETIONS: {
        "plain": {"prompt": "A tuple is"},
        "n": {"prompt": "A tuple is", "n": 2},
        "list": {"prompt": ["A tuple is", "A list is"], "n": 2, "logprobs": 1},
        "ids": {"prompt": [65, 66, 67]},
        "logprobs": {"prompt": "A tuple is", "logprobs": 3},
        "no top logprobs": {"prompt": "A tuple is", "logprobs": 0},
        "echo": {"prompt": "A tuple is", "echo": True},
        "echo logprobs": {"prompt": "A tüple is", "echo": True, "logprobs": 2},
        "echo of lists": {
            "prompt": [[65, 66], [67, 68, 69]],
            "echo": True,
            "logprobs": 1,
        },
        "stopped": {"prompt": "A tuple is", "stop": [*LETTERS]},
        "regex logprobs": {"prompt": "A tuple is", "regex": "[a-c]*", "logprobs": 5},
        "scored": {
            "prompt": "A tüple is",
            "echo": True,
            "logprobs": 1,
            "max_tokens": 0,
        },
        "scored lists": {
            "prompt": ["A tuple is", "A list"],
            "echo": True,
            "logprobs": 1,
            "max_tokens": 0,
        },
        "scored n": {
            "prompt": "A tuple is",
            "echo": True,
            "logprobs": 1,
            "max_tokens": 0,
            "n": 2,
        },
        "empty": {"prompt": "A tuple is", "max_tokens": 0},
    },
    RESPONSES: {
        "plain": {"input": "What is a tuple?"},
        "cut": {"input": "What is a tuple?", "max_output_tokens": 2},
        "list": {"input": ASK, "instructions": "Be short.", "metadata": {"a": "b"}},
        "logprobs": {
            "input": "Yes?",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
        "one token": {"input": "What is a tuple?", "max_output_tokens": 1},
        "schema": {
            "input": "Where?",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 5,
            "max_output_tokens": 60,
            "text": {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}},
        },
        "tools": {"input": "Rain?", "tools": [{"type": "function", **FUNCTION}]},
        "forced tool": {
            "input": "Rain?",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
            "max_output_tokens": 80,
        },
        "reasoning": {"input": "Why?", "reasoning": {"effort": "low"}},
    },
    MESSAGES: {
        "plain": {"messages": ASK},
        "stopped": {"messages": ASK, "stop_sequences": [*LETTERS]},
        "system": {"messages": ASK, "system": "Be short.", "top_k": 3},
        "tools": {"messages": ASK, "tools": MESSAGE_TOOLS},
        "forced tool": {
            "messages": ASK,
            "tools": MESSAGE_TOOLS,
            "tool_choice": {"type": "any"},
            "max_tokens": 80,
        },
        "thinking": {
            "messages": ASK,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    },
}
EMBEDDING: dict[str, dict[str, Body]] = {
    EMBEDDINGS: {
        "text": {"input": "A tuple"},
        "list": {"input": ["A tuple", "A list"]},
        "ids": {"input": [101, 102, 103]},
        "floats": {"input": "A tuple", "encoding_format": "float"},
    }
}
# Bodies that are refused.
REFUSED: dict[str, dict[str, Body]] = {
    CHAT: {"type": {"messages": 5}, "range": {"messages": ASK, "temperature": -1}},
    COMPLETIONS: {"type": {"prompt": {}}, "long": {"prompt": "x " * 20000}},
    RESPONSES: {"type": {"input": 5}, "long": {"input": "x " * 20000}},
    MESSAGES: {
        "type": {"messages": 5},
        "range": {"messages": ASK, "top_p": 7},
        "tool": {
            "messages": ASK,
            "tools": MESSAGE_TOOLS,
            "tool_choice": {"type": "tool", "name": "clock"},
        },
    },
}
LIMITS = {RESPONSES: "max_output_tokens"}
STREAMED = {
    CHAT: "chat chunk",
    COMPLETIONS: "completion chunk",
    RESPONSES: "response event",
    MESSAGES: "message event",
}
# What `strict_types` calls their answers.
ANSWERED = {
    CHAT: "chat",
    COMPLETIONS: "completion",
    EMBEDDINGS: "embeddings",
    RESPONSES: "response",
    MESSAGES: "message",
}


def full(url: str, body: Body, model: str = "demo") -> Body:
    """A body with all that it needs."""
    if url == EMBEDDINGS:
        return {"model": model, **body}
    limit = {LIMITS.get(url, "max_tokens"): 16}
    return {"model": model, "temperature": 0, **limit, **body}


def online(server_url: str, url: str, body: Body) -> tuple[int, str]:
    """Status and text of an answer."""
    answer = httpx.post(f"{server_url}{url}", json=body, timeout=30)
    return answer.status_code, answer.text


def streamed(server_url: str, url: str, body: Body) -> list[str]:
    """The JSON texts of a stream of events."""
    found = []
    extra = {"stream": True}
    with httpx.stream(
        "POST", f"{server_url}{url}", json={**body, **extra}, timeout=30
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                found.append(line.removeprefix("data: "))
    return found


def lines(cases: dict[str, dict[str, Body]]) -> list[dict[str, Any]]:
    """A batch line for each case, whose ``custom_id`` is its endpoint and name."""
    return [
        {
            "custom_id": f"{url} {name}",
            "method": "POST",
            "url": url,
            "body": full(url, body),
        }
        for url, bodies in cases.items()
        for name, body in bodies.items()
    ]


def jsonl(items: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)
