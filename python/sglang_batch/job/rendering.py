"""Renders a job's requests: all of them for the plan, then each one to be sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine import Engine, PreparedRequest
from ..planner.requests import UNKNOWN, Int64s, PlanRequests
from ..request import BatchRequestInput, RequestOutput, engine_request_id
from ..store.token_spool import TokenSpool

# For requests that declare no limit. Longer than any context.
NO_LIMIT = 1 << 24
# Requests rendered for the plan are kept until they are sent, up to this number of
# requests and this number of prompt tokens in all. The others are rendered again.
KEPT_REQUESTS = 1 << 12
KEPT_TOKENS = 1 << 21

Indices = Sequence[int] | NDArray[np.int64]
# A request with its rendered form, or with its error if it cannot be rendered.
Rendered = tuple[BatchRequestInput, PreparedRequest | RequestOutput]


class Requests(Protocol):
    """The requests of a job, by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> BatchRequestInput: ...


@dataclass(frozen=True, slots=True)
class Prompts:
    """The requests that could be rendered, in the form that the planner takes.

    numbers: int64 ``[n]``, the number of each request in the job.
    """

    numbers: Int64s
    requests: PlanRequests


class JobRenderer:
    """Renders the requests of one job.

    Args:
        render_lookahead: requests that :meth:`prompts` renders at the same time.
    """

    def __init__(
        self, job_id: str, requests: Requests, engine: Engine, render_lookahead: int
    ) -> None:
        self._job_id = job_id
        self._requests = requests
        self._engine = engine
        self._render_lookahead = render_lookahead
        self._kept: dict[int, PreparedRequest] = {}

    async def render(self, number: int) -> Rendered:
        """Render one request to be sent, by its number in the job."""
        if (kept := self._kept.pop(number, None)) is not None:
            return self._requests[number], kept
        return await self._render(number, tokenize=False)

    @asynccontextmanager
    async def prompts(
        self,
        numbers: Indices,
        directory: Path | None,
        on_rendered: Callable[[Rendered], None],
    ) -> AsyncIterator[Prompts]:
        """Render these requests with their tokens.

        The tokens are on disk, below ``directory`` or the system's temporary
        directory, until the context is left. ``on_rendered`` is called for each
        request, also for those that cannot be rendered and are left out.
        """
        planned: list[int] = []
        limits: list[tuple[int, int]] = []
        num_tokens = 0
        with (
            TemporaryDirectory(prefix="tokens-", dir=directory) as temporary,
            TokenSpool(Path(temporary) / "tokens.i32") as spool,
        ):
            async with aclosing(self._render_in_order(numbers)) as rendered:
                async for request, prepared in rendered:
                    on_rendered((request, prepared))
                    if isinstance(prepared, RequestOutput):
                        continue
                    input_ids = prepared.input_ids or ()
                    spool.append(input_ids)
                    num_tokens += len(input_ids)
                    if num_tokens <= KEPT_TOKENS and len(planned) < KEPT_REQUESTS:
                        self._kept[request.index] = prepared
                    limits.append(_output_limits(prepared))
                    planned.append(request.index)
            max_new_tokens, known = np.array(limits, np.int32).reshape(-1, 2).T
            yield Prompts(
                np.asarray(planned, dtype=np.int64),
                PlanRequests(*spool.arrays(), max_new_tokens.copy(), known.copy()),
            )

    async def _render_in_order(self, numbers: Indices) -> AsyncGenerator[Rendered]:
        """Render several requests at a time, and yield them in the given order."""
        ahead: deque[asyncio.Task[Rendered]] = deque()
        try:
            for number in numbers:
                render = self._render(int(number), tokenize=True)
                ahead.append(asyncio.ensure_future(render))
                if len(ahead) == self._render_lookahead:
                    yield await ahead.popleft()
            while ahead:
                yield await ahead.popleft()
        finally:
            for task in ahead:
                task.cancel()

    async def _render(self, number: int, *, tokenize: bool) -> Rendered:
        request = self._requests[number]
        rid = engine_request_id(self._job_id, request.index)
        return request, await self._engine.prepare(request, rid, tokenize=tokenize)


def _output_limits(prepared: PreparedRequest) -> tuple[int, int]:
    """A request's ``max_new_tokens``, and its output length or ``UNKNOWN``."""
    limit = NO_LIMIT
    if prepared.max_new_tokens is not None:
        limit = min(prepared.max_new_tokens, NO_LIMIT)
    return limit, limit if prepared.ignore_eos and limit < NO_LIMIT else UNKNOWN
