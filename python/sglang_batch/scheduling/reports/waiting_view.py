"""The waiting requests, as SGLang's load reports see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..open_jobs import OpenJobs


class BackloggedTokens(NamedTuple):
    """All waiting requests of jobs as one: load reports only add up tokens."""

    seqlen: int
    num_matched_prefix_tokens: int = 0


class WaitingView:
    """SGLang's waiting queue followed by the backlog of all jobs.

    Its length is exact. The backlog is a single item, so iterating costs no more with a
    hundred thousand requests than with ten.
    """

    def __init__(
        self, queue: Sequence[object], jobs: OpenJobs, num_offloaded: int
    ) -> None:
        self._queue = queue
        self._jobs = jobs
        self._num_offloaded = num_offloaded

    def __len__(self) -> int:
        return len(self._queue) + self._jobs.num_waiting + self._num_offloaded

    def __iter__(self) -> Iterator[object]:
        yield from self._queue
        yield BackloggedTokens(self._jobs.waiting_tokens)
