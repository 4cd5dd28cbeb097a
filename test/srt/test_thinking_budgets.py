"""Most tokens of reasoning: obeyed on every way into a server, or refused in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from answer_cases import CHAT, MESSAGES
from batches import ADMIN, client, jsonl, line, results, submit, wait
from servers import Server
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

from sglang_batch.srt.engine import strict_serving
from sglang_batch.srt.engine.strict_serving import make_strict

ASK = [{"role": "user", "content": "Why?"}]
BUDGET = {"custom_params": {"thinking_budget": 10}}
END = len("</think>")  # a token each
LINE = {"messages": ASK, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
NATIVE = {
    "text": "Why?",
    "require_reasoning": True,
    "sampling_params": {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0},
}


def posted(of: Server, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {ADMIN}"}
    body = {"model": "demo", **body} if url != "/generate" else body
    answer = httpx.post(f"{of.url}{url}", json=body, headers=headers, timeout=60)
    return answer.status_code, answer.json()


def test_online_calls_keep_to_it(keyed_server: Server) -> None:
    _, free = posted(keyed_server, CHAT, LINE)
    assert free["usage"]["reasoning_tokens"] == 60
    _, body = posted(keyed_server, CHAT, LINE | BUDGET)
    assert body["usage"]["reasoning_tokens"] == 10 + END
    assert body["choices"][0]["message"]["content"]
    _, native = posted(keyed_server, "/generate", NATIVE | {"max_thinking_tokens": 10})
    assert native["meta_info"]["reasoning_tokens"] == 10 + END


@pytest.mark.parametrize("strict", [True, False])
def test_that_of_a_message_is_that_of_its_chat(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """Anthropic's smallest is 1,024, before which every answer of the demo model ends."""
    serving = SimpleNamespace(enable_strict_thinking=strict)
    monkeypatch.setattr(strict_serving, "get_serving", lambda: serving)
    chats = object.__new__(OpenAIServingChat)
    chats.supports_inline_system, chats.reasoning_parser = False, "iquest_q1"
    handler = make_strict(AnthropicServing(chats))
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": "m", "messages": ASK, "max_tokens": 2000, "thinking": thinking}
    given = AnthropicMessagesRequest.model_validate(body)
    chat = handler._convert_to_chat_completion_request(given)
    assert chat.custom_params == ({"thinking_budget": 1024} if strict else None)
    assert chat.chat_template_kwargs["enable_thinking"]


def test_messages_with_one_are_answered(
    keyed_server: Server, offline_server: Server
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": ASK, "max_tokens": 1100, "thinking": thinking}
    status, answer = posted(keyed_server, MESSAGES, body)
    assert (status, answer["content"][0]["type"]) == (200, "thinking")
    status, answer = posted(offline_server, MESSAGES, body)
    assert (status, "without a reasoning parser" in str(answer)) == (400, True)


def test_lines_keep_to_it_and_count(keyed_server: Server) -> None:
    api = client(keyed_server.url, ADMIN)
    lines = [line("free", LINE), line("bounded", LINE | BUDGET)]
    batch = wait(api, submit(api, jsonl(lines)).id)
    used = {
        each["custom_id"]: each["response"]["body"]["usage"]["reasoning_tokens"]
        for each in results(api, batch.output_file_id)
    }
    assert used == {"free": 60, "bounded": 10 + END}
    assert batch.usage is not None
    details = batch.usage.output_tokens_details
    assert details.reasoning_tokens == 70 + END


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"custom_params": {"thinking_budget": "ten"}}, "'ten' is not a whole number"),
        (BUDGET | {"reasoning_effort": "none"}, "this request does not reason"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    keyed_server: Server, body: dict[str, Any], said: str
) -> None:
    status, answer = posted(keyed_server, CHAT, LINE | body)
    assert status == 400
    assert answer["error"]["message"].startswith(f"thinking_budget: {said}")


def test_a_server_that_keeps_to_none_refuses_it(offline_server: Server) -> None:
    said = "thinking_budget: this server has no --enable-strict-thinking"
    status, answer = posted(offline_server, CHAT, LINE | BUDGET)
    assert (status, answer["error"]["message"]) == (400, said)
    api = client(offline_server.url)
    batch = wait(api, submit(api, jsonl([line("a", LINE | BUDGET)])).id)
    [failed] = results(api, batch.error_file_id)
    assert failed["response"]["body"]["error"]["message"] == said


def test_the_name_of_another_api_is_refused(keyed_server: Server) -> None:
    """Not ignored, in a call or a line: the model would think without a limit."""
    bodies = {
        CHAT: LINE,
        "/invocations": LINE,
        "/v1/completions": {"prompt": "Why?", "max_tokens": 9},
        "/v1/responses": {"input": "Why?", "max_output_tokens": 9},
        MESSAGES: {"messages": ASK, "max_tokens": 9},
    }
    of_openai, of_anthropic = "custom_params.thinking_budget", "thinking.budget_tokens"
    api = client(keyed_server.url, ADMIN)
    for url, body in bodies.items():
        own, other = of_openai, of_anthropic
        if url == MESSAGES:
            own, other = other, own
        outer, inner = other.split(".")
        for name, wrong in (
            ("max_thinking_tokens", {"max_thinking_tokens": 10}),
            (other, {outer: {inner: 1024}}),
        ):
            said = f"{name}: there is no such field. Did you mean {own!r}?"
            status, answer = posted(keyed_server, url, body | wrong)
            assert (status, answer["error"]["message"]) == (400, said)
            if url == "/invocations":
                continue
            lines = jsonl([line("a", body | wrong, url=url)])
            batch = wait(api, submit(api, lines, url).id)
            [failed] = results(api, batch.error_file_id)
            assert failed["response"]["body"]["error"]["message"] == said
        unset = {"max_thinking_tokens": None, "thinking": None, "custom_params": {}}
        status, _ = posted(keyed_server, url, body | unset)
        assert status == 200
