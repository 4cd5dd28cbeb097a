"""The offline scheduler of stress tests: after every step it checks its own books.

What does not add up is an assertion, which ends the engine and with it the test.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import AbortReq

from sglang_batch.scheduling.job_plan import JobPlan
from sglang_batch.srt import scheduler as offline

STATE = "stress"
# In a job's id, the factor by which its estimates are wrong.
WRONG_BY = re.compile(r"_times([0-9.]+)")
# In a job's id, the state in which its first line to be in it is aborted.
ABORT_IN = re.compile(r"_abort_([a-z]+)")


class StressScheduler(offline.OfflineScheduler):
    """Counts what no counter of the scheduler shows, for ``get_internal_state``.

    aborted_STATE: lines that were aborted in a state.
    recomputed: tokens of a request that were computed again.
    all_decode: decode steps in which nothing was asked of each running request.
    delay: most steps between an online request's arrival and its first prompt token.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = 0
        self.counts: Counter[str] = Counter()
        self.computed: dict[str, int] = {}
        self.arrived: dict[str, int] = {}
        self.aborted: set[str] = set()
        super().__init__(*args, **kwargs)

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        for job in list(self.conductor.jobs):
            found = ABORT_IN.search(job.job_id)
            if found and job.job_id not in self.aborted:
                self.abort_one(job, found[1])
        plan = super().get_next_batch_to_run(running_batch, last_batch)
        self.number += plan.batch_to_run is not None
        self.check_books(plan)
        return plan

    def _control(self, message: Any) -> Any:
        """A job whose id says so is estimated wrong, by that factor."""
        found = WRONG_BY.search(message.job_id)
        if found and message.plans:
            plan = JobPlan.from_bytes(message.plans[0])
            plan = dataclasses.replace(plan, steps=plan.steps * float(found[1]))
            message.plans = (plan.to_bytes(),)
        return super()._control(message)

    def abort_one(self, job: Any, state: str) -> None:
        """Abort the first line of a job that is found in a state, and no other."""
        if state == "backlog":
            found = list(job.backlog)
        elif state == "follower":
            found = [line for lines in job._followers.values() for line in lines]
        elif state == "parked":
            found = [line for _, line, _ in self.conductor.rooms._parked.values()]
        else:
            found = [line for line in self.conductor.occupancy.lines if line.running]
            if state == "leader":
                found = [x for x in found if x.req is self.chunked_req and x.leading]
            else:
                clock = self.conductor.occupancy.clock
                found = [line for line in found if line.takes_steps(clock)]
        found = [line for line in found if line.req.rid.startswith(job.job_id)]
        if found:
            self.aborted.add(job.job_id)
            self.counts[f"aborted_{state}"] += 1
            self.abort_request(AbortReq(rid=found[0].req.rid))

    def check_books(self, plan: Any) -> None:
        conductor = self.conductor
        occupancy = conductor.occupancy
        lines = occupancy.lines
        assert occupancy.running == len(lines)
        assert all(line.req.kv.holds_kv for line in lines)
        sides = range(3)
        decoding = [x for x in lines if x.takes_steps(occupancy.clock)]
        for side in sides:
            done = [x for x in lines if x.side == side]
            kv = sum(x.own + x.steps_done(occupancy.clock) for x in done)
            assert occupancy.kv[side] == kv, (occupancy.kv, side, kv)
            rows = sum(x.side == side for x in decoding)
            assert occupancy.decoding[side] == rows
        running = plan.running_batch.reqs
        batch = plan.batch_to_run.reqs if plan.batch_to_run is not None else []
        known = {id(line.req) for line in lines}
        for req in [*running, *batch]:
            if not req.finished():
                assert id(req) in known, f"{req.rid} runs and nobody counts it"
        for job in conductor.jobs:
            self.check_prefixes(job.uses)

    def check_prefixes(self, uses: Any) -> None:
        length, running = uses._length, uses._running
        idle = sum(int(length[n]) for n in uses.pins if running[n] == 0)
        assert uses.idle_tokens == idle, (uses.idle_tokens, idle)
        locked = sum(int(k) for k, n in zip(length, running, strict=True) if n > 0)
        assert uses.locked_tokens == locked, (uses.locked_tokens, locked)
        assert (running >= 0).all()
        assert (uses._uses_left >= 0).all(), uses._uses_left
        for node, line in uses.computing.items():
            assert line.running and node in line.leading

    def _reqs_finishing_inflight(self, batch: Any) -> list[Any]:
        found = super()._reqs_finishing_inflight(batch)
        stock = super(offline.MarkedScheduler, self)._reqs_finishing_inflight(batch)
        assert found == stock, (len(found), len(stock))
        return found

    def update_running_batch(self, batch: Any) -> Any:
        if self.conductor.all_decode(batch):
            # What SGLang would ask each of them.
            assert not any(req.finished() for req in batch.reqs)
            assert not self._reqs_finishing_inflight(batch)
            assert batch.check_decode_mem()
            self.counts["all_decode"] += 1
        return super().update_running_batch(batch)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        super()._add_request_to_queue(req, is_retracted)
        if req.rid.startswith("online"):
            self.arrived.setdefault(req.rid, self.number)

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend():
            for req, start, length in zip(
                batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
            ):
                decodes = batch.decoding_reqs and req in batch.decoding_reqs
                self.note_extend(req, start, 0 if decodes else length)
        return super().run_batch(batch, *args, **kwargs)

    def note_extend(self, req: Any, start: int, length: int) -> None:
        if not length:
            return
        done = self.computed.get(req.rid, 0)
        again = max(0, min(done, start + length) - start)
        self.counts["recomputed"] += again
        self.computed[req.rid] = max(done, start + length)
        if req.rid in self.arrived:
            waited = self.number - self.arrived.pop(req.rid) - 1
            self.counts["delay"] = max(self.counts["delay"], waited)
            self.counts["delays"] += waited
            self.counts["online"] += 1

    def get_internal_state(self, recv_req: Any) -> Any:
        output = super().get_internal_state(recv_req)
        output.internal_state[STATE] = {**self.counts, "left": self.left()}
        self.counts.clear()
        return output

    def left(self) -> dict[str, int]:
        """What is still held; all 0 when the engine is idle."""
        conductor, occupancy = self.conductor, self.conductor.occupancy
        rows = self.req_to_token_pool
        kv = self.token_to_kv_pool_allocator
        return {
            "jobs": len(conductor.jobs),
            "closed": len(conductor.jobs._closed),
            "known": len(conductor.jobs._known),
            "leaders": sum(line.running for _, line in conductor.jobs._leaders),
            "waiting": conductor.num_waiting + len(self.waiting_queue),
            "tokens": conductor.jobs.waiting_tokens,
            "running": occupancy.running,
            "decoding": sum(occupancy.decoding),
            "kv": sum(occupancy.kv),
            "reads": sum(occupancy.reads),
            "forecast": int(occupancy._forecast.running[0]),
            "short": int(occupancy._forecast.short[0]),
            "events": sum(len(lines) for lines in occupancy._events.values()),
            "ends": len(occupancy._ends),
            "parked": conductor.rooms.num_parked,
            "host_bytes": conductor.rooms.host_bytes,
            "rows": rows.size - rows.available_size(),
            "locked": int(self.tree_cache.protected_size()),
            "kv_leak": self.max_total_num_tokens
            - kv.available_size()
            - self.tree_cache.evictable_size(),
            "busy": int(not self.is_fully_idle()),
        }


def run_stress_scheduler_process(*args: Any, **kwargs: Any) -> None:
    # The plugin puts this name in the place of SGLang's scheduler.
    offline.OfflineScheduler = StressScheduler  # type: ignore[misc]
    scheduler_module.run_scheduler_process(*args, **kwargs)
