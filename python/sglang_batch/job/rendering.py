"""Renders a job's requests, each of them once: for the plan, and to be sent.

Rendered requests are kept until they are sent: the first ones in memory, all others on
disk. The prompts' tokens are on disk in any case.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..planner.requests import UNKNOWN, Int32s, Int64s, PlanRequests
from ..request import BatchRequestInput, RequestOutput, Requests, engine_request_id
from ..store.token_spool import RecordSpool, TokenSpool
from . import traces
from .engine import Engine, PreparedRequest

# For requests that declare no limit. Longer than any context.
NO_LIMIT = 1 << 24
# Requests rendered for the plan are kept in memory until they are sent, up to this number
# of requests and this number of prompt tokens in all. The others are on disk.
KEPT_REQUESTS = 1 << 13
KEPT_TOKENS = 1 << 21

T = TypeVar("T")
Indices = Sequence[int] | NDArray[np.int64]
# A request with its rendered form, or with its error if it cannot be rendered.
Rendered = tuple[BatchRequestInput, PreparedRequest | RequestOutput]


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks whose first failure cancels the rest, and is the one to report."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def in_order(work: Iterable[Awaitable[T]], most: int) -> AsyncGenerator[T]:
    """The results of ``work`` in its order, ``most`` of which runs at a time."""
    ahead: deque[asyncio.Future[T]] = deque()
    try:
        for each in work:
            ahead.append(asyncio.ensure_future(each))
            if len(ahead) == most:
                yield await ahead.popleft()
        while ahead:
            yield await ahead.popleft()
    finally:
        for task in ahead:
            task.cancel()


@dataclass(frozen=True, slots=True)
class Prompts:
    """The requests that could be rendered, in the form that the planner takes.

    numbers: int64 ``[n]``, the number of each request in the job.
    """

    numbers: Int64s
    requests: PlanRequests


@dataclass(eq=False)
class JobRenderer:
    """Renders the requests of one job.

    Args:
        render_lookahead: requests that :meth:`read` renders at the same time.
        expected_output_len: int32 by number, see :class:`~.planner.requests.PlanRequests`.

    Attributes:
        is_done: whether :meth:`read` has rendered everything.
    """

    job_id: str
    requests: Requests
    engine: Engine
    render_lookahead: int
    expected_output_len: Int32s | None = None

    def __post_init__(self) -> None:
        self._kept: dict[int, PreparedRequest] = {}
        self._spool: _Spool | None = None
        self._grown = asyncio.Event()
        self.is_done = False

    async def render(self, number: int) -> Rendered:
        """Render one request to be sent, by its number in the job."""
        request = self.requests[number]
        if (kept := self._kept.pop(number, None)) is not None:
            return request, kept
        if self._spool is not None:
            rid = engine_request_id(self.job_id, request.index)
            restored = self._spool.restore(self.engine, request, rid)
            if restored is not None:
                return request, restored
        return await self._render(number, tokenize=False)

    @contextmanager
    def spool(self, directory: Path | None) -> Iterator[None]:
        """Room on disk for rendered requests, below ``directory`` or the system's
        temporary directory, until the context is left."""
        with ExitStack() as stack:
            made = TemporaryDirectory(prefix="tokens-", dir=directory)
            place = Path(stack.enter_context(made))
            tokens = stack.enter_context(TokenSpool(place / "tokens.i32"))
            records = stack.enter_context(RecordSpool(place / "requests.bin"))
            self._spool = _Spool(tokens, records, len(self.requests))
            try:
                yield
            finally:
                self._spool = None

    @traces.span("render")
    async def read(
        self, numbers: Indices, on_rendered: Callable[[Rendered], None]
    ) -> None:
        """Render these requests with their tokens, inside of :meth:`spool`. ``on_rendered``
        is called for each, also for those that cannot be rendered and are left out."""
        spool = self._spool
        assert spool is not None
        work = (self._render(int(number), tokenize=True) for number in numbers)
        async with aclosing(in_order(work, self.render_lookahead)) as rendered:
            async for request, prepared in rendered:
                on_rendered((request, prepared))
                if isinstance(prepared, RequestOutput):
                    continue
                stored = None
                kept = len(spool) < KEPT_REQUESTS and spool.num_tokens <= KEPT_TOKENS
                if kept and not prepared.has_media:
                    self._kept[request.index] = prepared
                else:
                    stored = self.engine.stored(prepared)
                spool.append(request.index, prepared, stored)
                self._grown.set()
        self.is_done = True
        self._grown.set()

    async def until(self, num_requests: float, num_tokens: float) -> None:
        """Wait until :meth:`read` has so many requests or tokens, or has ended."""
        spool = self._spool
        assert spool is not None
        while not self.is_done:
            if len(spool) >= num_requests or spool.num_tokens >= num_tokens:
                return
            self._grown.clear()
            await self._grown.wait()

    def prompts(self) -> Prompts:
        """The requests that could be rendered so far."""
        assert self._spool is not None
        prompts = self._spool.prompts()
        if self.expected_output_len is None:
            return prompts
        expected = self.expected_output_len[prompts.numbers]
        requests = replace(prompts.requests, expected_output_len=expected)
        return replace(prompts, requests=requests)

    async def _render(self, number: int, *, tokenize: bool) -> Rendered:
        request = self.requests[number]
        rid = engine_request_id(self.job_id, request.index)
        return request, await self.engine.prepare(request, rid, tokenize=tokenize)


class _Spool:
    """Rendered requests on disk, in the order in which they were rendered."""

    def __init__(
        self, tokens: TokenSpool, records: RecordSpool, num_requests: int
    ) -> None:
        self._tokens = tokens
        self._records = records
        self._numbers = array("q")
        self._limits = array("i")
        self._place = np.full(num_requests, -1, np.int32)  # by number
        # The number of each adapter, in the order in which requests name them.
        self._adapters = {"": 0}
        self._adapter = array("i")
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def append(
        self, number: int, prepared: PreparedRequest, stored: bytes | None
    ) -> None:
        """Add a request. ``stored``: None if it is kept, or has to be rendered again."""
        input_ids = prepared.input_ids or ()
        self.num_tokens += len(input_ids)
        self._place[number] = len(self._numbers)
        self._numbers.append(number)
        self._tokens.append(input_ids, prepared.shareable_len, prepared.namespace)
        self._adapter.append(
            self._adapters.setdefault(prepared.adapter, len(self._adapters))
        )
        self._records.append(stored or b"")
        most = prepared.max_new_tokens
        limit = NO_LIMIT if most is None else min(most, NO_LIMIT)
        is_known = prepared.ignore_eos and limit < NO_LIMIT
        self._limits.extend((limit, limit if is_known else UNKNOWN))

    def restore(
        self, engine: Engine, request: BatchRequestInput, rid: str
    ) -> PreparedRequest | None:
        """A request that was stored, or None."""
        place = int(self._place[request.index])
        stored = self._records.read(place) if place >= 0 else b""
        if not stored:
            return None
        return engine.restore(request, rid, stored, self._tokens.read(place))

    def prompts(self) -> Prompts:
        """All requests so far."""
        limits = np.array(self._limits, np.int32).reshape(-1, 2)
        max_new_tokens, known = limits.T
        tokens, offsets = self._tokens.arrays()
        return Prompts(
            np.array(self._numbers, np.int64),
            PlanRequests(
                tokens[: offsets[-1]],
                offsets,
                max_new_tokens.copy(),
                known.copy(),
                np.array(self._adapter, np.int32) if len(self._adapters) > 1 else None,
            ),
        )
