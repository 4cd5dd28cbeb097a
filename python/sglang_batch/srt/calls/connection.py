"""State of the calls of one tokenizer manager: its engine, and requests not sent yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from ..compat.server_types import TemplateManager
from ..engine.sglang_engine import SGLangEngine
from .call_items import Message


async def engine_of(
    manager: Any, templates: TemplateManager | None = None
) -> SGLangEngine:
    """The engine behind a tokenizer manager, connected once.

    Args:
        templates: what batches need. A server gives them before any call comes.
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
    """Send a message. If that fails, the reason is the answer to its request.

    Whoever waits for the answer does not wait for this call, and would wait for ever.
    """
    try:
        await send(message)
    except Exception as error:
        refused = isinstance(error, ValueError)
        status = HTTPStatus.BAD_REQUEST if refused else HTTPStatus.INTERNAL_SERVER_ERROR
        reason = FINISH_ABORT(str(error), status).to_json()
        manager._handle_abort_req(AbortReq(rid=message.rid, finished_reason=reason))


def abort_unsent(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """BEFORE hook on ``TokenizerManager.abort_request``: requests not sent yet end as
    they would in the scheduler's queue."""
    unsent = unsent_messages(manager)
    for each in list(unsent) if abort_all else [rid]:
        if unsent.pop(each, None) is not None:
            manager._handle_abort_req(AbortReq(rid=each))
