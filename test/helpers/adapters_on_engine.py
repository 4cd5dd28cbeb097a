"""A job with LoRA adapters on one engine, planned or stock; ``main`` prints its findings.

Loads are counted where SGLang copies the weights of an adapter into its pool.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from adapter_job import Line
from adapter_runs import LOADS, OFFLOAD_EVERY
from sglang.srt.lora.mem_pool import LoRAMemoryPool
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.job import Job
from sglang_batch.request import BatchRequestInput, RequestOutput, named_job_id
from sglang_batch.srt.engine import in_process
from sglang_batch.srt.scheduler.kv.kv_manager import KvManager
from sglang_batch.srt.scheduler.kv.offloading import drain_results

_load = LoRAMemoryPool.load_lora_weight_to_buffer


def _noted_load(pool: Any, uid: str | None, *args: Any, **kwargs: Any) -> None:
    with open(os.environ[LOADS], "a") as file:
        file.write(f"{uid or 'base'}\n")
    _load(pool, uid, *args, **kwargs)


_make_room = KvManager.make_room_for_decodes
_steps = itertools.count(1)


def _offload_often(manager: Any, running_batch: Any) -> None:
    """As if KV were short every few steps, for the newest request."""
    _make_room(manager, running_batch)
    every = int(os.environ.get(OFFLOAD_EVERY, 0))
    if not every or next(_steps) % every or len(running_batch.reqs) < 2:
        return
    drain_results(manager._scheduler)
    running_batch.filter_batch()
    running_batch.batch_is_full = False
    manager.offload_until(running_batch, 0, leave=1, num_rows=1)
    manager.note_allocation()


# The engine's processes are forks of this one.
LoRAMemoryPool.load_lora_weight_to_buffer = _noted_load
KvManager.make_room_for_decodes = _offload_often  # type: ignore[method-assign]


def loads() -> list[str]:
    """The adapters that were loaded so far, in order, without the model alone."""
    path = Path(os.environ[LOADS])
    found = path.read_text().split() if path.exists() else []
    return [each for each in found if each != "base"]


def request(index: int, line: Line) -> BatchRequestInput:
    """A line of a file. Every second one names its adapter in ``model``."""
    body: dict[str, Any] = {
        "prompt": line.prompt,
        "max_tokens": line.max_new_tokens,
        "temperature": 0,
        "model": "demo",
    }
    if line.adapter >= 0 and index % 2:
        body["model"] = f"demo:a{line.adapter}"
    elif line.adapter >= 0:
        body["lora_path"] = f"a{line.adapter}"
    url = "/v1/completions"
    return BatchRequestInput(index, f"r{index}", url, json.dumps(body).encode())


async def planned(engine: Any, job: list[Line], policy: str) -> dict[str, Any]:
    """Answers, adapters loaded and tokens from the cache."""
    requests = [request(i, line) for i, line in enumerate(job)]
    texts: dict[int, str] = {}
    cached = 0

    def sink(line: BatchRequestInput, output: RequestOutput) -> None:
        nonlocal cached
        cached += output.usage.cached_tokens
        body = output.body.decode()
        texts[line.index] = (
            json.loads(body)["choices"][0]["text"] if output.ok else body
        )

    config = OfflineBatchConfig(policy=policy)
    before = len(loads())
    # A name of its own for each policy.
    name = named_job_id(f"{policy} {time.monotonic_ns()}")
    await Job(name, requests, range(len(requests)), engine, config, sink).run()
    state = (await engine.manager.get_internal_state())[0]["offline_batch"]
    await engine.manager.flush_cache()
    return {
        "texts": [texts[i] for i in range(len(job))],
        "loads": len(loads()) - before,
        "cached": cached,
        "offloaded": state["offloaded"],
    }


async def among_online(engine: Any, job: list[Line], policy: str) -> dict[str, Any]:
    """The same next to online requests, one of each adapter, and a line whose adapter
    nobody knows, the last one."""
    unknown = Line(len({line.adapter for line in job}), job[0].prompt, 4)
    running = asyncio.ensure_future(planned(engine, [*job, unknown], policy))
    await asyncio.sleep(0.2)
    firsts = {line.adapter: i for i, line in reversed([*enumerate(job)])}

    async def online(line: Line) -> str:
        wanted = GenerateReqInput(
            input_ids=line.prompt,
            sampling_params={"temperature": 0, "max_new_tokens": line.max_new_tokens},
            lora_path=None if line.adapter < 0 else f"a{line.adapter}",
        )
        answers = engine.manager.generate_request(wanted, None)
        answer = await anext(answers)
        return str(answer["text"])

    found = await asyncio.gather(*(online(job[i]) for i in firsts.values()))
    result = await running
    return result | {"online": dict(zip(firsts.values(), found, strict=True))}


def stock(server_args: list[str], job: list[Line]) -> dict[str, Any]:
    """The same of SGLang without the flag: all lines at once, in their order."""
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    engine = sglang.Engine(server_args=prepare_server_args(server_args))
    found = engine.generate(
        input_ids=[line.prompt for line in job],
        sampling_params=[
            {"temperature": 0, "max_new_tokens": line.max_new_tokens} for line in job
        ],
        lora_path=[None if line.adapter < 0 else f"a{line.adapter}" for line in job],
    )
    engine.shutdown()
    return {
        "texts": [each["text"] for each in found],
        "loads": len(loads()),
        "cached": sum(each["meta_info"]["cached_tokens"] for each in found),
    }


def main() -> None:
    given = json.load(sys.stdin)
    job = [Line(*each) for each in given["lines"]]
    result: dict[str, Any]
    if given["stock"]:
        result = {"stock": stock(sys.argv[1:], job)}
    else:
        args = in_process.parse_server_args(sys.argv[1:])
        with in_process.engine(args) as (engine, loop):
            loop.run_until_complete(engine.connect())
            run = among_online if given["online"] else planned
            result = {
                policy: loop.run_until_complete(run(engine, job, policy))
                for policy in given["policies"]
            }
    print(json.dumps(result))
