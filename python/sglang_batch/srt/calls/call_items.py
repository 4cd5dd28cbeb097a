"""Prompts of calls on their way through one tokenizer manager: as items of a job, and sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeAlias

from sglang.srt.managers.io_struct import (
    AbortReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from ...job.rendering import NO_LIMIT
from ...request import RequestOutput, Usage
from ..compat.server_types import EngineRequest, JsonObject, TemplateManager
from ..engine.sglang_engine import SGLangEngine, namespace_of, shareable_len

Message: TypeAlias = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
"""A request as the scheduler gets it."""


class CallItem:
    """A prepared request of a job, which SGLang's own code answers.

    obj: the caller's request for this prompt.
    message: the request as the scheduler gets it.
    over: its outcome, once it has one. The job counts it, and its caller gets the answer
        from SGLang.
    """

    has_media = False  # calls with media are not planned

    def __init__(self, obj: EngineRequest, message: Message) -> None:
        self.obj = obj
        self.message = message
        self.shareable_len = shareable_len(message)
        self.adapter = message.lora_id or ""
        self.namespace = namespace_of(message)
        self.max_new_tokens, self.ignore_eos = output_limits(message)
        self.over: asyncio.Future[RequestOutput] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def input_ids(self) -> list[int]:
        return list(self.message.input_ids or ())

    async def watch(
        self, answers: AsyncGenerator[JsonObject]
    ) -> AsyncGenerator[JsonObject]:
        """SGLang's answers to this request. The last one, known by its content, sets
        :attr:`over`."""
        try:
            async for answer in answers:
                is_last = answer["meta_info"].get("finish_reason") is not None
                if is_last or not getattr(self.obj, "stream", False):
                    self._settle(200, answer)
                yield answer
        finally:
            self._settle(500, None)
            await answers.aclose()

    def _settle(self, status_code: int, answer: JsonObject | None) -> None:
        if self.over.done():
            return
        info: Any = answer["meta_info"] if answer is not None else {}
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        usage = Usage(*(int(info.get(name) or 0) for name in names))
        self.over.set_result(RequestOutput(status_code, self.message.rid, b"", usage))


def output_limits(message: Message) -> tuple[int, bool]:
    """Most tokens that a request may generate, and whether it generates exactly these."""
    if not isinstance(message, TokenizedGenerateReqInput):
        return 1, True  # an embedding: only its prompt is computed
    params = message.sampling_params
    most = params.max_new_tokens
    if most in (0, 1):
        return 1, True  # one token, or a prompt's logprobs: it cannot end earlier
    if most is None:
        return NO_LIMIT, False
    return min(int(most), NO_LIMIT), bool(params.ignore_eos)


def share_prefixes(messages: list[Message]) -> bool:
    """Whether equal tokens of these requests, in one namespace, have equal KV.

    Those of media or of embedded inputs do not, and a plan only has their tokens.
    """
    return all(
        message.input_ids is not None
        and message.mm_inputs is None
        and not any(getattr(message, name, None) for name in _ELSEWHERE)
        for message in messages
    )


# Fields of requests whose KV, or whose place, is not that of their tokens.
_ELSEWHERE = (
    *("input_embeds", "positional_embed_overrides", "session_id", "session_params"),
    *("token_indices_to_pool", "token_type_ids", "multi_item_delimiter_indices"),
)


async def engine_of(
    manager: Any, templates: TemplateManager | None = None
) -> SGLangEngine:
    """The engine behind a tokenizer manager, connected once.

    templates: of batches. A server gives them before any call comes.
    """
    if not hasattr(manager, "offline_engine"):
        manager.offline_engine = SGLangEngine(manager, templates)
    engine: SGLangEngine = manager.offline_engine
    if not engine.is_connected:
        await engine.connect()
    return engine


def unsent_messages(manager: Any) -> dict[str, Message]:
    """Messages that wait for their turn, by id. The scheduler does not know them yet."""
    messages: dict[str, Message] = vars(manager).setdefault("offline_unsent", {})
    return messages


def passing(manager: Any) -> set[str]:
    """Ids of messages that :func:`send` passes to SGLang."""
    rids: set[str] = vars(manager).setdefault("offline_passing", set())
    return rids


async def send(manager: Any, message: Message) -> None:
    """Send a message of a job at once, whatever its id."""
    rids = passing(manager)
    rids.add(message.rid)
    try:
        await send_or_refuse(manager, message, manager._send_one_request)
    finally:
        rids.discard(message.rid)


async def send_or_refuse(
    manager: Any, message: Message, send: Callable[[Message], Awaitable[None]]
) -> None:
    """Send a message. If that fails, the reason is the answer to its request, for which
    somebody waits."""
    try:
        await send(message)
    except Exception as error:
        refused = isinstance(error, ValueError)
        status = HTTPStatus.BAD_REQUEST if refused else HTTPStatus.INTERNAL_SERVER_ERROR
        reason = FINISH_ABORT(str(error), status).to_json()
        manager._result_dispatcher(AbortReq(rid=message.rid, finished_reason=reason))


def abort_unsent(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """BEFORE hook on ``TokenizerManager.abort_request``: requests not sent yet end as
    they would in the scheduler's queue."""
    unsent = unsent_messages(manager)
    for each in list(unsent) if abort_all else [rid]:
        if unsent.pop(each, None) is not None:
            manager._result_dispatcher(AbortReq(rid=each))
