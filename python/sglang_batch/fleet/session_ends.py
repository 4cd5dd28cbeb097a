"""The two ends of a session: each command and each event arrives once, in order.

Calls between a head and a worker may be lost, delayed, doubled and reordered. Each end numbers
its messages, repeats each until the other end has it, and passes on only the next number that
it waits for. An end knows nothing of networks, and of clocks only the times that it is given.

A worker serves one session at a time. A higher one ends it, with everything that the worker
did for it; a lower one is refused. So a head that was replaced, or that was cut off for long
enough to count the worker as lost, hears nothing of it any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from .messages import Command, Event, Exchange, Reply, Session, SessionRefused

# Most commands, and most events, of one call.
MAX_PER_CALL = 1024

_Item = TypeVar("_Item")


class HeadEnd:
    """The head's end of a session with one worker."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._commands: deque[Command] = deque()
        self._first = 1  # number of the first command that the worker may lack
        self._sent = 0  # number of the last command that was in a call
        self._received = 0

    @property
    def has_unsent(self) -> bool:
        """Whether there are commands that have been in no call."""
        return self._first + len(self._commands) - 1 > self._sent

    def add(self, command: Command) -> None:
        self._commands.append(command)

    def call(self) -> Exchange:
        """A call with commands that have been in none, up to a limit."""
        begin = self._sent + 1 - self._first
        end = min(len(self._commands), begin + MAX_PER_CALL)
        commands = [self._commands[i] for i in range(begin, end)]
        first = self._sent + 1
        self._sent += len(commands)
        return Exchange(self.session, first, commands, self._received, 0.0)

    def waiting_call(self, wait_s: float) -> Exchange:
        """A call without commands, for the next events."""
        return Exchange(self.session, self._first, [], self._received, wait_s)

    def repeat(self) -> None:
        """Send all commands again that the worker may lack: a call has failed."""
        self._sent = self._first - 1

    def receive(self, reply: Reply) -> list[Event]:
        """The events of a reply that are new, in order."""
        if reply.session != self.session:
            return []
        while self._commands and self._first <= reply.applied:
            self._commands.popleft()
            self._first += 1
        self._sent = max(self._sent, self._first - 1)
        events = _next(reply.first, reply.events, self._received)
        self._received += len(events)
        return events


class WorkerEnd:
    """A worker's end of its sessions. ``session``: the one that is served, or None.

    Args:
        lease_s: seconds without a call of the head after which the session ends.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.session: Session | None = None
        self._highest: Session | None = None
        self._heard = 0.0
        self._begin()

    def _begin(self) -> None:
        self._applied = 0
        self._events: deque[Event] = deque()
        self._first = 1  # number of the first event that the head may lack

    def attach(self, session: Session, now: float) -> bool | SessionRefused:
        """Begin a session. Returns whether it is new, so that everything of the last one has
        to end.
        """
        if session == self.session:
            self._heard = now
            return False
        if self._highest is not None and session <= self._highest:
            return SessionRefused(self._highest)
        self.session = self._highest = session
        self._heard = now
        self._begin()
        return True

    def receive(self, call: Exchange, now: float) -> list[Command] | SessionRefused:
        """The commands of a call that are new, in order."""
        if (refusal := self.refusal(call.session)) is not None:
            return refusal
        self._heard = max(self._heard, now)
        while self._events and self._first <= call.received:
            self._events.popleft()
            self._first += 1
        commands = _next(call.first, call.commands, self._applied)
        self._applied += len(commands)
        return commands

    def add(self, event: Event) -> None:
        """Add an event. Without a session nobody hears it."""
        if self.session is not None:
            self._events.append(event)

    def refusal(self, session: Session) -> SessionRefused | None:
        """Why this session is not served, or None if it is."""
        if session == self.session:
            return None
        newer = self._highest is not None and self._highest > session
        return SessionRefused(self._highest if newer else None)

    @property
    def has_events(self) -> bool:
        """Whether there are events that the head may lack."""
        return bool(self._events)

    def reply(self) -> Reply:
        assert self.session is not None
        events = [self._events[i] for i in range(min(MAX_PER_CALL, len(self._events)))]
        return Reply(self.session, self._applied, self._first, events)

    def lapse(self, now: float) -> bool:
        """End the session if its lease has run out. Returns whether it did."""
        if self.session is None or now < self._heard + self.lease_s:
            return False
        self.session = None
        self._begin()
        return True


def _next(first: int, items: Sequence[_Item], last: int) -> list[_Item]:
    """Those of the items numbered from ``first`` that come directly after ``last``."""
    skip = last + 1 - first
    return list(items[skip:]) if skip >= 0 else []
