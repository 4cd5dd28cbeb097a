"""Ends samples of rollouts early, so that their answers are the tokens so far."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ...request import line_request_id
from ..compat.server_types import TokenizerManager

# Seconds between two looks whether a request that is to end was sent.
_NOT_SENT_S = 0.01


class EarlyEnds:
    """The samples of one tokenizer manager that are to end, before and while they run."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        # The present request of each sample, by the id of its first one.
        self._executing: dict[str, str] = {}
        self._wanted: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def end(self, rid: str) -> None:
        """End a sample now, or as soon as it is sent."""
        line = line_request_id(rid)
        if line not in self._wanted:
            self._wanted.add(line)
            if line in self._executing:
                self._begin(line)

    @contextmanager
    def executing(self, rid: str) -> Iterator[None]:
        """A request is executed in this block."""
        line = line_request_id(rid)
        self._executing[line] = rid
        if line in self._wanted:
            self._begin(line)
        try:
            yield
        finally:
            del self._executing[line]

    def forget(self, job_id: str) -> None:
        """No more samples of a job will be executed."""
        begin = f"{job_id}-"
        self._wanted = {line for line in self._wanted if not line.startswith(begin)}

    def _begin(self, line: str) -> None:
        task = asyncio.ensure_future(self._end(line, self._executing[line]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, line: str, rid: str) -> None:
        # SGLang forgets the abort of a request that its scheduler does not have yet, as
        # when it waits for new weights, for a pause to end, or for its prompt.
        while self._executing.get(line) == rid:
            state = self._manager.rid_to_state.get(rid)
            if state is not None and state.dispatched:
                self._manager.abort_request(rid)
                return
            await asyncio.sleep(_NOT_SENT_S)
