"""SGLang's own serving class and request class for each endpoint.

Rendering and answering go through the very classes that serve the endpoint online,
so chat templates, tools, ``response_format``, ``n``, ``logprobs`` and sampling
parameters behave in a batch as they do over HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
)

REQUEST_CLASSES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}


@dataclass(frozen=True, slots=True)
class ServingEndpoint:
    """One endpoint of a running SGLang.

    handler: SGLang's serving object (``OpenAIServingChat`` and its like).
    request_class: the pydantic class of the endpoint's body.
    """

    handler: Any
    request_class: type[BaseModel]


def serving_endpoints(
    tokenizer_manager: Any, template_manager: Any
) -> dict[str, ServingEndpoint]:
    """The endpoints that a batch may name, served by this engine."""
    from sglang.srt.entrypoints.openai.serving_completions import (
        OpenAIServingCompletion,
    )
    from sglang.srt.entrypoints.openai.serving_embedding import OpenAIServingEmbedding

    handler_classes = {
        "/v1/chat/completions": tokenizer_manager.serving_chat_class,
        "/v1/completions": OpenAIServingCompletion,
        "/v1/embeddings": OpenAIServingEmbedding,
    }
    return {
        url: ServingEndpoint(
            handler(tokenizer_manager, template_manager), REQUEST_CLASSES[url]
        )
        for url, handler in handler_classes.items()
    }


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
