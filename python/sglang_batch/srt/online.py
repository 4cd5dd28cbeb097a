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
        self._drained = False
        # What did not fit although batch lines made room, beside how many online ones.
        self._in_vain: tuple[str, int] | None = None

    def ready(self, running_batch: Any) -> tuple[Any, list[Any], list[Any]]:
        """Online requests that may join now, and those that have to wait.

        Those that may join count as running; batch lines have been parked for them
        where that was necessary.
        """
        queue = self._scheduler.waiting_queue
        ready: list[Any] = []
        if not queue:
            return running_batch, ready, []
        self._drained = False
        for req in queue:
            line = _line(req)
            if not self._fits(running_batch, line, len(ready)):
                # Once for all: batch lines are not parked in vain in every step.
                state = (req.rid, self._num_running())
                if state == self._in_vain:
                    break
                running_batch = self._make_room(running_batch, line, len(ready))
                if not self._fits(running_batch, line, len(ready)):
                    self._in_vain = state
                    break
            self._conductor.jobs.join_online(line)
            ready.append(req)
        if ready and self._needs_chunks(ready[0], running_batch):
            # SGLang computes one prompt in chunks at a time: first come, first served
            # among online requests, but none waits for a batch line's.
            self._set_chunk_aside(running_batch)
        return running_batch, ready, queue[len(ready) :]

    def room_for_chunk(self, running_batch: Any) -> tuple[Any, bool]:
        """Make room for an online prompt that is partly computed.

        Room was there when it joined, but decodes may have begun pages since.

        Returns:
            The running batch, and whether the prompt can go on in this step; where no
            batch lines are left to park, it waits for what decodes beside it.
        """
        chunked = self._scheduler.chunked_req
        conductor = self._conductor
        if chunked is None or not conductor.jobs.is_online(chunked):
            return running_batch, True
        left = len(chunked.full_untruncated_fill_ids) - chunked.extend_end
        page = conductor.page_size
        need = min(left, conductor.step_tokens) + page
        need += len(running_batch.reqs) * page
        if conductor.rooms.within_reach(need) < need:
            self._drained = False
            self._drain(running_batch)
            running_batch = conductor.rooms.free(running_batch, need, leave=0)
        room = conductor.rooms.within_reach(need)
        return running_batch, room >= need or conductor.occupancy.running <= 1

    def chunk_limit(self, ready: list[Any], running_batch: Any) -> int | None:
        """Tokens that a prompt in progress leaves to the ``ready`` ones beside it.

        Those that need chunks themselves have to wait for its end.
        """
        most = self._most_tokens(running_batch)
        beside = 0
        for req in ready:
            tokens = self._pages(len(req.origin_input_ids) + len(req.output_ids))
            if beside + tokens + self._conductor.page_size > most:
                break
            beside += tokens
        return self._pages(most - beside) if beside else None

    def unseen(self, batch: Any) -> list[Any]:
        """Requests that SGLang admitted past :meth:`ready`: their grammar was compiled
        while it built the batch."""
        unseen = [req for req in batch.reqs if self._conductor.jobs.known(req) is None]
        for req in unseen:
            self._conductor.jobs.join_online(_line(req))
        return unseen

    def _num_running(self) -> int:
        lines = self._conductor.occupancy.lines
        return sum(line.side == ONLINE for line in lines)

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
        need = line.input_len + line.steps + conductor.page_size + rows
        if self._scheduler.chunked_req is not None:
            need += conductor.page_size  # SGLang has it go on beside
        if need > conductor.rooms.within_reach(need):
            return False
        return conductor.occupancy.fits(line, conductor.jobs.locked_tokens, 0)

    def _make_room(self, running_batch: Any, line: Line, num_ready: int) -> Any:
        conductor = self._conductor
        self._drain(running_batch)
        rows = len(running_batch.reqs)
        need = line.input_len + line.steps + conductor.page_size + rows
        need += min(line.estimate, _HEADROOM_STEPS)
        free_rows = self._scheduler.get_num_allocatable_reqs(
            rows, running_batch=running_batch
        )
        running_batch = conductor.rooms.free(
            running_batch, need, leave=0, num_rows=num_ready + 1 - free_rows
        )
        # What others are still promised may not leave it enough.
        while not self._fits(running_batch, line, num_ready):
            rows = len(running_batch.reqs)
            running_batch = conductor.rooms.free(running_batch, 0, leave=0, num_rows=1)
            if len(running_batch.reqs) == rows:
                self._set_chunk_aside(running_batch)
                break
        return running_batch

    def _set_chunk_aside(self, running_batch: Any) -> None:
        if self._scheduler.chunked_req is not None:
            self._drain(running_batch)
            self._conductor.rooms.set_chunk_aside()

    def _drain(self, running_batch: Any) -> None:
        """Leave no result in flight."""
        if not self._drained:
            drain_results(self._scheduler)
            running_batch.filter_batch()
            running_batch.batch_is_full = False
            self._drained = True

    def _needs_chunks(self, req: Any, running_batch: Any) -> bool:
        length = len(req.origin_input_ids) + len(req.output_ids)
        return self._pages(length) > self._most_tokens(running_batch)

    def _most_tokens(self, running_batch: Any) -> int:
        """Prompt tokens in the next step, in whole pages."""
        conductor = self._conductor
        mixed = self._scheduler.is_mixed_chunk
        rows = len(running_batch.reqs) if mixed else 0
        page = conductor.page_size
        most: int = max(page, (conductor.step_tokens - rows) // page * page)
        return most

    def _pages(self, tokens: int) -> int:
        page = self._conductor.page_size
        return -(-tokens // page) * page


def _line(req: Any) -> Line:
    length = len(req.origin_input_ids)
    most = max(0, (req.sampling_params.max_new_tokens or 0) - 1)
    steps = len(req.output_ids)
    expected = max(steps, min(most, DEFAULT_STEPS))
    return Line(
        req, -1, 0, UNPLANNED_TURN, length, length, most, expected, side=ONLINE,
        steps=steps,
    )  # fmt: skip
