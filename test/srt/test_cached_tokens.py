"""Prompt tokens are computed or cached, by the same count in every door.

A prompt with several samples counts once. Whoever computed it, the tokens were computed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from batches import client, jsonl, line, results, submit, wait
from servers import Server

NUM, SAMPLES = 6, 3
# Prompts that were never seen have no more in common than a template's first tokens.
COMMON = 40
FIELDS = {"max_tokens": 3, "n": SAMPLES}


def prompts() -> list[str]:
    """Unlike each other, and all that the server has seen. A character is a token."""
    return ["".join(uuid.uuid4().hex for _ in range(6)) for _ in range(NUM)]


def post(server: Server, path: str, body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    return answer.raise_for_status().json()


def counts(usage: Any) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def batch(server: Server, url: str, bodies: list[Any]) -> list[tuple[int, int]]:
    """The usage of each line, of which the batch has the sum."""
    api = client(server.url)
    lines = [line(f"l{i}", body, url) for i, body in enumerate(bodies)]
    done = wait(api, submit(api, jsonl(lines), url).id)
    answers = results(api, done.output_file_id)
    assert len(answers) == len(bodies), done
    found = [counts(each["response"]["body"]["usage"]) for each in answers]
    assert done.usage is not None
    cached = done.usage.input_tokens_details.cached_tokens
    total = [done.usage.input_tokens, cached]
    assert total == [sum(each) for each in zip(*found, strict=True)]
    return found


def completion_lines(server: Server, texts: list[str]) -> list[tuple[int, int]]:
    bodies = [{"prompt": text, **FIELDS} for text in texts]
    return batch(server, "/v1/completions", bodies)


def lines_of_several_prompts(server: Server, texts: list[str]) -> list[tuple[int, int]]:
    bodies = [{"prompt": texts[:2], **FIELDS}, {"prompt": texts[2:], **FIELDS}]
    return batch(server, "/v1/completions", bodies)


def chat_lines(server: Server, texts: list[str]) -> list[tuple[int, int]]:
    asked = [[{"role": "user", "content": text}] for text in texts]
    bodies = [{"messages": messages, **FIELDS} for messages in asked]
    return batch(server, "/v1/chat/completions", bodies)


def single_calls(server: Server, texts: list[str]) -> list[tuple[int, int]]:
    body = {"model": "demo", **FIELDS}
    path = "/v1/completions"
    return [counts(post(server, path, {**body, "prompt": t})["usage"]) for t in texts]


def streamed_call(server: Server, texts: list[str]) -> list[tuple[int, int]]:
    body = {
        "model": "demo", "prompt": texts, **FIELDS, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    events = [x[6:] for x in answer.text.split("\n") if x.startswith("data: {")]
    return [counts(json.loads(events[-1])["usage"])]


def native_list(server: Server, texts: list[str]) -> list[tuple[int, int]]:
    params = {"max_new_tokens": 3, "n": SAMPLES}
    answers = post(server, "/generate", {"text": texts, "sampling_params": params})
    firsts = [answer["meta_info"] for answer in answers[::SAMPLES]]
    return [(each["prompt_tokens"], each["cached_tokens"]) for each in firsts]


@pytest.mark.parametrize(
    "door",
    [
        completion_lines,
        lines_of_several_prompts,
        chat_lines,
        single_calls,
        streamed_call,
        native_list,
    ],
)
def test_a_prompt_that_was_computed_is_not_cached(
    offline_server: Server, door: Callable[..., list[tuple[int, int]]]
) -> None:
    texts = prompts()
    found = door(offline_server, texts)
    total = sum(prompt for prompt, _ in found)
    assert total >= sum(map(len, texts))
    assert sum(cached for _, cached in found) <= COMMON * NUM
    # The second time, all but the last token is in the cache.
    again = door(offline_server, texts)
    assert sum(prompt for prompt, _ in again) == total
    assert sum(cached for _, cached in again) >= total - 2 * NUM
