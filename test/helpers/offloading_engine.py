"""An engine whose scheduler offloads and resumes requests at random, for tests.

Runs in a process of its own: ``main`` generates twice, undisturbed and with offloading,
and prints the answers as JSON. Only requests whose id begins with OFFLOAD are offloaded.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_batch.srt.compat.offline_hooks import PENALTY_HOOK
from sglang_batch.srt.scheduler.kv.offloading import (
    KvOffloader,
    can_offload,
    drain_results,
)
from sglang_batch.srt.scheduler.kv.token_counts import count_by_place, count_retracted

OFFLOAD = "offload/"
SETTINGS = "OFFLOADING_TEST_SETTINGS"
DOCUMENTS = [list(range(100 + 40 * i, 100 + 40 * i + 40 + 13 * i)) for i in range(4)]


class OffloadingScheduler(scheduler_module.Scheduler):  # type: ignore[misc]
    """Offloads every few steps, resumes some steps later, and counts both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runs = json.loads(os.environ[SETTINGS])["runs"]
        self.run_name = ""
        [pool_bytes] = {run["pool_bytes"] for run in self.runs.values()}
        self.offloading = KvOffloader(self, pool_bytes)
        self.offloaded: list[Any] = []
        self.steps = self.loads = 0
        self.counts: Counter[str] = Counter()
        self.computed: dict[str, int] = {}

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        self.steps += 1
        offloading = [r for r in running_batch.reqs if r.rid.startswith(OFFLOAD)]
        if offloading:
            self.begin(offloading[0].rid.split("/")[1])
            if self.steps % 3 == 0:
                self.offload_some(running_batch, last_batch)
            if self.steps % self.settings["evict_every"] == 0:
                self.counts["evictions"] += 1
                self.tree_cache.evict(EvictParams(num_tokens=10**6))
        if self.offloaded and (self.steps % 4 == 0 or running_batch.is_empty()):
            running_batch = self.resume_some(running_batch)
        self.counts["host_bytes"] = max(
            self.counts["host_bytes"], self.offloading.host_bytes
        )
        return super().get_next_batch_to_run(running_batch, last_batch)

    def begin(self, name: str) -> None:
        """The settings of a run, whose name is in the ids of its requests."""
        if name != self.run_name:
            self.run_name, self.settings = name, self.runs[name]
            self.random = random.Random(self.settings["seed"])

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        plan = super().get_new_batch_prefill(running_batch)
        if plan.batch_to_run is not None:
            count_retracted(plan.batch_to_run, self.model_config.vocab_size)
        return plan

    def offload_some(self, running_batch: Any, last_batch: Any) -> None:
        if self.settings["drain"]:
            self.counts["drained"] += drain_results(self)
        running_batch.filter_batch()
        # With nothing drained, in-flight requests must refuse.
        self.counts["refused"] += sum(not can_offload(r) for r in running_batch.reqs)
        chosen = [
            req
            for req in running_batch.reqs
            if can_offload(req)
            and req.rid.startswith(OFFLOAD)
            and self.random.random() < 0.4
        ]
        for req in chosen:
            pages = req.kv.cache_protected_len // self.page_size
            shared_len = self.random.choice([0, pages // 2, pages]) * self.page_size
            cost_s = self.random.random()
            if not self.make_room(req, shared_len, cost_s):
                self.offloading.discard(req)
                self._add_request_to_queue(req, is_retracted=True)
                self.counts["discarded"] += 1
                continue
            self.offloaded.append(self.offloading.offload(req, shared_len, cost_s))
            self.counts["offloaded"] += 1
            self.counts["left_to_tree"] += shared_len
        running_batch.filter_batch(reqs_to_exclude=chosen)
        running_batch.batch_is_full = False
        # A prompt that was just computed is in the last batch only, with its KV.
        last = last_batch.reqs if last_batch is not None else []
        if running_batch.is_empty() and not any(req.kv.holds_kv for req in last):
            self.check_idle()

    def make_room(self, req: Any, shared_len: int, cost_s: float) -> bool:
        """As ``KvManager`` does when the host pool is full."""
        pages = self.offloading.num_pages(req, shared_len)
        out = self.offloading.room.to_recompute(pages, cost_s)
        for offloaded in [p for p in self.offloaded if p.req.rid in (out or ())]:
            self.give_up(offloaded)
            self.counts["made_room"] += 1
        return out is not None

    def give_up(self, offloaded: Any) -> None:
        self.offloaded.remove(offloaded)
        self.counts["given_up"] += 1
        req = self.offloading.give_up(offloaded)
        self._add_request_to_queue(req, is_retracted=True)

    def resume_some(self, running_batch: Any) -> Any:
        self.random.shuffle(self.offloaded)
        for offloaded in list(self.offloaded):
            if self.offloading.tokens_to_resume(offloaded) is None:
                self.give_up(offloaded)
        count = self.random.randint(1, max(1, len(self.offloaded)))
        expected = [self.offloading.tokens_to_resume(p) for p in self.offloaded[:1]]
        before = self.token_to_kv_pool_allocator.available_size()
        batch = None
        for offloaded in self.offloaded[:count]:
            back = self.offloading.resume(offloaded)
            if back is None:
                break
            if batch is None:
                batch = back
            else:
                batch.merge_batch(back)
        if batch is None:
            return running_batch
        taken = before - self.token_to_kv_pool_allocator.available_size()
        if len(batch.reqs) == 1 and taken > 0:  # else it evicted
            assert taken <= expected[0], (taken, expected)
        self.offloaded = [
            p for p in self.offloaded if p.req.rid in self.offloading.room
        ]
        self.counts["resumed"] += len(batch.reqs)
        if running_batch.is_empty():
            return batch
        running_batch.merge_batch(batch)
        return running_batch

    def check_idle(self) -> None:
        """SGLang's idle checks, while everything is offloaded."""
        self.counts["idle_checks"] += 1
        leak, messages = self.invariant_checker._check_all_pools(
            self.pool_stats_observer.get_pool_stats()
        )
        assert not leak, messages
        self.invariant_checker._check_req_pool()

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend():
            for req, start, length in zip(
                batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
            ):
                done = self.computed.get(req.rid, 0)
                self.counts["recomputed"] += max(0, min(done, start + length) - start)
                self.computed[req.rid] = max(done, start + length)
        return super().run_batch(batch, *args, **kwargs)

    def is_fully_idle(self, *args: Any, **kwargs: Any) -> bool:
        return not self.offloaded and super().is_fully_idle(*args, **kwargs)

    def get_internal_state(self, recv_req: Any) -> Any:
        output = super().get_internal_state(recv_req)
        left = self.offloading
        output.internal_state["offloading"] = {
            **self.counts,
            "pool_bytes": left.pool.num_bytes,
            "loads": left.pool.num_loads - self.loads,
            "left": [left.host_tokens, left.host_bytes],
        }
        self.counts.clear()
        self.loads = left.pool.num_loads
        return output


def run_offloading_scheduler_process(*args: Any, **kwargs: Any) -> None:
    scheduler_module.Scheduler = OffloadingScheduler
    HookRegistry.register(PENALTY_HOOK, count_by_place, HookType.AROUND)
    scheduler_module.run_scheduler_process(*args, **kwargs)


class OffloadingEngine(Engine):  # type: ignore[misc]
    run_scheduler_process_func = staticmethod(run_offloading_scheduler_process)


def prompts(count: int) -> list[list[int]]:
    return [
        DOCUMENTS[i % len(DOCUMENTS)] + [7 + i, 60 + 3 * i % 35] * (1 + i % 5)
        for i in range(count)
    ]


def sampling(i: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": 20 + i * 7 % 41,
        "ignore_eos": i % 3 > 0,
    }
    if i % 4 == 1:
        params["min_new_tokens"] = 18
    if i % 4 == 2:
        params |= {"frequency_penalty": 0.6, "presence_penalty": 0.3}
    if i % 4 == 3:
        params["repetition_penalty"] = 1.3
    return params


def generate(engine: Any, settings: dict[str, Any], prefix: str) -> list[Any]:
    count = settings["count"]
    engine.flush_cache()
    outputs = engine.generate(
        input_ids=prompts(count),
        sampling_params=[sampling(i) for i in range(count)],
        rid=[f"{prefix}{i}" for i in range(count)],
        return_logprob=[i % 3 == 0 for i in range(count)],
        top_logprobs_num=[2 if i % 6 == 0 else 0 for i in range(count)],
        token_ids_logprob=[[5, 9] if i % 9 == 0 else None for i in range(count)],
    )
    return [
        {
            "ids": output["output_ids"],
            "finish": output["meta_info"]["finish_reason"],
            "cached": output["meta_info"]["cached_tokens"],
            "logprobs": output["meta_info"].get("output_token_logprobs"),
            "top": output["meta_info"].get("output_top_logprobs"),
            "chosen": output["meta_info"].get("output_token_ids_logprobs"),
        }
        for output in outputs
    ]


def main() -> None:
    model, settings = sys.argv[1], json.loads(os.environ[SETTINGS])
    engine = OffloadingEngine(
        model_path=model,
        dtype="float32",
        mem_fraction_static=0.3,
        log_level="info",
        **settings["engine"],
    )
    found = {}
    try:
        for name, run in settings["runs"].items():
            plain = generate(engine, run, f"plain/{name}/")
            before = offloading_state(engine)
            offloaded = generate(engine, run, f"{OFFLOAD}{name}/")
            counts = offloading_state(engine)
            found[name] = {
                "plain": plain, "offloaded": offloaded,
                "before": before, "counts": counts,
            }  # fmt: skip
    finally:
        engine.shutdown()
    print(json.dumps(found))


def offloading_state(engine: Any) -> dict[str, Any]:
    """The counts since the last call."""
    state: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    found: dict[str, Any] = state["offloading"]
    return found
