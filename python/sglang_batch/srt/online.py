"""Online requests beside batches: they come first, and batch lines make room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..scheduling.job_state import DEFAULT_STEPS, UNPLANNED_TURN
from ..scheduling.line import ONLINE, Line
from .parking import drain_results

if TYPE_CHECKING:
    from .conductor import Conductor

# Decode steps that an online request finds room for when batch lines make it.
_HEADROOM_STEPS = 16


class OnlineQueue:
    """SGLang's own waiting queue, as far as it may go ahead in this step."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._scheduler = conductor.scheduler

    def ready(self, running_batch: Any) -> tuple[Any, list[Any], list[Any]]:
        """Online requests that may join now, and those that have to wait.

        Those that may join count as running; batch lines have been parked for them
        where that was necessary.
        """
        queue = self._scheduler.waiting_queue
        ready: list[Any] = []
        if not queue:
            return running_batch, ready, []
        drained = False
        for req in queue:
            line = _line(req)
            if not self._fits(running_batch, line, len(ready)):
                if not drained:
                    drain_results(self._scheduler)
                    running_batch.filter_batch()
                    drained = True
                running_batch = self._make_room(running_batch, line, len(ready))
                if not self._fits(running_batch, line, len(ready)):
                    break
            self._conductor.join_online(line)
            ready.append(req)
        return running_batch, ready, queue[len(ready) :]

    def put_back(self, line: Line) -> None:
        """SGLang could not admit it in this step."""
        self._conductor.occupancy.leave(line)

    def _fits(self, running_batch: Any, line: Line, num_ready: int) -> bool:
        conductor = self._conductor
        if conductor.occupancy.running == 0:
            return True
        rows = len(running_batch.reqs)
        free_rows = self._scheduler.get_num_allocatable_reqs(
            rows, running_batch=running_batch
        )
        if free_rows <= num_ready:
            return False
        jobs = conductor.jobs.values()
        idle = sum(job.uses.idle_tokens for job in jobs)
        locked = sum(job.uses.locked_tokens for job in jobs)
        room = conductor.cache.free_or_evictable() + idle - rows
        if line.input_len + line.steps + conductor.page_size > room:
            return False
        return conductor.occupancy.fits(line, locked, 0)

    def _make_room(self, running_batch: Any, line: Line, num_ready: int) -> Any:
        conductor = self._conductor
        rows = len(running_batch.reqs)
        if not rows:
            return running_batch
        need = line.input_len + line.steps + conductor.page_size + rows
        need += min(line.estimate, _HEADROOM_STEPS)
        free_rows = self._scheduler.get_num_allocatable_reqs(
            rows, running_batch=running_batch
        )
        return conductor.rooms.free(
            running_batch, need, leave=0, num_rows=num_ready + 1 - free_rows
        )


def _line(req: Any) -> Line:
    length = len(req.origin_input_ids)
    most = max(0, (req.sampling_params.max_new_tokens or 0) - 1)
    steps = len(req.output_ids)
    expected = max(steps, min(most, DEFAULT_STEPS))
    return Line(
        req, -1, 0, UNPLANNED_TURN, length, length, most, expected, 0.0, side=ONLINE,
        steps=steps,
    )  # fmt: skip
