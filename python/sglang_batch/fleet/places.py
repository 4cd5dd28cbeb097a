"""Where the workers of a fleet are, and how the head calls them.

A place is where one worker runs: a node of a cluster, or an offline server. What starts
there, starts again there when it is lost.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import InputError
from .messages import READ_ANSWER, encode


class WorkerPort:
    """Calls one worker. Any number of calls may run at a time.

    A call raises:
        WorkerLost: it will not answer this or any other call.
        WorkerUnusable: its answer breaks the protocol of this version.
        OSError: the call failed. Another one may succeed.

    Attributes:
        trusted: whether rendered requests, which are pickles, may be sent to it.
    """

    trusted = False

    async def ask(self, name: str, data: bytes) -> bytes:
        """Carry a call to :meth:`.WorkerHost.call`, and its answer back."""
        raise NotImplementedError

    async def call(self, name: str, message: object) -> Any:
        """The answer to a message by a method of :class:`.WorkerHost`."""
        data = await self.ask(name, encode(message))
        try:
            return READ_ANSWER[name](data)
        except InputError as error:
            raise WorkerUnusable(f"its answer to {name}: {error}") from None


class Place(Protocol):
    """Where one worker runs.

    name: for messages and tables.
    """

    @property
    def name(self) -> str: ...

    async def find(self) -> WorkerPort:
        """The worker here: the one that runs, or a new one once it has loaded.

        Raises:
            WorkerLost: it could not start. It may the next time.
            ConfigError: it never can, with this model and these options.
        """

    async def free(self) -> None:
        """End the worker here, if the head has started it."""


class WorkerLost(Exception):
    """A worker will not answer any more.

    Args:
        reason: for people.
        crashed: whether its engine failed, perhaps by one of its lines. False: its machine
            or the way there is gone, or it was asked to end.
    """

    def __init__(self, reason: str, *, crashed: bool) -> None:
        super().__init__(reason)
        self.reason, self.crashed = reason, crashed


class WorkerUnusable(Exception):
    """What a worker says cannot be used. It is left out, and the others continue."""
