"""The offline scheduler of stress tests, which checks its sums after every step.

A wrong sum fails an assertion, which ends the engine and with it the test.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import Counter
from typing import Any

import numpy as np
from job_names import name_of
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_batch.planner.machine_model import share
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree
from sglang_batch.request import parse_request_id
from sglang_batch.scheduling.job_plan import JobPlan
from sglang_batch.srt.attention import attention_plans
from sglang_batch.srt.scheduler import scheduler as offline

STATE = "stress"
# In a job's name, the factor by which its estimates are wrong.
WRONG_BY = re.compile(r"_times([0-9.]+)")
# In a job's name, that further requests may share its prefixes.
OPEN_ENDED = "_open"
# In a job's name, the state in which its first request to be in it is aborted.
ABORT_IN = re.compile(r"_abort_([a-z]+)")
# In a job's name: its first request to run alone finds no KV for its next token.
STARVES = "_starves"
# In a job's name: its plan covers some of its requests at first, and others later.
GROWS = "_grows"
# Why it aborts.
REASON = {"type": "abort", "message": "stressed"}

# Whatever is shared is read once, though prompts are too short here for that to pay.
attention_plans.MIN_GAIN = 0.0


class StressScheduler(offline.OfflineScheduler):
    """Adds counters of its own to ``get_internal_state``.

    aborted_STATE: requests that were aborted in a state.
    answered_aborts: those of them that waited, whose answers have the reason.
    recomputed: tokens of a request that were computed again.
    all_decode: decode steps in which SGLang's checks of each request were skipped.
    mixed, unmixed: steps with prompts in which running requests decode, or wait.
    mixed_logprobs: steps of prompts and decodes with log probabilities.
    delay: most steps between an online request's arrival and its first prompt token.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = 0
        self.counts: Counter[str] = Counter()
        self.computed: dict[str, int] = {}
        self.arrived: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.aborting: str | None = None
        self.growing: dict[str, GrowingPlan] = {}
        self.names: dict[str, str] = {}
        super().__init__(*args, **kwargs)

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        for job in list(self.jobs.open.each):
            found = ABORT_IN.search(self.names.get(job.job_id, ""))
            if found and job.job_id not in self.aborted:
                self.abort_one(job, found[1])
            self.grow(job)
        plan = super().get_next_batch_to_run(running_batch, last_batch)
        self.number += plan.batch_to_run is not None
        self.check_books(plan)
        batch = plan.batch_to_run
        if batch is not None and batch.forward_mode.is_extend():
            mixed = batch.forward_mode.is_mixed()
            self.counts["mixed"] += int(mixed)
            waits = any(not req.finished() for req in plan.running_batch.reqs)
            self.counts["unmixed"] += int(waits)
        return plan

    def _make_parts(self) -> None:
        super()._make_parts()
        self.open = self.jobs.registry.open
        self.jobs.registry.open = self.open_distorted

    def open_distorted(self, job_id: str, plan: JobPlan, *names: Any) -> None:
        """Open a job, estimated wrong or with a part of its plan if its name says so."""
        announced = plan
        name = self.names[job_id] = name_of(job_id)
        found = WRONG_BY.search(name)
        if found:
            steps = plan.est_decode_steps * np.float32(found[1])
            plan = dataclasses.replace(plan, est_decode_steps=steps)
        if OPEN_ENDED in name:
            plan = dataclasses.replace(plan, open_ended=True)
        if GROWS in name:
            growing = self.growing[job_id] = GrowingPlan(plan, self.number)
            plan = growing.some()
        self.open(job_id, plan, *names)
        self.jobs.registry._announced[job_id] = announced

    def grow(self, job: Any) -> None:
        """Every few steps, a job that grows gets a plan of other requests."""
        growing = self.growing.get(job.job_id)
        if growing is None or self.number < growing.next_at:
            return
        if job.job_id in self.jobs.registry._closed:
            return
        here = {request.number for request in job._requests.values()}
        plan = growing.next(self.number, here)
        announced = self.jobs.registry.announced(job.job_id)
        self.open(job.job_id, plan)
        self.jobs.registry._announced[job.job_id] = announced
        self.counts["grown"] += 1
        if plan is growing.whole:
            del self.growing[job.job_id]

    def abort_one(self, job: Any, state: str) -> None:
        """Abort the first request of a job that is found in a state, and no other."""
        if state == "backlog":
            found = list(job.backlog)
        elif state == "follower":
            found = [
                request for requests in job._followers.values() for request in requests
            ]
        elif state == "offloaded":
            found = [
                request for _, request, _ in self.kv_manager.on_host.first.values()
            ]
        else:
            found = [
                request
                for request in self.jobs.kv_accounting.requests
                if request.running
            ]
            if state == "leader":
                found = [x for x in found if x.req is self.chunked_req and x.leading]
            else:
                clock = self.jobs.kv_accounting.clock
                found = [request for request in found if request.takes_steps(clock)]
        found = [request for request in found if request.req.rid.startswith(job.job_id)]
        if found:
            self.aborted.add(job.job_id)
            self.counts[f"aborted_{state}"] += 1
            rid = self.aborting = found[0].req.rid
            self.abort_request(AbortReq(rid=rid, finished_reason=REASON))
            self.aborting = None

    def send_abort_output(self, abort_req: Any, req: Any) -> None:
        if req.rid == self.aborting:
            assert abort_req.finished_reason == REASON
            assert isinstance(abort_req.weight_versions, list)
            self.counts["answered_aborts"] += 1
        super().send_abort_output(abort_req, req)

    def check_books(self, plan: Any) -> None:
        kv_accounting = self.jobs.kv_accounting
        requests = kv_accounting.requests
        assert kv_accounting.num_running == len(requests)
        assert all(request.req.kv.holds_kv for request in requests)
        sides, drafts = range(3), kv_accounting.draft_slots
        decoding = [x for x in requests if x.takes_steps(kv_accounting.clock)]
        for side in sides:
            done = [x for x in requests if x.side == side]
            kv = sum(
                -(
                    -(x.own + x.steps_done(kv_accounting.clock) + drafts)
                    // self.page_size
                )
                for x in done
            )
            kv *= self.page_size
            assert kv_accounting.kv[side] == kv, (kv_accounting.kv, side, kv)
            rows = sum(x.side == side for x in decoding)
            assert kv_accounting.decoding[side] == rows
        begun = [
            (x.own + x.steps_done(kv_accounting.clock) + drafts) % self.page_size == 0
            for x in decoding
        ]
        assert kv_accounting.growth == self.page_size * sum(begun)
        second = kv_accounting.second
        if second is not None:
            held = kv_accounting.second_held
            assert held == sum(request.pool_share for request in requests)
            assert held == sum(
                share(second, x.own, x.est_decode_steps) for x in requests
            )
        running = plan.running_batch.reqs
        batch = plan.batch_to_run.reqs if plan.batch_to_run is not None else []
        known = {id(request.req) for request in requests}
        for req in [*running, *batch]:
            if not req.finished():
                assert id(req) in known, f"{req.rid} runs and nobody counts it"
        for job in self.jobs.open.each:
            self.check_prefixes(job)
            self.check_work(job, requests)
        self.check_host()

    def check_work(self, job: Any, requests: list[Any]) -> None:
        """Sums of the job's work. Without requests, it was charged for all that was done."""
        own = [request for request in requests if request.work is job.done]
        clock = self.jobs.kv_accounting.clock
        rows = [request for request in own if request.takes_steps(clock)]
        assert job.done.decoding == len(rows)
        reads = sum(x.read_len + x.steps_done(clock) + 1 for x in rows)
        assert job.done.read_base + len(rows) * clock == reads
        if not own:
            # Requests that join and are put back before any work leave a rounding error
            # of their charges. A single token takes more than 1e-9 s.
            work = job.done
            assert math.isclose(
                work.charged_s, work.done_s, rel_tol=1e-6, abs_tol=1e-12
            ), (job.job_id, work.charged_s, work.done_s)

    def check_host(self) -> None:
        """The pages of the host belong to offloaded requests and to prefixes of open
        jobs, and to no other."""
        offloader = self.kv_manager._offloader
        if offloader is None:  # the model keeps more than plain KV
            assert not self.kv_manager.on_host.first
            return
        offloaded = [kv for _, _, kv in self.kv_manager.on_host.first.values()]
        prefixes = self.kv_manager._pinned.host
        saved = [*prefixes._saved.values()]
        assert {id(each.owner) for each in saved} <= {
            id(j) for j in self.jobs.open.each
        }
        assert {id(each) for each in prefixes._found_by.values()} <= set(map(id, saved))
        assert not any(each.end <= each.begin for each in saved)
        pages = [
            page
            for kv in [*offloaded, *saved]
            for first, length in kv.runs
            for page in range(first, first + length)
        ]
        assert len(set(pages)) == len(pages)
        assert len(pages) == offloader.room.num_pages - offloader.room.num_free
        tokens = [kv.num_tokens for kv in offloaded]
        tokens += [each.end - each.begin for each in saved]
        assert sum(-(-each // self.page_size) for each in tokens) == len(pages)
        assert self.kv_manager.on_host.num_bytes <= offloader.pool.num_bytes

    def check_prefixes(self, job: Any) -> None:
        uses = job.uses
        length, running = uses.length, uses.running
        idle = sum(int(length[n]) for n in uses.pins if running[n] == 0)
        assert uses.idle_tokens == idle, (uses.idle_tokens, idle)
        locked = sum(int(k) for k, n in zip(length, running, strict=True) if n > 0)
        assert uses.locked_tokens == locked, (uses.locked_tokens, locked)
        in_use = ((running > 0) & (length > 0)).sum()
        assert uses.num_locked == in_use, (uses.num_locked, in_use)
        assert (running >= 0).all()
        assert (uses.uses_left >= 0).all(), uses.uses_left
        for node, request in uses.computing.items():
            assert request.running
            if request.work is job.done:
                assert node in request.leading
                continue
            # It belongs to another job, and computes the prefix there.
            known, _ = self.jobs.registry.known(request.req)
            assert known is not None and known.done is request.work
            elsewhere = [known.elsewhere(each) for each in request.leading]
            assert (job, node) in [place for places in elsewhere for place in places]

    def _reqs_finishing_inflight(self, batch: Any) -> list[Any]:
        found = super()._reqs_finishing_inflight(batch)
        stock = super(offline.MarkedScheduler, self)._reqs_finishing_inflight(batch)
        assert found == stock, (len(found), len(stock))
        return found

    def update_running_batch(self, batch: Any) -> Any:
        if self.plan_scheduler.all_decode(batch):
            # SGLang would check each request.
            assert not any(req.finished() for req in batch.reqs)
            assert not self._reqs_finishing_inflight(batch)
            assert batch.check_decode_mem()
            self.counts["all_decode"] += 1
        alone = batch.reqs[0].rid if len(batch.reqs) == 1 else ""
        name = self.names.get(parse_request_id(alone)[0], "")
        if STARVES not in name or STARVES in self.aborted:
            return super().update_running_batch(batch)
        self.aborted.add(STARVES)
        self.kv_manager.note_allocation()
        allocator = self.token_to_kv_pool_allocator
        evict_from_tree_cache(self.tree_cache, self.max_total_num_tokens)
        taken = allocator.alloc(allocator.available_size())
        left = super().update_running_batch(batch)
        allocator.free(taken)
        return left

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
        mixed = batch.forward_mode.is_mixed() and batch.return_logprob
        self.counts["mixed_logprobs"] += int(mixed)
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
        """Resources in use, all 0 when the engine is idle."""
        kv_accounting = self.jobs.kv_accounting
        rows = self.req_to_token_pool
        return {
            "jobs": len(self.jobs.open),
            "closed": len(self.jobs.registry._closed),
            "known": len(self.jobs.registry._known),
            "leaders": sum(
                request.running for _, request in self.jobs.prefixes._leaders
            ),
            "waiting": self._num_waiting + len(self.waiting_queue),
            "tokens": self.jobs.open.waiting_tokens,
            "running": kv_accounting.num_running,
            "decoding": sum(kv_accounting.decoding),
            "kv": sum(kv_accounting.kv),
            "reads": sum(kv_accounting.reads),
            "growing": sum(kv_accounting._growing),
            # The last row is for searching the peak.
            "forecast": int(np.abs(kv_accounting._forecast.sums[:-1]).sum()),
            "short": int(kv_accounting._forecast.short[0]),
            "events": sum(
                len(requests) for requests in kv_accounting._overruns.values()
            ),
            "ends": len(kv_accounting._last_steps),
            "offloaded": len(self.kv_manager.on_host.first),
            "host_bytes": self.kv_manager.on_host.num_bytes,
            "rows": rows.size - rows.available_size(),
            "locked": int(self.tree_cache.protected_size()),
            **self.leaks(),
            "busy": int(not self.is_fully_idle()),
        }

    def leaks(self) -> dict[str, int]:
        """Tokens that are neither free nor in the tree, of each pool."""
        tree, kv = self.tree_cache, self.token_to_kv_pool_allocator
        if not tree.supports_swa():
            free = kv.available_size() + tree.evictable_size()
            leaks = {"kv_leak": self.max_total_num_tokens - free}
            if tree.supports_mamba():
                states = self.req_to_token_pool.mamba_allocator
                free = states.available_size() + tree.mamba_evictable_size()
                leaks["state_leak"] = states.size - free
            return leaks
        free = kv.full_available_size() + tree.full_evictable_size()
        windows = kv.swa_available_size() + tree.swa_evictable_size()
        return {"kv_leak": kv.size_full - free, "window_leak": kv.size_swa - windows}


class GrowingPlan:
    """Plans of some of a job's requests, and at last the plan of all."""

    def __init__(self, whole: JobPlan, step: int) -> None:
        self.whole = whole
        self.random = random.Random(len(whole.number))
        self.share = self.random.choice((0.1, 0.5))
        self.next_at = step + 1
        self.seen: set[int] = set()
        self.gone: set[int] = set()

    def next(self, step: int, here: set[int]) -> JobPlan:
        """``here``: numbers of the requests that are in the scheduler."""
        self.next_at = step + self.random.choice((1, 2, 5))
        # Whatever was here and ended unplanned is known to the scheduler. What a plan
        # leaves out does not come back.
        self.gone |= self.seen - here
        self.seen |= here
        self.share += self.random.choice((0.0, 0.1, 0.3))
        return self.whole if self.share > 1 else self.some()

    def some(self) -> JobPlan:
        numbers = self.whole.number.tolist()
        kept = [
            leaf
            for leaf, number in enumerate(numbers)
            if number not in self.gone and self.random.random() < self.share
        ]
        return restricted(self.whole, kept)


def restricted(plan: JobPlan, leaves: list[int]) -> JobPlan:
    """The plan of some of a plan's requests."""
    at = np.array(leaves, np.int64)
    tree = PrefixTree(
        order=np.arange(plan.num_requests),
        input_len=plan.input_len,
        lcp=_shared_with_last(plan),
        leaf_parent=plan.node,
        parent=plan.parent,
        depth=plan.depth,
        leaf_begin=plan.leaf_begin,
        leaf_end=plan.leaf_end,
    ).restricted_to(at)
    taken = np.sort(plan.position[at])
    return dataclasses.replace(
        plan,
        number=plan.number[at],
        position=np.searchsorted(taken, plan.position[at]).astype(np.int32),
        node=tree.leaf_parent,
        input_len=tree.input_len,
        read_len=plan.read_len[at],
        est_decode_steps=plan.est_decode_steps[at],
        est_decode_steps_sq=plan.est_decode_steps_sq[at],
        parent=tree.parent,
        depth=tree.depth,
        leaf_begin=tree.leaf_begin,
        leaf_end=tree.leaf_end,
        density=None if plan.density is None else plan.density[taken],
        num_left=int(np.searchsorted(taken, plan.num_left)),
    )


def _shared_with_last(plan: JobPlan) -> Any:
    shared = np.zeros(plan.num_requests, np.int32)
    for leaf in range(1, plan.num_requests):
        node = int(plan.node[leaf])
        while not plan.leaf_begin[node] <= leaf - 1:
            node = int(plan.parent[node])
        shared[leaf] = plan.depth[node]
    return shared


def run_stress_scheduler_process(*args: Any, **kwargs: Any) -> None:
    # With --dp-size, the process that this one comes from has the plugin already.
    if scheduler_module.Scheduler is offline.OfflineScheduler:
        scheduler_module.Scheduler = StressScheduler
    # The plugin puts this name in the place of SGLang's scheduler.
    offline.OfflineScheduler = StressScheduler  # type: ignore[misc]
    scheduler_module.run_scheduler_process(*args, **kwargs)
