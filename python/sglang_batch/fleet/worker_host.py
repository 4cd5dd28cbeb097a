"""A worker: carries out the commands of its head with the engine in its process.

All calls must come from the engine's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from .. import __version__
from ..job import traces
from ..job.engine import Engine
from ..request import BatchRequestInput, RequestOutput
from . import plan_bytes
from .messages import (
    READ_CALL,
    AbortLine,
    About,
    Broken,
    CloseJob,
    Command,
    EndLine,
    EngineQuery,
    Event,
    Exchange,
    Leaving,
    LineAnswer,
    LinesJoined,
    OpenJob,
    RenderCall,
    RenderedLine,
    Rendering,
    Reply,
    RunLine,
    Session,
    SessionRefused,
    SetPriority,
    encode,
    ids_of_bytes,
    ids_to_bytes,
    loop_time,
)
from .session_ends import WorkerEnd

logger = logging.getLogger(__name__)

# A worker stops so long after the last call of its head, and the head counts a worker as
# lost so long after its last reply. Longer than the pauses of a busy machine.
LEASE_S = 8.0
# So long after an event, a reply waits for others: about a step of an engine.
GATHER_S = 0.01


class WorkerHost:
    """Serves one head at a time with ``engine``.

    Args:
        name: of the worker, for messages.
        lease_s: seconds without a call of the head after which all lines are aborted.
        trusts: whether rendered requests, which are pickles, are taken from the head.
        is_closing: whether the process of this worker is about to end.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        lease_s: float = LEASE_S,
        *,
        trusts: bool = True,
        is_closing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._trusts = trusts
        self._is_closing = is_closing
        self._engine = engine
        self._name = name
        self._end = WorkerEnd(lease_s)
        self._changed = asyncio.Event()
        self._lines: dict[str, asyncio.Task[None]] = {}
        # Jobs that were opened, and whether the engine tells which of their lines run.
        self._jobs: dict[str, bool] = {}
        self._last_control: asyncio.Task[None] | None = None
        self._resetting = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._leaving: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether lines run, or the head has not heard of all that ended."""
        return bool(self._lines) or self._end.has_events

    @property
    def is_attached(self) -> bool:
        return self._end.session is not None

    async def call(self, name: str, data: bytes) -> bytes:
        """Answer an encoded call of one of the names of ``messages.READ_CALL``. Raises
        InputError for bytes that are no message of this version.
        """
        message = READ_CALL[name](data)
        return encode(await getattr(self, name)(message))

    async def attach(self, session: Session) -> About | SessionRefused:
        """Begin a session. All that the last one began has ended when this returns."""
        async with self._resetting:
            begun = self._end.attach(session, loop_time())
            if isinstance(begun, SessionRefused):
                return begun
            if begun:
                await self._reset()
                if self._leaving is not None:
                    self._emit(Leaving(self._leaving))
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch_lease())
        return self._about()

    async def exchange(self, call: Exchange) -> Reply | SessionRefused:
        """Take commands, and reply with events, after ``call.wait_s`` at the latest."""
        commands = self._end.receive(call, loop_time())
        if isinstance(commands, SessionRefused):
            return commands
        if self._leaving is None and self._is_closing():
            self.leave("its server is about to end")
        for command in commands:
            self._apply(command)
        if call.wait_s > 0 and not self._end.has_events:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), call.wait_s)
                await asyncio.sleep(GATHER_S)
        return self._end.refusal(call.session) or self._end.reply()

    async def render(self, call: RenderCall) -> list[Rendering]:
        """Render lines, in their order. One that cannot be rendered is answered."""
        renderings: list[Rendering] = []
        for rid, line in zip(call.rids, call.lines, strict=True):
            renderings.append(await self._render(rid, line))
        return renderings

    async def query(self, query: EngineQuery) -> object:
        """What the engine says of itself."""
        if query.what == "kv_use":
            return await self._engine.kv_use()
        if query.what == "running_tree":
            return await self._engine.running_tree(query.limit)
        return await self._engine.running_s()

    def leave(self, reason: str) -> None:
        """Tell the head that this worker will end soon: it should send no more."""
        self._leaving = reason
        self._emit(Leaving(reason))

    async def close(self) -> None:
        """End all lines. No call may follow."""
        if self._watching is not None:
            self._watching.cancel()
        async with self._resetting:
            await self._reset()

    def _apply(self, command: Command) -> None:
        match command:
            case OpenJob():
                self._control(partial(self._open_job, command))
            case SetPriority():
                self._control(
                    partial(self._engine.set_priority, command.job_id, command.priority)
                )
            case CloseJob():
                self._control(partial(self._close_job, command.job_id))
            case RunLine():
                task = asyncio.create_task(self._run(command, self._last_control))
                self._lines[command.rid] = task
                task.add_done_callback(lambda _: self._lines.pop(command.rid, None))
            case AbortLine():
                if (line := self._lines.get(command.rid)) is not None:
                    line.cancel()
            case EndLine():
                self._engine.end_early(command.rid)

    def _control(self, act: Callable[[], Awaitable[None]]) -> None:
        """Do this after all that was asked before."""
        self._last_control = asyncio.create_task(self._act(act, self._last_control))

    async def _act(
        self, act: Callable[[], Awaitable[None]], before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait((before,))
        try:
            await act()
        except Exception as error:
            self._broken(error)

    async def _open_job(self, command: OpenJob) -> None:
        job_id = command.job_id
        if job_id not in self._jobs:
            self._jobs[job_id] = self._engine.watch_job(
                job_id, lambda numbers: self._emit(LinesJoined(job_id, numbers))
            )
        plans = await asyncio.to_thread(
            lambda: [plan_bytes.plan_of(data) for data in command.plans]
        )
        await self._engine.open_job(job_id, plans)

    async def _close_job(self, job_id: str) -> None:
        if self._jobs.pop(job_id, None) is not None:
            await self._engine.close_job(job_id)

    async def _run(self, command: RunLine, before: asyncio.Task[None] | None) -> None:
        # Without any parent, SGLang would trace each line.
        unsampled = {"traceparent": f"00-{command.job_id[-32:]}-{1:016x}-00"}
        traces.enter(command.trace or unsampled)
        try:
            if before is not None:
                await asyncio.wait((before,))
            output = await self._output(command)
        except Exception as error:
            self._broken(error)
        else:
            self._emit(LineAnswer.of(command.rid, output))

    async def _output(self, command: RunLine) -> RequestOutput:
        request, rid = command.line, command.rid
        if command.stored is None or not self._trusts:
            prepared = await self._engine.prepare(request, rid, tokenize=False)
            if isinstance(prepared, RequestOutput):
                return prepared
        else:
            ids = ids_of_bytes(command.input_ids).tolist()
            prepared = self._engine.restore(request, rid, command.stored, ids)
        if not self._jobs.get(command.job_id, True):
            # The engine does not tell when lines begin to run.
            self._emit(LinesJoined(command.job_id, [request.index]))
        replica = command.replica if self._engine.num_replicas > 1 else None
        return await self._engine.execute(prepared, replica)

    async def _render(self, rid: str, line: BatchRequestInput) -> Rendering:
        prepared = await self._engine.prepare(line, rid, tokenize=True)
        if isinstance(prepared, RequestOutput):
            return LineAnswer.of(rid, prepared)
        return RenderedLine(
            rid,
            ids_to_bytes(prepared.input_ids),
            prepared.shareable_len,
            prepared.has_media,
            prepared.adapter,
            prepared.namespace,
            prepared.max_new_tokens,
            prepared.ignore_eos,
            self._engine.stored(prepared) if self._trusts else None,
        )

    def _emit(self, event: Event) -> None:
        self._end.add(event)
        self._changed.set()

    def _broken(self, error: Exception) -> None:
        logger.error("Worker %s: the engine failed", self._name, exc_info=error)
        self._emit(Broken(f"{type(error).__name__}: {error}"))

    async def _watch_lease(self) -> None:
        while True:
            await asyncio.sleep(self._end.lease_s / 8)
            if not self._end.lapse(loop_time()):
                continue
            async with self._resetting:
                logger.warning(
                    "Worker %s: no word of the head for %g seconds; its %d lines stop",
                    self._name,
                    self._end.lease_s,
                    len(self._lines),
                )
                if self._end.session is None:
                    await self._reset()

    async def _reset(self) -> None:
        """End all that the last session began."""
        self._changed.set()
        tasks = [*self._lines.values()]
        for task in tasks:
            task.cancel()
        if self._last_control is not None:
            tasks.append(self._last_control)
        if tasks:
            await asyncio.wait(tasks)
        self._last_control = None
        for job_id in [*self._jobs]:
            await self._close_job(job_id)

    def _about(self) -> About:
        engine = self._engine
        return About(
            self._name,
            __version__,
            tuple(engine.model_names),
            engine.num_replicas,
            engine.default_max_inflight,
            engine.max_running_requests,
            plan_bytes.to_bytes(engine.machine),
            self._end.lease_s,
        )
