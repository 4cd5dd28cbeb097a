"""``service_tier: "flex"``: online calls that run in the gaps that others leave.

They wait while more than a small share of the running requests would be theirs, next to
batches and ordinary calls. One that waits for long is refused, as at OpenAI.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from ...batch_api import protocol as api
from ...errors import ApiError
from ..runner import BatchRunner
from .calls import error_at, path_of, with_whole_body

# OpenAI's endpoints that have the field.
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# Those that are refused for wrong budgets, too. The last one is a chat.
_OTHER_PATHS = ("/v1/messages", "/invocations")
# Their share of running requests next to others, how long a call waits, and seconds until
# the engine is asked again how many lines run.
SHARE = 0.05
PATIENCE_S = 60.0
_LOOK_S = 0.05
_COUNT_S = 2.0
_REFUSAL = (
    "Resource unavailable: the server has no room for a flex call now. Try again later, "
    'or with "service_tier": "default".'
)

# In a call's state, the task in which it runs on after its answer, and counts.
GOING_ON = "offline_batch_going_on"


class FlexCalls:
    """The layer around the routes that answer online calls, inside that of the keys."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_online = self._num_flex = 0
        self._num_lines, self._counted_at = 0, -math.inf
        self._first_in_line = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope) if scope.get("method") == "POST" else ""
        if path not in PATHS and path not in _OTHER_PATHS:
            await self._app(scope, receive, send)
            return
        body, receive = await with_whole_body(receive)
        if wrong := api.wrong_budget(path, _fields(body, "thinking")):
            error = ApiError(400, ": ".join(wrong), param=wrong[0], retry=False)
            await error_at(scope, error)(scope, receive, send)
            return
        is_flex = (
            path in PATHS and _fields(body, '"flex"').get("service_tier") == "flex"
        )
        if is_flex:
            runner = scope["app"].state.offline_batch_service.runner
            try:
                async with asyncio.timeout(PATIENCE_S), self._first_in_line:
                    while not await self._has_room(runner):
                        await asyncio.sleep(_LOOK_S)
            except TimeoutError:
                error = ApiError(429, _REFUSAL, code="resource_unavailable")
                await error_at(scope, error)(scope, receive, send)
                return
        self._num_flex += is_flex
        self._num_online += not is_flex
        try:
            await self._app(scope, receive, send)
            if (task := scope.get("state", {}).get(GOING_ON)) is not None:
                await asyncio.wait([task])
        finally:
            self._num_flex -= is_flex
            self._num_online -= not is_flex

    async def _has_room(self, runner: BatchRunner) -> bool:
        most: int = runner.engine.max_running_requests
        running = most
        if runner.num_in_engine:
            # KV may have room for far fewer than can run.
            if time.monotonic() - self._counted_at > _COUNT_S:
                self._num_lines = len(await runner.engine.running_s())
                self._counted_at = time.monotonic()
            running = min(most, self._num_lines)
        elif not self._num_online:
            return self._num_flex < most
        most = min(int(SHARE * running), most - self._num_online)
        return self._num_flex < max(1, most)


def _fields(body: bytes, text: str) -> dict[str, Any]:
    """The fields of a body with a text in it, none of others."""
    try:
        fields = msgspec.json.decode(body) if text.encode() in body else None
    except (msgspec.DecodeError, RecursionError):
        return {}  # the route says what is wrong
    return fields if isinstance(fields, dict) else {}
