"""Room for KV: what is evicted, who is parked on the host, and who comes back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.common import release_kv_cache

from ..scheduling.job_state import JobState
from ..scheduling.line import Line
from .parking import Parked, Parking, drain_results, parkable, why_unsupported

if TYPE_CHECKING:
    from .conductor import Conductor

logger = logging.getLogger(__name__)

# Decode steps that there is room for after requests were parked.
_STEPS_FREED = 8


class Rooms:
    """The device's KV between requests that run, prefixes that are kept, and the host.

    Attributes:
        sure: whether all running requests of this step have room for their next tokens,
            even if each of them begins a page.
    """

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._scheduler = conductor.scheduler
        self._cache = conductor.cache
        self._jobs = conductor.jobs
        self._parking = _parking(conductor.scheduler)
        self._parked: dict[str, tuple[JobState, Line, Parked]] = {}
        self._just_parked = False
        self.sure = False
        self._sure_steps = 0

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def host_bytes(self) -> int:
        return self._parking.host_bytes if self._parking is not None else 0

    # Eviction -------------------------------------------------------------------------

    def let_go(self, num_tokens: int) -> None:
        """Take pins off until the cache can evict ``num_tokens``."""
        while self._cache.evictable_size() < num_tokens:
            if not self._jobs.unpin_furthest():
                return

    def make(self, num_tokens: int) -> None:
        """Take pins off until ``num_tokens`` can be allocated."""
        while self._cache.free_or_evictable() < num_tokens:
            if not self._jobs.unpin_furthest():
                return

    def within_reach(self, num_tokens: int) -> int:
        """Tokens that can be allocated once pins are off; exact up to ``num_tokens``.

        With several jobs pins come off here: a prefix that one job keeps may be
        another's too, and only letting it go shows whether that frees anything.
        """
        if len(self._jobs) > 1:
            self.make(num_tokens)
            return int(self._cache.free_or_evictable())
        return int(self._cache.free_or_evictable()) + self._jobs.idle_tokens

    # Parking --------------------------------------------------------------------------

    def for_decodes(self, running_batch: Any) -> Any:
        """Make sure that the running requests can decode; park the newest if not."""
        self._just_parked = False
        if self._sure_steps > 0:
            self._sure_steps -= 1
            self.sure = True
            return running_batch
        # SGLang's own check walks over all requests. Each may begin a page.
        need = len(running_batch.reqs) * self._conductor.page_size
        available = self._scheduler.token_to_kv_pool_allocator.available_size()
        if available >= need > 0:
            self._sure_steps = available // need - 1
            self.sure = True
            return running_batch
        if running_batch.is_empty() or running_batch.check_decode_mem():
            return running_batch
        drain_results(self._scheduler)
        running_batch.filter_batch()
        running_batch.batch_is_full = False
        if running_batch.is_empty() or running_batch.check_decode_mem():
            return running_batch
        self._conductor.occupancy.ran_out()
        # One has to stay, or nothing would go on; a prompt in progress goes on, too.
        leave = 0 if self._scheduler.chunked_req is not None else 1
        steps = max(_STEPS_FREED, self._conductor.page_size)
        need = len(running_batch.reqs) * steps
        running_batch = self.free(running_batch, need, leave=leave)
        # What is kept for one job may be in use by another.
        while len(running_batch.reqs) > leave and not running_batch.check_decode_mem():
            rows = len(running_batch.reqs)
            running_batch = self.free(running_batch, 0, leave=leave, num_rows=1)
            if len(running_batch.reqs) == rows:
                break
        if running_batch.reqs and not running_batch.check_decode_mem():
            self.set_chunk_aside()  # those that are left cannot be parked
        return running_batch

    def taken(self) -> None:
        """KV was allocated for other things than the running requests' next tokens."""
        self.sure = False
        self._sure_steps = 0

    def free(
        self, running_batch: Any, num_tokens: int, *, leave: int, num_rows: int = 0
    ) -> Any:
        """Park batch lines, the newest first, until ``num_tokens`` can be allocated
        and ``num_rows`` requests have left.

        No result may be in flight. At least ``leave`` requests stay.
        """
        rows = {req.rid for req in running_batch.reqs}
        out: list[Any] = []
        for line in reversed(self._conductor.occupancy.lines):
            short = self.within_reach(num_tokens) < num_tokens
            short = short or len(out) < num_rows
            if not short or len(rows) - len(out) <= leave:
                break
            if line.req.rid in rows and self.park(line):
                out.append(line.req)
        if out:
            running_batch.filter_batch(reqs_to_exclude=out)
            running_batch.batch_is_full = False
        return running_batch

    def park(self, line: Line) -> bool:
        """Move one running batch line to the host; False if that is not possible."""
        known = self._jobs.known(line.req)
        if known is None or known[0] is None or self._parking is None:
            return False
        job, req = known[0], line.req
        occupancy = self._conductor.occupancy
        if not line.takes_steps(occupancy.clock) or not parkable(req):
            return False
        occupancy.leave(line)
        line.steps = len(req.output_ids) - 1
        shared = 0
        if line.leaf >= 0:
            job.release_followers(job.uses.leave(line, parked=True))
            # It needs its prefixes again, whoever else does.
            self._jobs.pin(job, req, job.uses.path(line.node))
            shared = min(job.uses.kept_depth(line.node), req.kv.cache_protected_len)
            # Should the tree lose it, the rest is lost with it: a short prefix is not
            # worth that.
            if 2 * shared < req.kv.kv_committed_len:
                shared = 0
        self._parked[req.rid] = (job, line, self._parking.park(req, shared))
        self._conductor.steps.parked += 1
        self._just_parked = True
        return True

    def set_chunk_aside(self) -> bool:
        """Let the batch line whose prompt is partly computed wait for its turn again.

        What is computed of it is in the tree; it goes on from there. No result may be
        in flight.

        Returns:
            False if there is none, or the prompt is an online request's.
        """
        req = self._scheduler.chunked_req
        known = self._jobs.known(req) if req is not None else None
        if known is None:
            return False
        job, line = known
        if job is None:
            return False
        # The conductor hears of it, and others compute what it was computing.
        release_kv_cache(req, self._cache, checkpoint=False)
        req.reset_for_retract()
        job.backlog.add(line)
        self._scheduler.chunked_req = None
        return True

    def resume(self, running_batch: Any) -> Any:
        """Bring parked requests back, in the order in which they were parked."""
        if not self._parked or self._just_parked or self._parking is None:
            return running_batch
        for rid in list(self._parked):
            job, line, parked = self._parked[rid]
            need = self._parking.tokens_to_resume(parked)
            if need is None:  # a prefix of it had to go
                self._give_up(rid)
                continue
            back = self._resume_one(running_batch, job, line, parked, need)
            if back is None:
                break
            del self._parked[rid]
            if running_batch.is_empty():
                running_batch = back
            else:
                running_batch.merge_batch(back)
        return running_batch

    def give_up_all(self) -> None:
        """Parked requests are computed again, all their KV."""
        for rid in list(self._parked):
            self._give_up(rid)

    def _give_up(self, rid: str) -> None:
        assert self._parking is not None
        _, _, parked = self._parked.pop(rid)
        req = self._parking.give_up(parked)
        self._scheduler._add_request_to_queue(req, is_retracted=True)

    def _resume_one(
        self, running_batch: Any, job: JobState, line: Line, parked: Parked, need: int
    ) -> Any | None:
        conductor, uses = self._conductor, job.uses
        rows = len(running_batch.reqs)
        if not self._scheduler.get_num_allocatable_reqs(
            rows, running_batch=running_batch
        ):
            return None
        locked = self._jobs.locked_tokens + uses.newly_locked(line.node)
        if not conductor.occupancy.fits(line, locked, 0):
            return None
        reserve = rows + conductor.page_size
        assert self._parking is not None
        self.make(need + reserve)
        back = self._parking.resume([parked], reserve)
        if back is None:
            return None
        self.taken()
        conductor.occupancy.join(line)
        conductor.occupancy.begin_decoding(line)
        if line.leaf >= 0:
            uses.start(line, line.input_len)
            self._jobs.unpin(job, uses.spent(line))
        conductor.steps.resumed += 1
        return back

    def drop(self, line: Line) -> bool:
        """Forget a parked line; False if it was not parked."""
        entry = self._parked.pop(line.req.rid, None)
        if entry is None or self._parking is None:
            return False
        self._parking.drop(entry[2])
        return True


def _parking(scheduler: Any) -> Parking | None:
    """None where KV cannot be moved to the host: SGLang retracts requests then."""
    obstacle = why_unsupported(scheduler)
    if obstacle is None:
        return Parking(scheduler)
    logger.warning("Requests cannot be parked on the host with %s.", obstacle)
    return None
