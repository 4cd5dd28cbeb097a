"""What waits, as SGLang's load reports look at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .conductor import Conductor


class Backlogged(NamedTuple):
    """All waiting batch lines in one: the reports add up tokens and no more."""

    seqlen: int
    num_matched_prefix_tokens: int = 0


class WaitingView:
    """SGLang's waiting queue and the backlog behind it, in constant time."""

    def __init__(self, queue: list[Any], conductor: Conductor) -> None:
        self._queue = queue
        self._conductor = conductor

    def __len__(self) -> int:
        return len(self._queue) + self._conductor.num_waiting

    def __iter__(self) -> Iterator[Any]:
        yield from self._queue
        yield Backlogged(self._conductor.jobs.waiting_tokens)
