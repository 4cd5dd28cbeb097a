"""SGLang's own serving class and request class for each endpoint.

Rendering and answering go through the very classes that serve the endpoint online,
so chat templates, tools, ``response_format``, ``n``, ``logprobs`` and sampling
parameters behave in a batch as they do over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponsesRequest,
    ScoringRequest,
    V1RerankReqInput,
)
from sglang.srt.managers.io_struct import GenerateReqInput

from ..engine import GENERATE_URL

MESSAGES_URL = "/v1/messages"

REQUEST_CLASSES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/responses": ResponsesRequest,
    MESSAGES_URL: AnthropicMessagesRequest,
    "/v1/score": ScoringRequest,
    "/v1/rerank": V1RerankReqInput,
    "/v1/classify": ClassifyRequest,
}

Serve = Callable[[Any], Coroutine[Any, Any, Any]]
"""Answers a parsed body: with SGLang's response object, or its error response."""


class ServingEndpoints:
    """The endpoints that a batch may name, and ``/generate``, served by one engine.

    SGLang's serving objects are made when the first request names them: most jobs
    name one endpoint, and not every model can serve all.
    """

    def __init__(self, tokenizer_manager: Any, template_manager: Any) -> None:
        self._managers = (tokenizer_manager, template_manager)
        self._serve: dict[str, Serve | Exception] = {}

    async def open(self, url: str) -> None:
        """Have an endpoint ready for :meth:`call`, or the reason why it cannot be."""
        if url == GENERATE_URL or url in self._serve:
            return
        try:
            # In a thread also because an import may keep the frames it came from.
            self._serve[url] = await asyncio.to_thread(
                _serve_function, url, *self._managers
            )
        except Exception as error:
            self._serve[url] = error

    def call(self, url: str, body: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """What SGLang does for one request, as a coroutine that has not begun.

        Raises:
            ValueError: the body is not what the endpoint takes.
            Exception: this model cannot serve the endpoint.
        """
        if url == GENERATE_URL:
            return self._generate(GenerateReqInput(**body))
        parsed = REQUEST_CLASSES[url].model_validate(body)
        serve = self._serve[url]
        if isinstance(serve, Exception):
            raise serve
        return serve(parsed)

    async def _generate(self, request: GenerateReqInput) -> Any:
        return await self._managers[0].generate_request(request, None).__anext__()


def _serve_function(url: str, manager: Any, templates: Any) -> Serve:
    if url == "/v1/responses":
        return _responses(manager, templates)
    if url == MESSAGES_URL:
        from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

        messages = AnthropicServing(manager.serving_chat_class(manager, templates))
        return partial(messages.handle_messages, raw_request=None)
    return partial(_serve, _handler(url, manager, templates))


def _responses(manager: Any, templates: Any) -> Serve:
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

    # Without a tool server: what a built-in tool's server gives is no part of a batch.
    handler = OpenAIServingResponses(
        manager, templates, enable_prompt_tokens_details=True
    )
    # A store would hold every answer of a batch in memory. Without it "store" has no
    # effect, and "background" and "previous_response_id" are refused, as they are
    # online without --enable-response-store.
    handler.enable_response_store = False
    serve: Serve = handler.create_responses
    return serve


def _handler(url: str, manager: Any, templates: Any) -> Any:
    from sglang.srt.entrypoints.openai.serving_classify import OpenAIServingClassify
    from sglang.srt.entrypoints.openai.serving_completions import (
        OpenAIServingCompletion,
    )
    from sglang.srt.entrypoints.openai.serving_embedding import OpenAIServingEmbedding
    from sglang.srt.entrypoints.openai.serving_rerank import OpenAIServingRerank
    from sglang.srt.entrypoints.openai.serving_score import OpenAIServingScore

    if url == "/v1/score":
        return OpenAIServingScore(manager)
    handler_class = {
        "/v1/chat/completions": manager.serving_chat_class,
        "/v1/completions": OpenAIServingCompletion,
        "/v1/embeddings": OpenAIServingEmbedding,
        "/v1/rerank": OpenAIServingRerank,
        "/v1/classify": OpenAIServingClassify,
    }[url]
    return handler_class(manager, templates)


async def _serve(handler: Any, parsed: Any) -> Any:
    """As SGLang's ``handle_request``, without its HTTP request and its thread."""
    if message := handler._validate_request(parsed):
        raise ValueError(message)
    adapted, parsed = handler._convert_to_internal_request(parsed, None)
    return await handler._handle_non_streaming_request(adapted, parsed, None)


def describe_validation_error(error: ValidationError) -> tuple[str, str | None]:
    """The first thing wrong with a body, as (message, ``body.`` path)."""
    first = error.errors(include_url=False, include_context=False)[0]
    # Union members appear in the path as type names; keys and indices suffice.
    path = ".".join(
        str(part)
        for part in first["loc"]
        if str(part).isidentifier() or isinstance(part, int)
    )
    where = f"body.{path}" if path else "body"
    return f"Invalid value for '{where}': {first['msg']}.", where
