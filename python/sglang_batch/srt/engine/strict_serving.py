"""SGLang's serving classes, with answers that fit the clients' own types.

Strict clients refuse an answer for fields that SGLang adds to these types or leaves out.
:func:`make_strict` is for batches and for the online calls of their server: SGLang's own
classes stay as they are.
"""

from __future__ import annotations

import codecs
import copy
import json
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from sglang.srt.runtime_context import get_serving

from ...batch_api import message_batches
from ...server.access.keys import ANYBODY, Role
from ...server.http.authorization import current_caller
from ...server.http.flex import GOING_ON
from ..compat.server_types import JsonObject
from .checks.request_checks import BUDGET

# The log probability of a token that cannot follow. JSON has no infinity, and SGLang's null
# is not a number. OpenAI shows the least probable tokens with this one.
IMPOSSIBLE = -9999.0
# Responses that are kept of each key, besides those that run.
MOST_KEPT = 10_000
_DATA = "data: "


def make_strict(handler: Any) -> Any:
    """One of SGLang's serving objects with strict answers, and the same state.

    Returns:
        Another object, or the same if it serves none of these endpoints.
    """
    stock: Any = type(handler)
    kind = _strict_class(stock)
    if kind is stock:
        return handler
    strict: Any = object.__new__(kind)
    strict.__dict__ = vars(handler)
    if isinstance(strict, _Messages):
        strict.openai_serving_chat = make_strict(strict.openai_serving_chat)
    if isinstance(strict, _Responses):
        strict.response_store, strict.msg_store = KeptResponses(), KeptResponses()
    return strict


@cache
def _strict_class(kind: type) -> type:
    names = {each.__name__ for each in kind.__mro__}
    mixins = tuple(
        mixin
        for name, mixin in _MIXINS.items()
        if name in names and not issubclass(kind, mixin)
    )
    return type(f"Strict{kind.__name__}", (*mixins, kind), {}) if mixins else kind


# For mypy, the class of SGLang's that a mixin is put in front of.
_Stock: Any = object


class _Chat(_Stock):  # type: ignore[misc]
    """For ``OpenAIServingChat``."""

    def _build_chat_response(self, request: Any, *args: Any) -> Any:
        response = super()._build_chat_response(request, *args)
        _keep_texts(response)
        return response

    def _build_token_logprobs_from_raw(self, *args: Any) -> Any:
        tokens = super()._build_token_logprobs_from_raw(*args)
        _make_finite(tokens)
        return tokens


class _Completions(_Stock):  # type: ignore[misc]
    """For ``OpenAIServingCompletion``."""

    def _build_completion_response(self, request: Any, ret: Any, *args: Any) -> Any:
        if request.max_tokens == 0:
            for each in ret:  # SGLang computes a token that is not in the answer
                lists = ("output_token_logprobs", "output_top_logprobs")
                each["meta_info"] |= {name: [] for name in lists}
        response = super()._build_completion_response(request, ret, *args)
        _keep_texts(response)
        for choice in getattr(response, "choices", ()):
            if choice.logprobs is not None:
                _complete(vars(choice.logprobs), TextOffsets(), choice.text)
        return response

    async def _generate_completion_stream(
        self, adapted: Any, request: Any, *args: Any
    ) -> AsyncIterator[str]:
        stream = super()._generate_completion_stream(adapted, request, *args)
        offsets: dict[int, TextOffsets] = {}

        def completed(chunk: JsonObject) -> None:
            for choice in chunk.get("choices") or ():
                found = offsets.setdefault(choice["index"], TextOffsets())
                _complete(choice.get("logprobs") or {}, found, choice["text"])

        async for frame in stream:
            wanted = request.logprobs is not None
            yield _changed(frame, completed) if wanted else frame


class _Messages(_Stock):  # type: ignore[misc]
    """For ``AnthropicServing``.

    _sequences: the client's stop sequences, in the copy that serves its call.
    """

    openai_serving_chat: Any

    _sequences: Sequence[str] = ()

    async def _handle_non_streaming(
        self, chat_request: Any, anthropic_request: Any, *args: Any
    ) -> Any:
        one: Any = copy.copy(self)
        one._sequences = anthropic_request.stop_sequences or ()
        stock: Any = super(_Messages, one)
        return await stock._handle_non_streaming(chat_request, anthropic_request, *args)

    def _convert_to_chat_completion_request(self, given: Any) -> Any:
        chat = super()._convert_to_chat_completion_request(given)
        if given.thinking and get_serving().enable_strict_thinking:
            chat.custom_params = {BUDGET: given.thinking.budget_tokens}
        return chat

    def _convert_response(self, response: Any) -> Any:
        message = super()._convert_response(response)
        for block in message.content:
            if block.type == "thinking" and block.signature is None:
                block.signature = ""
        choice = response.choices[0] if response.choices else None
        matched = choice.matched_stop if choice is not None else None
        if matched in self._sequences and message.stop_reason == "end_turn":
            message.stop_reason, message.stop_sequence = "stop_sequence", matched
        return message

    def _error_response(
        self, status_code: int, error_type: str, *args: Any, **kwargs: Any
    ) -> Any:
        # SGLang passes types of its own on, such as BadRequestError.
        if error_type not in message_batches.ERROR_TYPES:
            error_type = message_batches.error_type(status_code)
        return super()._error_response(status_code, error_type, *args, **kwargs)

    async def _generate_anthropic_stream(
        self, adapted: Any, processed: Any, anthropic_request: Any, *args: Any
    ) -> AsyncIterator[str]:
        one: Any = copy.copy(self)
        one.openai_serving_chat = _WatchedChat(one.openai_serving_chat)
        stock: Any = super(_Messages, one)
        stream = stock._generate_anthropic_stream(
            adapted, processed, anthropic_request, *args
        )
        sequences = anthropic_request.stop_sequences or ()

        def completed(event: JsonObject) -> None:
            block = event.get("content_block") or {}
            if block.get("type") == "thinking":
                block.setdefault("signature", "")
            matched, delta = one.openai_serving_chat.matched_stop, event.get("delta")
            if event["type"] == "message_delta" and matched in sequences:
                assert delta is not None
                if delta.get("stop_reason") == "end_turn":
                    delta.update(stop_reason="stop_sequence", stop_sequence=matched)

        async for frame in stream:
            special = "message_delta" in frame or "content_block_start" in frame
            yield _changed(frame, completed) if special else frame


class _WatchedChat:
    """A chat handler whose stream tells which text has ended its answer."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self.matched_stop: object = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def _generate_chat_stream(self, *args: Any) -> AsyncIterator[str]:
        async for frame in self._handler._generate_chat_stream(*args):
            if '"matched_stop":"' in frame:
                for choice in json.loads(frame.removeprefix(_DATA))["choices"]:
                    self.matched_stop = choice.get("matched_stop")
            yield frame


class KeptResponses:
    """What SGLang keeps by response id. Each key sees its own, an admin all."""

    def __init__(self) -> None:
        self._by_owner: defaultdict[str, dict[str, Any]] = defaultdict(dict)

    def get(self, response_id: str, default: Any = None) -> Any:
        sees = (current_caller.get() or ANYBODY).sees
        seen = self._by_owner.values() if sees is None else [self._by_owner[sees]]
        return next((of[response_id] for of in seen if response_id in of), default)

    __getitem__ = get

    def __setitem__(self, response_id: str, kept: Any) -> None:
        own = self._by_owner[(current_caller.get() or ANYBODY).name]
        own.pop(response_id, None)
        own[response_id] = kept
        for old in list(own)[:-MOST_KEPT]:
            if getattr(own[old], "status", None) not in ("queued", "in_progress"):
                del own[old]


class _Responses(_Stock):  # type: ignore[misc]
    """For ``OpenAIServingResponses``."""

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        object.__setattr__(request, "__class__", _exact_limit(request.__class__))
        if (current_caller.get() or ANYBODY).role < Role.ADMIN:
            # What runs is known by its id, which must not be another client's.
            request.request_id = f"resp_{uuid.uuid4().hex}"
        if request.background and raw_request and await raw_request.is_disconnected():
            return self.create_error_response("The client has left.")  # as a flex call
        response = await super().create_responses(request, raw_request)
        if task := self.background_tasks.get(request.request_id):
            setattr(raw_request.state, GOING_ON, task)
        for item in getattr(response, "output", ()):
            for part in getattr(item, "content", None) or ():
                _make_finite(getattr(part, "logprobs", None) or ())
        return response

    async def _run_background_request(self, request: Any, *args: Any, **kw: Any) -> Any:
        one: Any = copy.copy(self)

        def fail(message: str) -> Any:
            kept = self.response_store.get(request.request_id)
            if kept.status != "cancelled":  # the code is that of SGLang's streams
                kept.error = {"code": "server_error", "message": message}
            return self.create_error_response(message)

        one.create_error_response = fail
        stock: Any = super(_Responses, one)
        return await stock._run_background_request(request, *args, **kw)


class _Transcriptions(_Stock):  # type: ignore[misc]
    """For ``OpenAIServingTranscription``."""

    async def _handle_non_streaming_request(self, *args: Any) -> Any:
        answer = await super()._handle_non_streaming_request(*args)
        # Some of SGLang's models tell no language, others this.
        if getattr(answer, "language", "") is None:
            answer.language = "auto"
        return answer


@cache
def _exact_limit(kind: type[BaseModel]) -> type[BaseModel]:
    """SGLang's request class, without the two tokens that it keeps back."""

    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> JsonObject:
        params: JsonObject = kind.to_sampling_params(  # type: ignore[attr-defined]
            self, *args, **kwargs
        )
        if self.max_output_tokens is not None:
            params["max_new_tokens"] = self.max_output_tokens
        return params

    fields = {"__module__": kind.__module__, "to_sampling_params": to_sampling_params}
    made: type[BaseModel] = type(kind.__name__, (kind,), fields)
    return made


_MIXINS: dict[str, type] = {
    "OpenAIServingChat": _Chat,
    "OpenAIServingCompletion": _Completions,
    "AnthropicServing": _Messages,
    "OpenAIServingResponses": _Responses,
    "OpenAIServingTranscription": _Transcriptions,
}


def _make_finite(tokens: Iterable[Any]) -> None:
    """Replace the infinite log probabilities of tokens and of those most likely there."""
    for token in tokens:
        for each in (token, *token.top_logprobs):
            each.logprob = max(each.logprob, IMPOSSIBLE)


def _keep_texts(response: Any) -> None:
    """Drop metadata that are no texts: which tokens were generated with which weights."""
    if (metadata := getattr(response, "metadata", None)) is not None:
        response.metadata = {k: v for k, v in metadata.items() if isinstance(v, str)}


def _complete(logprobs: JsonObject, offsets: TextOffsets, text: str) -> None:
    """Complete the log probabilities of a completion, as the clients' types have them.

    The first token of a prompt has none, for which these types have no null.
    """
    if not logprobs:
        return
    logprobs["text_offset"] = offsets.of(text, logprobs["tokens"])
    logprobs["token_logprobs"] = [
        0.0 if value is None else max(value, IMPOSSIBLE)
        for value in logprobs["token_logprobs"]
    ]
    logprobs["top_logprobs"] = [
        {
            k: IMPOSSIBLE if v is None else max(v, IMPOSSIBLE)
            for k, v in (top or {}).items()
        }
        for top in logprobs["top_logprobs"]
    ]


class TextOffsets:
    """Where in the text of a choice each of its tokens begins, in characters."""

    def __init__(self) -> None:
        self._rest = b""  # text in which no token was found yet
        self._ahead: list[str] = []  # tokens whose text has not come
        self._chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def of(self, text: str, tokens: Sequence[str]) -> list[int]:
        """The places of the next tokens, with the next part of the text, which may lag behind.

        A token that is a part of a character is a character for each byte.
        """
        self._rest += text.encode()
        ahead, self._ahead = self._ahead, []
        return [self._place(token) for token in (*ahead, *tokens)][len(ahead) :]

    def _place(self, token: str) -> int:
        place, rest = self._chars, self._rest
        if not rest:
            self._ahead.append(token)
            return place
        # Some tokenizers show a token without the space before it.
        spaced = (b" " + token.encode(),) if rest.startswith(b" ") else ()
        for raw in (token.encode(), _bytes_of(token), *spaced):
            if raw and (rest.startswith(raw) or raw.startswith(rest)):
                self._rest = rest[len(raw) :]
                self._chars += len(self._decoder.decode(rest[: len(raw)]))
                break  # else the text does not show it
        return place


def _bytes_of(token: str) -> bytes:
    try:
        return token.encode("latin-1")
    except UnicodeEncodeError:
        return b""


def _changed(frame: str, change: Callable[[JsonObject], None]) -> str:
    """A frame of a stream of events whose object was changed in place."""
    head, found, data = frame.partition(_DATA)
    if not found or data.strip() == "[DONE]":
        return frame
    content = json.loads(data)
    change(content)
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"{head}{_DATA}{text}\n\n"
