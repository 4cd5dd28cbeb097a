"""Rendering on the workers of a fleet: each takes a few lines whenever it has none left.

The head keeps a line as a worker rendered it, and any worker can run it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from ..errors import EngineError
from ..job import traces
from ..request import BatchRequestInput
from .messages import (
    RenderCall,
    RenderedLine,
    Rendering,
    RunLine,
    ids_of_bytes,
    ids_to_bytes,
)
from .places import WorkerLost, WorkerPort, WorkerUnusable

_NOT_YET = RenderedLine("", None, None, False, "", "", None, False, None)


@dataclass(frozen=True, slots=True)
class FleetLine:
    """A rendered line, as an ``engine.PreparedRequest``.

    rendering: that of a worker. By default the line's worker will render it.
    """

    request: BatchRequestInput
    rid: str
    rendering: RenderedLine = _NOT_YET

    @property
    def input_ids(self) -> list[int] | None:
        if self.rendering.input_ids is None:
            return None
        ids: list[int] = ids_of_bytes(self.rendering.input_ids).tolist()
        return ids

    shareable_len = property(attrgetter("rendering.shareable_len"))
    has_media = property(attrgetter("rendering.has_media"))
    adapter = property(attrgetter("rendering.adapter"))
    namespace = property(attrgetter("rendering.namespace"))
    max_new_tokens = property(attrgetter("rendering.max_new_tokens"))
    ignore_eos = property(attrgetter("rendering.ignore_eos"))

    def stored(self) -> bytes | None:
        """The line without its tokens, for :func:`restored`. None: render it again."""
        rendering = self.rendering
        if rendering.stored is None:
            return None
        return _encode(msgspec.structs.replace(rendering, rid="", input_ids=None))

    def command(self, job_id: str, replica: int, *, trusted: bool) -> RunLine:
        """The command that runs the line. ``trusted``: the worker may be sent objects pickled
        by another.
        """
        rendering = self.rendering if trusted else _NOT_YET
        stored, trace = rendering.stored, traces.headers()
        ids = (stored and rendering.input_ids) or b""
        return RunLine(job_id, self.rid, self.request, replica, stored, ids, trace)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RenderedLine).decode


def restored(
    request: BatchRequestInput, rid: str, stored: bytes, input_ids: Sequence[int]
) -> FleetLine:
    """The line of :meth:`FleetLine.stored`, with the id ``rid`` from now on."""
    ids = ids_to_bytes(list(input_ids))
    return FleetLine(
        request, rid, msgspec.structs.replace(_decode(stored), rid=rid, input_ids=ids)
    )


# Lines of one call: enough that the call costs little of their 0.7 ms each.
MAX_BATCH = 32
# Calls of a worker at a time: the next is there when one ends.
CALLS_PER_WORKER = 2
_RETRY_S = 0.2

_Waiting = tuple[str, BatchRequestInput, asyncio.Future[Rendering]]


class FleetRenderer:
    """Lines that wait to be rendered, and the workers that take them."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._more = asyncio.Event()
        self._num_calls = 0

    async def render(self, request: BatchRequestInput, rid: str) -> Rendering:
        """Render one line, with its tokens.

        Raises:
            EngineError: no worker is left, see :meth:`fail`.
        """
        future: asyncio.Future[Rendering] = asyncio.get_running_loop().create_future()
        self._waiting.append((rid, request, future))
        self._more.set()
        return await future

    async def serve(self, port: WorkerPort) -> None:
        """Have a worker render, until this is cancelled or the worker is lost. Raises
        WorkerUnusable if it answers something else: others render its lines.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(CALLS_PER_WORKER):
                    group.create_task(self._serve(port))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def fail(self, reason: str) -> None:
        """No worker is left: all that waits fails."""
        while self._waiting:
            _, _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(EngineError(reason))

    async def _serve(self, port: WorkerPort) -> None:
        self._num_calls += 1
        try:
            while True:
                while not self._waiting:
                    self._more.clear()
                    await self._more.wait()
                await asyncio.sleep(0)  # more lines may come at the same time
                share = -(-len(self._waiting) // max(1, self._num_calls))
                batch: list[_Waiting] = []
                while self._waiting and len(batch) < min(MAX_BATCH, share):
                    waiting = self._waiting.popleft()
                    if not waiting[2].done():  # its job may have been stopped
                        batch.append(waiting)
                if batch and not await self._render(port, batch):
                    return
        finally:
            self._num_calls -= 1

    async def _render(self, port: WorkerPort, batch: list[_Waiting]) -> bool:
        """Have a worker render lines. Returns whether it can be asked again."""
        call = RenderCall([rid for rid, _, _ in batch], [line for _, line, _ in batch])
        try:
            renderings: list[Rendering] = await port.call("render", call)
            if [each.rid for each in renderings] != call.rids:
                raise WorkerUnusable("it renders other lines than it was sent")
        except BaseException as error:
            self._waiting.extendleft(reversed(batch))
            self._more.set()
            if isinstance(error, WorkerLost):
                return False
            if not isinstance(error, OSError):
                raise
            await asyncio.sleep(_RETRY_S)
            return True
        for (_, _, future), rendering in zip(batch, renderings, strict=True):
            if not future.done():
                future.set_result(rendering)
        return True
