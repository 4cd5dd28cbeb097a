"""any-llm, with its provider for OpenAI at another address."""

from __future__ import annotations

import os
import tempfile
from typing import Any

# Its own errors in place of those of OpenAI's client.
os.environ["ANY_LLM_UNIFIED_EXCEPTIONS"] = "1"

import checks as c
from any_llm import api, exceptions
from checks import check

WHERE: Any = {"provider": "openai", "api_base": f"{c.URL}/v1", "api_key": c.KEY}


def ask(key: str = c.KEY, **more: Any) -> Any:
    asked: Any = {"model": c.MODEL, **c.ASKED, **WHERE}
    return api.completion(**asked | {"api_key": key} | more)


def start(content: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(content)
        file.flush()
        named: Any = {"input_file_path": file.name, "endpoint": c.CHAT}
        return str(api.create_batch(**named, **WHERE).id)


def fetch(batch: str) -> Any:
    return api.retrieve_batch(batch_id=batch, **WHERE)


@check("models")
def _() -> None:
    assert [each.id for each in api.list_models(**WHERE)] == [c.MODEL]


def embed() -> list[list[float]]:
    at = WHERE | {"api_base": f"{c.EMBEDDING_URL}/v1", "model": c.EMBEDDING_MODEL}
    return [each.embedding for each in api.embedding(**at, inputs=c.TEXTS).data]


@check("responses")
def _() -> None:
    asked: Any = {"model": c.MODEL, "input_data": "Hi", **WHERE}
    assert api.responses(**asked).usage.output_tokens > 0
    last = [event.type for event in api.responses(**asked, stream=True)][-1]
    assert last in ("response.completed", "response.incomplete"), last


@check("messages")
def _() -> None:
    at = {"provider": "anthropic", "api_base": c.URL, "api_key": c.KEY}
    asked: Any = {"model": c.MODEL, "messages": c.ASK, "max_tokens": 90}
    assert api.messages(**asked, **at).usage.output_tokens > 0


@check("batch")
def _() -> None:
    made = start(c.jsonl(c.LINES))
    counts = c.ended(lambda: fetch(made)).request_counts
    assert (counts.completed, counts.failed) == (3, 1), counts
    found = api.retrieve_batch_results(batch_id=made, **WHERE).results
    assert [each.custom_id for each in found if each.result] == [*c.LINES][:-1], found


def cancel(batch: str) -> Any:
    return api.cancel_batch(batch_id=batch, **WHERE)


def listed() -> list[str]:
    return c.two_pages(lambda **page: api.list_batches(**page, **WHERE))


c.check_chats(ask, lambda answer: answer)
c.check_vectors(embed)
c.check_batches(start, fetch, cancel, listed, exceptions.AnyLLMError)
c.check_errors(
    ask,
    exceptions.InvalidRequestError,
    exceptions.AuthenticationError,
    exceptions.ModelNotFoundError,
)
c.report("any-llm-sdk")
