"""Pydantic AI: agents, and its batches of responses and messages."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import checks as c
from checks import check
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request_batch
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelRequest
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.batch import BatchRequest
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

LIMIT: Any = {"max_tokens": 90, "temperature": 0}


def openai(kind: Any, model: str = c.MODEL, key: str = c.KEY, url: str = c.URL) -> Any:
    return kind(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


def anthropic() -> Any:
    provider = AnthropicProvider(base_url=c.URL, api_key=c.KEY)
    return AnthropicModel(c.MODEL, provider=provider)


def agent(model: Any, output: Any = str, **settings: Any) -> Any:
    return Agent(model, output_type=output, model_settings=LIMIT | settings)


def answer(model: Any, output: Any = str) -> None:
    kind = str if output is str else c.Place
    found = agent(model, output).run_sync(c.QUESTION).output
    assert isinstance(found, kind) and found, found


def ask(model: str = c.MODEL, key: str = c.KEY, **settings: Any) -> Any:
    return agent(openai(OpenAIChatModel, model, key), **settings).run_sync(c.QUESTION)


def in_batch(model: Any) -> None:
    """Two answers, and a request that is refused."""
    settings: dict[str, Any] = {"a": {}, "b": {}, "refused": {"top_p": 7}}
    asked = [ModelRequest.user_text_prompt(c.QUESTION)]
    requests = [
        BatchRequest(custom_id=name, messages=asked, model_settings=LIMIT | more)
        for name, more in settings.items()
    ]
    poll: Any = {"poll_interval": timedelta(seconds=1)}
    *good, bad = asyncio.run(model_request_batch(model, requests, **poll))
    assert all(each.usage.output_tokens > 0 for each in good), good
    assert isinstance(bad, ModelHTTPError) and bad.status_code == 400, bad


@check("stream")
def _() -> None:
    async def stream() -> None:
        async with agent(openai(OpenAIChatModel)).run_stream(c.QUESTION) as found:
            assert [text async for text in found.stream_text()]

    asyncio.run(stream())


def embed() -> list[list[float]]:
    model = openai(OpenAIEmbeddingModel, c.EMBEDDING_MODEL, url=c.EMBEDDING_URL)
    return [*map(list, Embedder(model).embed_documents_sync(c.TEXTS).embeddings)]


@check("responses")
def _() -> None:
    answer(openai(OpenAIResponsesModel))
    answer(openai(OpenAIResponsesModel), ToolOutput(c.Place))


@check("messages")
def _() -> None:
    answer(anthropic())
    answer(anthropic(), ToolOutput(c.Place))


check("chat")(lambda: answer(openai(OpenAIChatModel)))
check("tools")(lambda: answer(openai(OpenAIChatModel), ToolOutput(c.Place)))
check("schema")(lambda: answer(openai(OpenAIChatModel), NativeOutput(c.Place)))
check("batch")(lambda: in_batch(openai(OpenAIResponsesModel)))
check("message batches")(lambda: in_batch(anthropic()))
c.check_vectors(embed)
c.check_errors(ask, ModelHTTPError, ModelHTTPError, ModelHTTPError)
c.report("pydantic-ai-slim")
