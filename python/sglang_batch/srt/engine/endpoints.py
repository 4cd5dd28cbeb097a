"""SGLang's own serving class and request class for each endpoint.

Requests are rendered and answered by the classes that serve the endpoint online, so
chat templates, tools, ``n`` and ``logprobs`` behave in a batch as they do over HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

from pydantic import BaseModel, TypeAdapter
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.managers.io_struct import GenerateReqInput

from ...batch_api import protocol as api
from ...batch_api.lines import ModelLimits
from ...job.engine import GENERATE_URL, SAMPLE_URL
from ..compat.server_types import (
    EngineAnswer,
    EngineRequest,
    JsonObject,
    TemplateManager,
    TokenizerManager,
)
from . import transcriptions
from .checks import body_checks as bodies
from .checks.value_checks import FieldError
from .strict_serving import make_strict

REQUEST_CLASSES = bodies.request_classes()
_NATIVE = (GENERATE_URL, SAMPLE_URL)

ServingCoroutine: TypeAlias = Coroutine[Any, Any, object]
"""SGLang's work on one request; returns its response object or its error response."""

Serve: TypeAlias = Callable[[BaseModel], ServingCoroutine]
"""Answers a parsed body."""

Converted: TypeAlias = tuple[EngineRequest, Any]
"""SGLang's internal request, and the parsed body that its answer is formatted from."""


class ServingEndpoints:
    """The endpoints of batches and ``/generate``, served by one engine.

    SGLang's serving object for an endpoint is created with its first request, since not
    every model can serve all of them.
    """

    def __init__(
        self, tokenizer_manager: TokenizerManager, template_manager: TemplateManager
    ) -> None:
        self._managers = (tokenizer_manager, template_manager)
        self._serve: dict[str, Serve | Exception] = {}
        self._handlers: dict[str, OpenAIServingBase] = {}

    async def open(self, url: str) -> None:
        """Prepare an endpoint for :meth:`call`, which raises if this fails."""
        if url in _NATIVE or url in self._serve:
            return
        try:
            # In a thread, also because an import may keep a reference to its frames.
            serve = await asyncio.to_thread(_serve_function, url, *self._managers)
            if isinstance(serve, partial) and serve.func is _serve:
                self._handlers[url] = serve.args[0]
            self._serve[url] = serve
        except Exception as error:
            self._serve[url] = error

    def call(
        self, url: str, body: JsonObject, keep: Callable[[Converted], None]
    ) -> ServingCoroutine:
        """SGLang's work on one request, as a coroutine that has not started.

        Args:
            keep: called with the converted request, from which :meth:`continued` continues.

        Raises:
            ValueError: the endpoint does not accept the body.
            Exception: this model cannot serve the endpoint.
        """
        if url in _NATIVE:
            known = GenerateReqInput.__dataclass_fields__
            for name in body:
                if name not in known:
                    problem = "there is no such field"
                    raise FieldError(name[:100], problem, "unknown_parameter")
            if body.get("stream"):
                raise FieldError("stream", "the answers of a job are not streamed")
            given = bodies.without_nulls(body)
            native = _type_adapter(GenerateReqInput).validate_python(given)
            bodies.check_native(body)
            keep((native, None))
            return self._generate(native)
        if wrong := api.wrong_budget(url, body):
            raise FieldError(*wrong)
        manager = self._managers[0]
        # SGLang's answers repeat the request's name of the model.
        if body.get("model") is None:
            body = {**body, "model": manager.served_model_name}
        parsed = bodies.validated(REQUEST_CLASSES[url], body)
        limits = ModelLimits(
            context_len=None if manager.allow_auto_truncate else manager.context_len,
            vocab_size=manager.model_config.vocab_size,
        )
        parser = manager.server_args.tool_call_parser
        bodies.check_parsed(url, parsed, parser, limits)
        serve = self._serve[url]
        if isinstance(serve, Exception):
            raise serve
        if url in self._handlers:
            return _serve(self._handlers[url], parsed, keep)
        return serve(parsed)

    def continued(self, url: str, converted: Converted) -> ServingCoroutine:
        """SGLang's work on a request from where it was converted, not started."""
        adapted, parsed = converted
        if url in _NATIVE:
            return self._generate(adapted)
        handler = self._handlers[url]
        work: ServingCoroutine
        work = handler._handle_non_streaming_request(adapted, parsed, None)
        return work

    async def _generate(self, request: GenerateReqInput) -> EngineAnswer:
        return await self._managers[0].generate_request(request, None).__anext__()


_type_adapter = cache(TypeAdapter)  # making one takes long
_SERVING = "sglang.srt.entrypoints.openai.serving"
# SGLang's serving classes, but for those that depend on the model.
_SERVING_CLASSES = {
    "/v1/completions": ("completions", "OpenAIServingCompletion"),
    "/v1/embeddings": ("embedding", "OpenAIServingEmbedding"),
    "/v1/rerank": ("rerank", "OpenAIServingRerank"),
    "/v1/classify": ("classify", "OpenAIServingClassify"),
    "/v1/score": ("score", "OpenAIServingScore"),
}


def _serve_function(
    url: str, manager: TokenizerManager, templates: TemplateManager
) -> Serve:
    if url == "/v1/responses":
        from sglang.srt.entrypoints.openai.serving_responses import (
            OpenAIServingResponses,
        )

        # Without a tool server: results of its built-in tools are no part of a batch.
        responses = make_strict(
            OpenAIServingResponses(
                manager, templates, enable_prompt_tokens_details=True
            )
        )
        # A store would keep every answer of a batch in memory. Without it "store" has no
        # effect, and "background" and "previous_response_id" are refused, as online.
        responses.enable_response_store = False
        serve: Serve = responses.create_responses
        return serve
    if url == bodies.MESSAGES_URL:
        from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

        messages = make_strict(
            AnthropicServing(manager.serving_chat_class(manager, templates))
        )
        return partial(messages.handle_messages, raw_request=None)
    if url == api.TRANSCRIPTIONS_URL:
        handler = make_strict(transcriptions.serving_class(manager))
        return lambda body: _serve(handler, transcriptions.request_of(body))
    if url == "/v1/chat/completions":
        kind = manager.serving_chat_class
    else:
        module, name = _SERVING_CLASSES[url]
        kind = getattr(import_module(f"{_SERVING}_{module}"), name)
    arguments = (manager,) if url == "/v1/score" else (manager, templates)
    return partial(_serve, make_strict(kind(*arguments)))


async def _serve(
    handler: OpenAIServingBase,
    parsed: BaseModel,
    keep: Callable[[Converted], None] = lambda _: None,
) -> object:
    """SGLang's ``handle_request`` without its HTTP request and its thread."""
    if message := handler._validate_request(parsed):
        raise ValueError(message)
    adapted, parsed = handler._convert_to_internal_request(parsed, None)
    keep((adapted, parsed))
    return await handler._handle_non_streaming_request(adapted, parsed, None)


class StoredRequest(NamedTuple):
    """A rendered request on disk: from conversion on, without template and tokenizer.

    SGLang's serving classes convert a parsed body into an internal request, and format the
    answer from both. Both are pickled, without fields that have their defaults.

    has_ids: whether its ``input_ids`` were the prompt's token ids, which are elsewhere.
    """

    kind: Any
    fields: dict[str, Any]
    has_ids: bool
    parsed: object
    max_new_tokens: int | None
    ignore_eos: bool


def store_request(
    converted: Converted,
    input_ids: object,
    max_new_tokens: int | None,
    ignore_eos: bool,
) -> bytes | None:
    """The bytes for :func:`load_request`, None for a request that cannot be pickled."""
    adapted, parsed = converted
    # Ids, and the class that makes ids for samples, are set when it is rendered again.
    generates = isinstance(adapted, GenerateReqInput)
    kind: Any = GenerateReqInput if generates else type(adapted)
    defaults = _defaults(kind)
    fields = {
        name: value
        for name, value in vars(adapted).items()
        if name in kind.__dataclass_fields__
        and (name not in defaults or value is not defaults[name])
    }
    fields.pop("rid", None)
    has_ids = fields.get("input_ids") is input_ids and input_ids is not None
    if has_ids:
        del fields["input_ids"]
    stored = StoredRequest(kind, fields, has_ids, parsed, max_new_tokens, ignore_eos)
    try:
        return pickle.dumps(tuple(stored), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None


def load_request(
    data: bytes, input_ids: Sequence[int]
) -> tuple[Converted, StoredRequest]:
    """The converted request that was stored, with its prompt's token ids."""
    stored = StoredRequest(*pickle.loads(data))
    adapted: EngineRequest = object.__new__(stored.kind)
    vars(adapted).update(_defaults(stored.kind))
    vars(adapted).update(stored.fields)
    if stored.has_ids:
        adapted.input_ids = list(input_ids)
    return (adapted, stored.parsed), stored


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    """Defaults that are immutable, by field."""
    return {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    }
