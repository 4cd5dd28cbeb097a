"""Jobs on one engine whose mixed steps run whole or split, in several ways.

Runs in a process of its own: ``main`` prints answers and counters by way and job, as one
line of JSON. The way is in the name of a job, and the scheduler process takes it from there.
Each job begins when all of its requests are there, so that both ways take the same steps.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from typing import Any

import torch
from job_names import name_of, note_name
from paused_starts import run_all_at_once
from race_watch import RaceWatch, RecordingLanes
from sglang.srt.entrypoints.engine import Engine

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.engine import GENERATE_URL
from sglang_batch.job.job import Job
from sglang_batch.request import BatchRequestInput
from sglang_batch.srt.engine import in_process

CHUNK = 48
KV_TOKENS = 1200
OFFLOAD_EVERY = 7
COUNTS = (
    "mixed_steps", "split_steps", "offloaded", "resumed", "steps", "attention_steps",
    "attention_steps_shared",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


# The scheduler process ----------------------------------------------------------------


class FaultyHalves:
    """Fails in the third step, after its decodes have written their KV."""

    shares = (None,)

    def __init__(self, halves: Any) -> None:
        self._halves = halves
        self._steps = 0

    def run(self, *args: Any) -> Any:
        done = self._halves.run(*args)
        self._steps += 1
        if self._steps == 3:
            raise RuntimeError("injected")
        return done


class Offloading:
    """``KvManager.make_room_for_decodes`` that finds no room in some steps."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_manager
        self._stock = self._manager.make_room_for_decodes
        self._steps = 0

    def __call__(self, running_batch: Any) -> None:
        from sglang_batch.srt.scheduler.kv.offloading import drain_results

        self._stock(running_batch)
        self._steps += 1
        if self._steps % OFFLOAD_EVERY == 0 and len(running_batch.reqs) > 3:
            drain_results(self._scheduler)
            running_batch.filter_batch()
            self._manager.offload_until(running_batch, 0, leave=1, num_rows=2)
            self._manager.note_allocation()


class WatchedHalves:
    """The halves as on a GPU, one after the other, with their operators watched."""

    shares = (None,)

    def __init__(self, scheduler: Any) -> None:
        from sglang_batch.srt.overlap.batch_halves import StreamedHalves

        runner = scheduler.tp_worker.model_runner
        pool = runner.token_to_kv_pool
        self._kv = [*pool.k_buffer, *pool.v_buffer]
        self._lanes = RecordingLanes()
        self._halves = StreamedHalves(runner, {None: self._lanes})
        self.races: list[str] = []
        self.across = 0

    def run(self, stock: Any, halves: Any, share: Any) -> Any:
        # Places in the KV pool are the only ones that both halves may write.
        slots = [set(half.out_cache_loc.tolist()) for half in halves]
        if slots[0] & slots[1]:
            self.races.append("both halves write to one slot of the KV pool")
        with RaceWatch(self._lanes, self._kv) as watch:
            decodes, prompts = self._halves.run(stock, halves, share)
            torch.cat([prompts.next_token_logits, decodes.next_token_logits])
        self.races += watch.races
        self.across += sum(watch.across.values())
        return decodes, prompts


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's function of this name, with a scheduler that knows the ways."""
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()
    ways(scheduler.Scheduler)
    scheduler.run_scheduler_process(*args, **kwargs)


def ways(scheduler_class: Any) -> None:
    run_batch, state = scheduler_class.run_batch, scheduler_class._offline_state
    make_parts = scheduler_class._make_parts

    def make_and_try(scheduler: Any) -> None:
        make_parts(scheduler)
        scheduler.tried = trial(scheduler)

    def begin(scheduler: Any, job: str) -> None:
        from sglang_batch.srt.overlap.overlapped_steps import always

        [hook] = scheduler.hooks
        overlap, way = hook.overlap, job.split()[0]
        scheduler.threads = getattr(scheduler, "threads", overlap.halves)
        scheduler.watched = getattr(scheduler, "watched", None) or WatchedHalves(
            scheduler
        )
        overlap.halves = {
            "lanes": scheduler.watched,
            "fault": FaultyHalves(scheduler.threads),
        }.get(way, scheduler.threads)
        manager = scheduler.kv_manager
        manager.__dict__.pop("make_room_for_decodes", None)
        if job.endswith("offloaded"):
            manager.make_room_for_decodes = Offloading(scheduler)
        overlap.policy = always
        if way == "whole":
            overlap.policy = lambda step: None
        # Tokens that are drawn are those of the other way.
        torch.manual_seed(0)

    def run(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        job = name_of(batch.reqs[0].rid.rpartition("-")[0])
        if job and job != getattr(scheduler, "job", ""):
            scheduler.job = job
            begin(scheduler, job)
        return run_batch(scheduler, batch, *args, **kwargs)

    def with_races(scheduler: Any) -> dict[str, Any]:
        watched = getattr(scheduler, "watched", None)
        found = (
            {"races": watched.races[:5], "across": watched.across} if watched else {}
        )
        return state(scheduler) | found | {"tried": scheduler.tried}

    scheduler_class._make_parts = make_and_try
    scheduler_class.run_batch = run
    scheduler_class._offline_state = with_races


def trial(scheduler: Any) -> dict[str, Any]:
    """A trial of a few shapes, as a GPU makes one."""
    from sglang_batch.srt.overlap.overlap_choice import OverlapTrial

    allocator = scheduler.token_to_kv_pool_allocator
    before = allocator.available_size()
    [hook] = scheduler.hooks
    table = OverlapTrial(scheduler, hook.overlap).run(
        (32, 48, 4096), ((4, 64), (8, 4096)), budget_s=5.0
    )
    rows = scheduler.req_to_token_pool.req_to_token
    return {
        "cells": [dataclasses.asdict(cell) for cell in table.cells],
        "leaked": int(before - allocator.available_size() + rows.count_nonzero()),
        "exponent": min(table.exponent, 1e9),
    }


# Jobs ---------------------------------------------------------------------------------


def requests(name: str) -> list[BatchRequestInput]:
    """Prompts of one token, others that end inside and at the end of a chunk."""
    draw = random.Random(name)
    found = []
    for index in range(36):
        length = (1, CHUNK, 2 * CHUNK + 1)[index % 12] if index % 12 < 3 else 0
        prompt = [
            draw.randrange(20, 120) for _ in range(length or draw.randrange(2, 99))
        ]
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": draw.randrange(1, 40),
            "ignore_eos": True,
        }
        if name == "shared":
            prompt = [30 + index % 2] * 100 + prompt
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling}
        if name == "penalties":
            sampling |= {
                "frequency_penalty": 0.5, "presence_penalty": 0.4,
                "repetition_penalty": 1.2, "min_new_tokens": 1,
            }  # fmt: skip
        elif name == "grammar" and index % 2:
            sampling |= {"json_schema": json.dumps(SCHEMA), "ignore_eos": False}
        elif name == "drawn":
            sampling |= {
                "temperature": 0.9,
                "top_p": 0.9,
                "top_k": 40,
                "sampling_seed": index,
            }
        elif name == "logprobs":
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        elif name == "prompt_logprobs" and index % 3 == 0:
            body |= {"return_logprob": True, "logprob_start_len": 0}
        data = json.dumps(body).encode()
        found.append(BatchRequestInput(index, f"r{index}", GENERATE_URL, data))
    return found


async def totals(manager: Any) -> dict[str, Any]:
    state: dict[str, Any] = (await manager.get_internal_state())[0]["offline_batch"]
    return state


async def run(engine: Any, way: str, name: str) -> dict[str, Any]:
    manager, asked = engine.manager, requests(name)
    config = OfflineBatchConfig(policy="dfs", max_inflight=len(asked))
    answers: dict[int, Any] = {}

    def keep(request: BatchRequestInput, output: Any) -> None:
        answers[request.index] = json.loads(output.body)

    before = await totals(manager)
    job_id = note_name(f"{way} {name}")
    job = Job(job_id, asked, range(len(asked)), engine, config, keep)
    await run_all_at_once(job, len(asked), manager)
    after = await totals(manager)
    await manager.flush_cache()
    info = [answers[i]["meta_info"] for i in range(len(asked))]
    return {
        "tokens": [answers[i]["output_ids"] for i in range(len(asked))],
        "texts": [answers[i]["text"] for i in range(len(asked))],
        "logprobs": [
            [each[0] for each in one.get("output_token_logprobs") or ()] for one in info
        ],
        "prompt_logprobs": [
            [each[0] for each in one.get("input_token_logprobs") or ()] for one in info
        ],
        "fault": after["split_fault"],
        "races": after.get("races"),
        "across": after.get("across"),
        "tried": after["tried"],
        **{key: after[key] - before[key] for key in COUNTS},
    }


def main() -> None:
    found: dict[str, dict[str, Any]] = {}
    Engine.run_scheduler_process_func = staticmethod(run_scheduler_process)
    arguments = [
        "--model-path", sys.argv[1], "--dtype=float32", "--mem-fraction-static=0.3",
        f"--max-total-tokens={KV_TOKENS}", f"--chunked-prefill-size={CHUNK}",
        "--max-running-requests=12", "--log-level=info",
        '--offline-batch-config={"overlap": "on", "attention": "torch", "learn_costs": false}',
    ]  # fmt: skip
    with in_process.engine(in_process.parse_server_args(arguments)) as (engine, loop):
        loop.run_until_complete(engine.connect())
        for name, ways in json.loads(sys.argv[2]).items():
            for way in ways:
                one = loop.run_until_complete(run(engine, way, name))
                found.setdefault(name, {})[way] = one
    print(json.dumps(found))


if __name__ == "__main__":
    main()
