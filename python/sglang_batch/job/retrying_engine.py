"""Sends the requests of a job, and again a few times after an error of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..batch_api.protocol import error_body
from ..config import OfflineBatchConfig
from ..request import (
    BatchRequestInput,
    RequestOutput,
    Usage,
    Work,
    attempt_request_id,
    line_request_id,
)
from .engine import Engine, ForwardingEngine, Forwards, PreparedRequest
from .engine_time import Account, work_of

# HTTP statuses of errors that may not recur.
TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))
# Seconds before the second attempt. Each further pause is twice as long.
BACK_OFF_S = 1.0
# The code of an error that is no fault of the line: the server that computed its prompt
# is gone. So many of them are not counted as attempts.
PREFILL_LOST = "prefill_lost"
MOST_LOSSES = 5


@dataclass(frozen=True)
class _PreparedLine(Forwards):  # type: ignore[misc]
    """A line of the job, with all that the request has which the engine rendered from it.

    num_stored: tokens of its prompt if it was stored.
    """

    request: BatchRequestInput
    rid: str
    prepared: Any
    num_stored: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.prepared, name)

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt, as far as they are known."""
        return self.num_stored or len(self.prepared.input_ids or ())


class RetryingEngine(ForwardingEngine):
    """An :class:`~sglang_batch.job.engine.Engine` that retries transient errors.

    A line answered with a transient error is rendered and sent again, in at most
    ``config.max_line_attempts`` attempts, but not one whose answer was generated. A line whose
    prefill server is gone is sent again without an attempt being counted. A line without an
    answer ``config.line_timeout_s`` seconds after it began to run is aborted with HTTP 408.

    Attributes:
        in_flight: indices of the lines that are in the engine.
        num_retries: how often a line was sent again.
    """

    def __init__(
        self, engine: Engine, config: OfflineBatchConfig, account: Account | None = None
    ) -> None:
        super().__init__(engine)
        self._config = config
        self.in_flight: set[int] = set()
        self.num_retries = 0
        self._account = account
        self._joined: set[int] = set()

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest | RequestOutput:
        prepared = await self._engine.prepare(request, rid, tokenize=tokenize)
        if isinstance(prepared, RequestOutput):
            return prepared
        return _PreparedLine(request, rid, prepared)

    def stored(self, prepared: Any) -> bytes | None:
        return self._engine.stored(prepared.prepared)

    def restore(
        self,
        request: BatchRequestInput,
        rid: str,
        stored: bytes,
        input_ids: Sequence[int],
    ) -> PreparedRequest:
        prepared = self._engine.restore(request, rid, stored, input_ids)
        return _PreparedLine(request, rid, prepared, len(input_ids))

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        index = prepared.request.index
        account = self._account
        self.in_flight.add(index)
        if account is not None:
            account.enter()
        # Of a line that is stopped, all that is known is whether it had begun.
        work: Work | None = None
        try:
            output = await self._execute(prepared, replica)
            work = work_of(output)
        finally:
            self.in_flight.discard(index)
            if account is not None:
                if work is None and index in self._joined:
                    work = Work.of_sequence(prepared.num_tokens, 0, 0)
                account.leave(work)
            self._joined.discard(index)
        return output

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        def joined(numbers: list[int]) -> None:
            self._joined |= self.in_flight.intersection(numbers)
            on_joined(numbers)

        return self._engine.watch_job(job_id, joined)

    async def _execute(self, line: _PreparedLine, replica: int | None) -> RequestOutput:
        output = await self._attempt(line.prepared, line.rid, replica)
        pause_s, attempts, losses = BACK_OFF_S, 1, 0
        while output.status_code in TRANSIENT and not _is_final(output):
            if _is_code(output, PREFILL_LOST) and losses < MOST_LOSSES:
                losses += 1
            elif attempts < self._config.max_line_attempts:
                attempts += 1
            else:
                break
            self.num_retries += 1
            await asyncio.sleep(pause_s)
            if attempts > 1:
                pause_s *= 2
            # A rendered request is used up, and its id is finished for the scheduler.
            rid = attempt_request_id(line.rid, attempts + losses - 1)
            again = await self._engine.prepare(line.request, rid, tokenize=False)
            if isinstance(again, RequestOutput):
                return again
            output = await self._attempt(again, rid, replica)
        return output

    async def _attempt(
        self, prepared: Any, rid: str, replica: int | None
    ) -> RequestOutput:
        execution = self._engine.execute(prepared, replica=replica)
        seconds = self._config.line_timeout_s
        if seconds is None:
            return await execution
        task = asyncio.ensure_future(execution)
        left_s = seconds
        try:
            while True:
                await asyncio.wait((task,), timeout=max(left_s, 0.0))
                if task.done():
                    return task.result()
                if left_s <= 0:
                    break
                # It may have waited for most of the time.
                running_s = await self._engine.running_s()
                left_s = seconds - running_s.get(line_request_id(rid), 0.0)
        finally:
            task.cancel()
            await asyncio.wait((task,))
        return _error_output(
            rid,
            408,
            "line_timeout",
            f"This line had no answer within {seconds:g} seconds of its first step, the "
            "limit of this server (line_timeout_s).",
        )


def retrying(engine: Engine, config: OfflineBatchConfig) -> RetryingEngine:
    """``engine`` with attempts, which it may have already."""
    if isinstance(engine, RetryingEngine):
        return engine
    return RetryingEngine(engine, config)


def engine_died(rid: str, num_deaths: int) -> RequestOutput:
    """The answer to a line that took the engine down in each attempt."""
    return _error_output(
        rid,
        500,
        "engine_died",
        f"The engine died {num_deaths} times while it worked on this request, the last "
        "time on this request alone. There is no further attempt.",
    )


def _error_output(rid: str, status_code: int, code: str, message: str) -> RequestOutput:
    body = error_body(message, status_code=status_code, code=code)
    return RequestOutput(status_code, rid, msgspec.json.encode(body))


def _is_final(output: RequestOutput) -> bool:
    """Whether another attempt would take as long, or as many tokens, for the same end."""
    timed_out = output.status_code == 408 and _is_code(output, "line_timeout")
    return timed_out or output.usage != Usage()


def _is_code(output: RequestOutput, code: str) -> bool:
    return f'"{code}"'.encode() in output.body
