"""Whole jobs in one engine: of unknown lengths, of lines of many parts, by every policy.

Runs in a process of its own: ``main`` prints one line of JSON, for the tests to look at.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

from builders import CHAT, make_body
from plan_leaves import leaves_of
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_batch.config import POLICIES, OfflineBatchConfig
from sglang_batch.job import live_plan, rendering
from sglang_batch.job.job import Job
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.job.job_shards import ShardPlan
from sglang_batch.request import (
    BatchRequestInput,
    RequestOutput,
    engine_request_id,
    named_job_id,
)
from sglang_batch.srt.engine import in_process

NUM_REQUESTS = 240
GATHERED = 38
MAX_INFLIGHT = 24
TEXTS = [f"document {i % 4} {'x' * 40 * (i % 4)} question {i}" for i in range(24)]


class Recorder:
    """The engine, with a record of its calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.opened: list[Any] = []
        self.sent: list[int] = []
        self.in_flight: set[int] = set()
        self.sides: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def open_job(self, job_id: str, plans: Any) -> None:
        self.opened.append(plans)
        await self._engine.open_job(job_id, plans)

    async def execute(self, prepared: Any, replica: int | None = None) -> Any:
        number = int(prepared.rid.rpartition("-")[2])
        self.sent.append(number)
        self.in_flight.add(number)
        plan = self.opened[-1][0] if self.opened and self.opened[-1] else None
        if plan is not None and plan.density is not None:
            positions = [
                plan.position[leaves_of(plan)[each]] for each in self.in_flight
            ]
            right = sum(int(each >= plan.num_left) for each in positions)
            self.sides.append((len(positions) - right, right))
        try:
            return await self._engine.execute(prepared, replica)
        finally:
            self.in_flight.discard(number)


def chat(index: int, text: str, **options: Any) -> BatchRequestInput:
    body = json.dumps(make_body(text, **options)).encode()
    return BatchRequestInput(index, f"r{index}", CHAT, body)


def chats() -> Iterator[BatchRequestInput]:
    # Half of them short questions, half long documents with one-word answers.
    for i in range(NUM_REQUESTS):
        long = i % 2
        text = f"document {i % 8} {'x' * 400 * long} question {i}"
        yield chat(i, text, max_tokens=6 if long else 60, temperature=0)


def known_lengths() -> Iterator[BatchRequestInput]:
    for i in range(8):
        yield chat(i, f"question {i}", max_tokens=2, ignore_eos=True)


def of_many_parts() -> Iterator[BatchRequestInput]:
    several = {"prompt": [f"prompt {i}" for i in range(12)], "max_tokens": 3}
    sampled = {"prompt": "one prompt", "n": 11, "max_tokens": 3}
    both = {"prompt": ["a prompt", "another"], "n": 2, "max_tokens": 3}
    for i, fields in enumerate([several, sampled, both]):
        body = json.dumps({"model": "demo", **fields}).encode()
        yield BatchRequestInput(i, f"r{i}", "/v1/completions", body)


def of_every_kind() -> Iterator[BatchRequestInput]:
    """Lines that SGLang's serving classes render, by two of each kind."""
    chat_line = make_body("hello there", max_tokens=9)
    text = {"model": "demo", "max_tokens": 9}
    native = {"sampling_params": {"max_new_tokens": 9, "temperature": 0}}
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat_line),
        (CHAT, chat_line | {"logprobs": True, "top_logprobs": 2}),
        (CHAT, chat_line | {"n": 2, "stop": ["q", "zz"]}),
        (CHAT, chat_line | {"tools": [{"type": "function", "function": tool}]}),
        ("/v1/completions", text | {"prompt": "a text", "echo": True, "logprobs": 1}),
        ("/v1/completions", text | {"prompt": ["one", "another"]}),
        ("/v1/completions", text | {"prompt": [40, 41, 42, 43]}),
        ("/generate", native | {"text": "a text", "return_logprob": True}),
        ("/generate", native | {"input_ids": [50, 51, 52]}),
        ("/v1/responses", text | {"input": "a question", "max_output_tokens": 9}),
    ]
    number = itertools.count()
    for url, body in kinds * 2:
        for name in ("max_tokens",) if url == "/v1/responses" else ():
            body = {key: value for key, value in body.items() if key != name}
        if url != "/generate":
            body = body | {"temperature": 0}
        i = next(number)
        yield BatchRequestInput(i, f"r{i}", url, json.dumps(body).encode())


def from_disk(loop: Any, engine: Any) -> dict[str, Any]:
    """Answers of lines whose rendered form waited in memory, and on disk."""
    prepared: list[str] = []
    tokenized: list[str] = []
    prepare = engine._prepare

    def counted(request: BatchRequestInput, *args: Any) -> Any:
        prepared.append(request.url)
        return prepare(request, *args)

    engine._prepare = counted
    manager = engine.manager
    tokenize = manager._tokenize_texts

    async def noted(texts: Any, *args: Any) -> Any:
        tokenized.append(str(texts))
        return await tokenize(texts, *args)

    manager._tokenize_texts = noted
    answers = []
    before = live_plan.FIRST_REQUESTS, rendering.KEPT_REQUESTS
    live_plan.FIRST_REQUESTS = 8
    for name, kept in (("memory", 1000), ("disk", 0)):
        rendering.KEPT_REQUESTS = kept
        prepared.clear()
        lines = list(of_every_kind())
        _, found = run(loop, engine, name, lines, policy="dfs")
        answers.append([_without_ids(found[i]) for i in range(len(lines))])
    live_plan.FIRST_REQUESTS, rendering.KEPT_REQUESTS = before
    del engine._prepare, manager._tokenize_texts
    return {
        "differing": [
            i for i, (a, b) in enumerate(zip(*answers, strict=True)) if a != b
        ],
        "ok": all(output["ok"] for run in answers for output in run),
        "prepared": {url: prepared.count(url) for url in prepared},
        "lines": {line.url: [x.url for x in lines].count(line.url) for line in lines},
        "tokenized_by_sglang": tokenized,
    }


# Of the fields in ``meta_info``, most of which are times.
NATIVE_FACTS = ("finish_reason", "prompt_tokens", "completion_tokens")


def _without_ids(output: RequestOutput) -> dict[str, Any]:
    """An answer without what differs each time: ids, times and cached tokens."""
    changing = {
        *(
            "id",
            "created",
            "created_at",
            "completed_at",
            "e2e_latency",
            "cached_tokens",
        ),
        *("prompt_tokens_details", "input_tokens_details", "cached_tokens_details"),
    }

    def stable(value: Any) -> Any:
        if isinstance(value, list):
            return [stable(each) for each in value]
        if isinstance(value, float):
            return round(value, 3)
        if isinstance(value, dict):
            return {
                key: {name: each.get(name) for name in NATIVE_FACTS}
                if key == "meta_info"
                else stable(each)
                for key, each in value.items()
                if key not in changing
            }
        return value

    return {"ok": output.ok, "body": stable(json.loads(output.body))}


def run(
    loop: Any,
    engine: Any,
    name: str,
    requests: list[BatchRequestInput],
    **config: Any,
) -> tuple[Recorder, dict[int, RequestOutput]]:
    recorder, answers = Recorder(engine), dict[int, RequestOutput]()
    settings = OfflineBatchConfig(**config)

    def sink(request: BatchRequestInput, output: RequestOutput) -> None:
        assert request.index not in answers
        answers[request.index] = output

    job = Job(
        named_job_id(name), requests, range(len(requests)), recorder, settings, sink
    )
    loop.run_until_complete(job.run())
    return recorder, answers


def by_every_policy(loop: Any, engine: Any) -> dict[str, Any]:
    """The requests sent of a small job, and its plan, by policy."""
    plans: list[Any] = []

    make_plans = JobPlanner.plans

    def planned(self: JobPlanner, *args: Any) -> list[ShardPlan]:
        shards = make_plans(self, *args)
        # Those of the thread that compiles the planner are larger.
        if self.num_requests == len(TEXTS):
            plans.append(shards[0])
        return shards

    JobPlanner.plans = planned  # type: ignore[method-assign]
    found = {}
    for policy in POLICIES:
        requests = [
            chat(i, text, max_tokens=1 + i * 7 % 5) for i, text in enumerate(TEXTS)
        ]
        recorder, answers = run(
            loop, engine, f"small_{policy}", requests,
            policy=policy, seed=3, max_inflight=2,
        )  # fmt: skip
        # A plan of a job that grew has its requests in another order than the job.
        shard = plans.pop() if plans else None
        found[policy] = {
            "sent": recorder.sent,
            "ok": sum(output.ok for output in answers.values()),
            "plan": shard and _taken(shard),
            "chosen": shard and shard.plan.policy,
        }
    return found


def _taken(shard: ShardPlan) -> list[int]:
    """Numbers of the requests of a shard in its order."""
    numbers = shard.numbers[shard.plan.scan.requests]
    taken: list[int] = [*numbers.tolist(), *shard.too_large.tolist()]
    return taken


def gathered(loop: Any, manager: Any) -> list[dict[str, Any]]:
    """The answers to single calls that many tasks make at the same time."""

    async def call(i: int) -> Any:
        text = f"document {i % 3} {'x' * 60} question {i}"
        params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        request = GenerateReqInput(text=text, sampling_params=params, rid=f"mine-{i}")
        if i == GATHERED - 1:  # alone, when the others have their answers
            await asyncio.sleep(1.0)
        elif i % 2:  # in the middle of the others
            await asyncio.sleep(0.02)
        answers = manager.generate_request(request, None)
        if i == GATHERED - 2:
            waiting = asyncio.ensure_future(answers.__anext__())
            await asyncio.sleep(0.01)  # it waits to be gathered
            manager.abort_request(f"mine-{i}")
            return await waiting
        return await answers.__anext__()

    async def calls() -> list[Any]:
        return await asyncio.gather(*map(call, range(GATHERED)))

    answers: list[dict[str, Any]] = loop.run_until_complete(calls())
    return answers


class BeginTogether:
    """The engine of one of several jobs, of which none sends before all are open."""

    def __init__(self, engine: Any, others: asyncio.Barrier) -> None:
        self._engine = engine
        self._others: asyncio.Barrier | None = others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def open_job(self, job_id: str, plans: Any) -> None:
        await self._engine.open_job(job_id, plans)
        others, self._others = self._others, None
        if others is not None:
            await others.wait()


def of_one_corpus(loop: Any, engine: Any, manager: Any) -> dict[str, Any]:
    """Two jobs at the same time over the same documents, more than the KV holds."""
    both = asyncio.Barrier(2)
    documents = [f"{i:04d} " + chr(97 + i % 26) * 600 for i in range(60)]
    jobs, answers = [], []
    loop.run_until_complete(manager.flush_cache())
    for name in ("first", "second"):
        lines = [
            chat(i, f"{documents[i % 60]} {name} {i}", max_tokens=4, ignore_eos=True)
            for i in range(240)
        ]
        found: dict[int, RequestOutput] = {}
        answers.append(found)
        job = Job(
            named_job_id(f"{name}_of_corpus"),
            lines,
            range(len(lines)),
            BeginTogether(engine, both),
            OfflineBatchConfig(policy="dfs"),
            lambda request, output, found=found: found.update({request.index: output}),
        )
        jobs.append(job)

    async def run_all() -> None:
        await asyncio.gather(*(job.run() for job in jobs))

    loop.run_until_complete(run_all())
    usages = [output.usage for found in answers for output in found.values()]
    return {
        "documents": len(documents),
        "document_len": 600,
        "answers": len(usages),
        "prompt": sum(usage.input_tokens for usage in usages),
        "cached": sum(usage.cached_tokens for usage in usages),
    }


def restored(loop: Any, manager: Any, capacity: int) -> dict[str, Any]:
    """Calls whose groups share more tokens than the KV holds, each group asked twice.

    The answers are those of all calls at once, and of one after the other with nothing
    in the cache.
    """
    prefix_len = 512
    num_groups = 3 * capacity // (2 * prefix_len)
    rng = random.Random(5)
    prefixes = [rng.choices(range(256), k=prefix_len) for _ in range(num_groups)]
    questions = [rng.choices(range(256), k=20) for _ in range(2 * num_groups)]
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    again: dict[int, asyncio.Event] = {i: asyncio.Event() for i in range(num_groups)}

    async def call(i: int) -> Any:
        prompt = prefixes[i % num_groups] + questions[i]
        request = GenerateReqInput(input_ids=prompt, sampling_params=params)
        return await manager.generate_request(request, None).__anext__()

    async def task(group: int) -> list[Any]:
        # Groups that come later need the KV before this one is asked again.
        first = await call(group)
        again[group].set()
        await asyncio.gather(*(event.wait() for event in again.values()))
        return [first, await call(group + num_groups)]

    async def at_once() -> list[list[Any]]:
        return await asyncio.gather(*map(task, range(num_groups)))

    async def state() -> dict[str, Any]:
        [found] = await manager.get_internal_state()
        pool: dict[str, Any] = found["offline_batch"]
        return pool

    async def alone(i: int) -> Any:
        if i % num_groups == 0:  # on a CPU, a flush collects garbage for a second
            await manager.flush_cache()
        return await call(i)

    before = loop.run_until_complete(state())
    pairs = loop.run_until_complete(at_once())
    after = loop.run_until_complete(state())
    answers = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    lone = [loop.run_until_complete(alone(i)) for i in range(2 * num_groups)]
    return {
        "groups": num_groups,
        "prefix_len": prefix_len,
        "saved": after["prefixes_saved"] - before["prefixes_saved"],
        "restored": after["prefixes_restored"] - before["prefixes_restored"],
        "cached": [each["meta_info"]["cached_tokens"] for each in answers],
        "answers": [each["output_ids"] for each in answers],
        "alone": [each["output_ids"] for each in lone],
        "alone_cached": max(each["meta_info"]["cached_tokens"] for each in lone),
    }


def running_seconds(loop: Any, engine: Any) -> dict[str, Any]:
    """What the engine says of lines that run and that wait for KV, twice."""
    requests = [
        chat(i, f"question {i}", max_tokens=900, ignore_eos=True) for i in range(100)
    ]

    async def ask() -> list[dict[str, float]]:
        job = Job(
            *(named_job_id("seconds"), requests, range(len(requests)), engine),
            OfflineBatchConfig(),
            lambda request, output: None,
        )
        running = asyncio.ensure_future(job.run())
        while not (first := await engine.running_s()):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        both = await asyncio.gather(engine.running_s(), engine.running_s())
        running.cancel()
        await asyncio.wait((running,))
        return [first, *both]

    first, second, third = loop.run_until_complete(ask())
    return {
        "first": first,
        "second": second,
        "shared": second == third,
        "ids": [
            engine_request_id(named_job_id("seconds"), i) for i in range(len(requests))
        ],
    }


def main() -> None:
    found: dict[str, Any] = {}
    args = in_process.parse_server_args(sys.argv[1:])
    with in_process.engine(args) as (engine, loop):
        loop.run_until_complete(engine.connect())
        manager = engine.manager
        before = engine.machine.cost
        # The planner is compiled here, and not while a job waits for a plan.
        run(loop, engine, "first", list(known_lengths()), policy="auto")
        rids: list[str] = []
        send = manager._send_one_request

        async def noting(tokenized: Any) -> Any:
            rids.append(tokenized.rid)
            return await send(tokenized)

        manager._send_one_request = noting
        for policy in ("dual-scan", "auto"):
            rids.clear()
            recorder, answers = run(
                loop,
                engine,
                f"whole_{policy}",
                list(chats()),
                policy=policy,
                max_inflight=MAX_INFLIGHT,
            )
            plans = [plans[0] for plans in recorder.opened]
            found[policy] = {
                "answers": {
                    i: a.usage.output_tokens for i, a in answers.items() if a.ok
                },
                "opened": [plan.policy for plan in plans],
                "same": all(plans[0].same_requests(plan) for plan in plans),
                "estimates": [float(plan.est_decode_steps.mean()) for plan in plans],
                "sides": recorder.sides,
                "sent": sorted(recorder.sent),
            }
        rids.clear()
        recorder, answers = run(loop, engine, "parts", list(of_many_parts()))
        found["parts"] = {
            "rids": list(rids),
            "choices": [
                len(json.loads(answers[i].body).get("choices", ())) for i in range(3)
            ],
            "states_left": len(manager.rid_to_state),
        }
        law = engine.learnt.law()
        found["costs"] = {
            "before": before.token_time_s,
            "after": engine.machine.cost.token_time_s,
            "samples": 0 if law is None else law.num_samples,
            "noise": None if law is None else law.noise,
            "extras": list(engine.machine.cost.extras),
        }
        found["policies"] = by_every_policy(loop, engine)
        found["gathered"] = gathered(loop, manager)
        found["unsent_left"] = len(manager.offline_unsent)
        found["from_disk"] = from_disk(loop, engine)
        found["seconds"] = running_seconds(loop, engine)
        capacity = engine.machine.limits.kv_capacity_tokens
        found["restored"] = restored(loop, manager, capacity)
        found["of_one_corpus"] = of_one_corpus(loop, engine, manager)
        found["capacity"] = engine.machine.limits.kv_capacity_tokens
        print(json.dumps(found))
