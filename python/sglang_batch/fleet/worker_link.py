"""The head's link to one worker, from its attachment until it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from .messages import About, Command, Event, Exchange, Session, SessionRefused
from .places import Loss, WorkerLost, WorkerPort
from .session_ends import HeadEnd

# A call waits so long for an event, as a share of the lease.
_WAIT_SHARE = 1 / 4
# Seconds before a failed call is repeated.
_RETRY_S = 0.2
# So long after a command, a call waits for others.
_GATHER_S = 0.002


class Superseded(Exception):
    """A worker serves another head, which began later."""

    def __init__(self, session: Session) -> None:
        super().__init__(f"epoch {session.epoch}")


class WorkerLink:
    """Sends commands to a worker and passes on its events, each once and in order.

    Args:
        on_event: called with each event.

    Attributes:
        about: the worker, once it is attached.
    """

    about: About

    def __init__(
        self, port: WorkerPort, session: Session, on_event: Callable[[Event], None]
    ) -> None:
        self.port = port
        self._end = HeadEnd(session)
        self._on_event = on_event
        self._commands = asyncio.Event()
        self._silence_s = 0.0
        self._heard = 0.0

    async def attach(self, patience_s: float) -> None:
        """Begin the session.

        Args:
            patience_s: so long, calls are repeated that fail.

        Raises:
            WorkerLost: the worker does not answer.
            Superseded: it serves a later head.
        """
        deadline = _now() + patience_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    found = await self.port.attach(self._end.session)
                break
            except (OSError, TimeoutError) as error:
                if _now() >= deadline:
                    raise WorkerLost(
                        f"no answer in {patience_s:g} s ({_reason(error)})",
                        crashed=False,
                    ) from None
            await asyncio.sleep(_RETRY_S)
        if isinstance(found, SessionRefused):
            raise self._refusal(found)
        self.about = found
        self._silence_s = found.lease_s
        self._heard = _now()

    def send(self, command: Command) -> None:
        """Send a command with the next call. Without a worker, nobody hears it."""
        self._end.add(command)
        self._commands.set()

    async def run(self) -> Loss:
        """Exchange calls until the worker is lost. Returns why.

        Raises:
            Superseded: it serves a later head.
        """
        tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._talk())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done = next(task for task in tasks if task.done())
            done.result()
            raise AssertionError("both run until they fail")
        except WorkerLost as lost:
            return lost.loss
        finally:
            await cancel_all(tasks)

    async def _listen(self) -> None:
        """Always have a call with the worker, which waits for its next event."""
        while True:
            wait_s = _WAIT_SHARE * self._silence_s
            await self._call(self._end.waiting_call(wait_s))

    async def _talk(self) -> None:
        """Send commands at once, one call after the other."""
        while True:
            await self._commands.wait()
            self._commands.clear()
            await asyncio.sleep(_GATHER_S)  # take those along that come with it
            while self._end.has_unsent:
                call = self._end.call()
                applied = await self._call(call)
                if applied < call.first + len(call.commands) - 1:
                    self._end.repeat()

    async def _call(self, call: Exchange) -> int:
        """One exchange. Returns the last command that the worker has, as far as known."""
        try:
            async with asyncio.timeout_at(self._heard + self._silence_s):
                reply = await self.port.exchange(call)
        except (OSError, TimeoutError) as error:
            if _now() - self._heard >= self._silence_s:
                raise WorkerLost(
                    f"no answer in {self._silence_s:g} s ({_reason(error)})",
                    crashed=False,
                ) from None
            await asyncio.sleep(_RETRY_S)
            return 0
        if isinstance(reply, SessionRefused):
            raise self._refusal(reply)
        self._heard = _now()
        for event in self._end.receive(reply):
            self._on_event(event)
        return reply.applied

    def _refusal(self, refused: SessionRefused) -> Exception:
        theirs = refused.session
        if theirs is not None and theirs.epoch > self._end.session.epoch:
            return Superseded(theirs)
        return WorkerLost("it has started anew", crashed=theirs is None)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end. Their errors count as seen."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
