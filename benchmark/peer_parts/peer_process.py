"""One engine in a process of its own, which answers jobs and measures itself.

    python benchmark/peer_parts/peer_process.py SETUP

SETUP is the JSON of a peer, see bench_peers.py. A line of stdin has a job. A line of stdout
has the token ids of its ``answers``, the prompt tokens that came from the cache,
``cached_tokens``, ``seconds``, and ``cpu_s``, the processor seconds of this process and its
children. The first line says that the engine is ready. vLLM's environment runs this file,
too, so it imports nothing of the benchmarks, and of this package only for our engines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

Setup = dict[str, Any]
Job = dict[str, Any]
# Token ids of each answer, and how many prompt tokens came from the cache.
Answered = tuple[list[list[int]], int]
# How an engine answers a job, and how its cache is emptied before one.
Ready = tuple[Callable[[Job], Answered], Callable[[], object]]
STATIC_ROWS = 32


def _sampling(job: Job, token_limit: int) -> dict[str, Any]:
    """SGLang's parameters of a request."""
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": token_limit}
    if job["schema"] is not None:
        params["json_schema"] = json.dumps(job["schema"])
    return params


def _of_sglang(found: list[dict[str, Any]]) -> Answered:
    cached = sum(each["meta_info"]["cached_tokens"] for each in found)
    return [list(map(int, each["output_ids"])) for each in found], cached


@contextmanager
def sglang(setup: Setup) -> Iterator[Ready]:
    """SGLang through ``Engine.generate``, stock or with ``offline_batch``."""
    import sglang
    from sglang.srt.entrypoints.engine import Engine

    if not setup["improved"]:
        Engine.run_scheduler_process_func = staticmethod(_as_sglang_computes)
    ours = setup["kind"] == "ours"
    chosen = {"offline_batch": True} if ours else {"schedule_policy": setup["policy"]}
    engine = sglang.Engine(
        model_path=setup["model"], dtype=setup["dtype"], log_level="error",
        max_total_tokens=setup["kv_tokens"], enable_mixed_chunk=setup["mixed"],
        sleep_on_idle=True, **chosen,
    )  # fmt: skip

    def answer(job: Job) -> Answered:
        found = engine.generate(
            input_ids=job["prompts"],
            sampling_params=[_sampling(job, most) for most in job["max_tokens"]],
        )
        return _of_sglang(found)

    try:
        yield answer, engine.flush_cache
    finally:
        engine.shutdown()


def _as_sglang_computes(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler without this package's attention and layers for CPUs."""
    from sglang.srt.layers.attention import torch_native_backend
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_batch.srt.cpu import cpu_backends, packed_linears

    vars(cpu_backends)["make_backend"] = torch_native_backend.TorchNativeAttnBackend
    vars(packed_linears)["use"] = lambda: None
    scheduler.run_scheduler_process(*args, **kwargs)


@contextmanager
def dense(setup: Setup) -> Iterator[Ready]:
    """This package with ``--backend transformers``."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from throughput_engine import answer_all

    from sglang_batch.config import OfflineBatchConfig
    from sglang_batch.run.backend_options import transformers_engine

    arguments = [
        f"--model-path={setup['model']}", f"--dtype={setup['dtype']}", "--log-level=error",
        f"--max-total-tokens={setup['kv_tokens']}",
    ]  # fmt: skip
    _, start = transformers_engine(arguments)
    with start() as (engine, loop):
        loop.run_until_complete(engine.connect())

        def answer(job: Job) -> Answered:
            params = [_sampling(job, most) for most in job["max_tokens"]]
            config = OfflineBatchConfig()
            running = answer_all(engine, config, job["prompts"], params)
            return _of_sglang(loop.run_until_complete(running))

        yield answer, lambda: None


@contextmanager
def vllm(setup: Setup) -> Iterator[Ready]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.sampling_params import (  # type: ignore[import-not-found]
        StructuredOutputsParams,
    )

    block = 128  # tokens, on a CPU
    engine = LLM(
        setup["model"], dtype=setup["dtype"], enforce_eager=setup["eager"],
        num_gpu_blocks_override=setup["kv_tokens"] // block,
    )  # fmt: skip

    def answer(job: Job) -> Answered:
        schema = job["schema"] and StructuredOutputsParams(json=job["schema"])
        found = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
            [
                SamplingParams(
                    temperature=0, max_tokens=most, structured_outputs=schema
                )
                for most in job["max_tokens"]
            ],
            use_tqdm=False,
        )
        cached = sum(each.num_cached_tokens or 0 for each in found)
        return [list(each.outputs[0].token_ids) for each in found], cached

    yield answer, engine.reset_prefix_cache


@contextmanager
def transformers(setup: Setup) -> Iterator[Ready]:
    """``generate`` on padded batches of prompts with similar lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        setup["model"], dtype=setup["dtype"]
    ).eval()
    ends = model.generation_config.eos_token_id
    pad = ends[0] if isinstance(ends, list) else ends or 0

    def answer(job: Job) -> Answered:
        prompts, limits = job["prompts"], job["max_tokens"]
        order = sorted(range(len(prompts)), key=lambda i: (limits[i], len(prompts[i])))
        answers: list[list[int]] = [[] for _ in prompts]
        while order:
            size = STATIC_ROWS
            while (
                size > 1 and _cells(prompts, limits, order[:size]) > setup["kv_tokens"]
            ):
                size -= 1
            part, order = order[:size], order[size:]
            longest = max(len(prompts[i]) for i in part)
            gaps = [longest - len(prompts[i]) for i in part]
            rows = [[pad] * gap + prompts[i] for gap, i in zip(gaps, part, strict=True)]
            mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
            found = model.generate(
                torch.tensor(rows), attention_mask=torch.tensor(mask), do_sample=False,
                max_new_tokens=max(limits[i] for i in part), pad_token_id=pad,
            )  # fmt: skip
            for i, row in zip(part, found[:, longest:].tolist(), strict=True):
                answers[i] = row[: limits[i]]
        return answers, 0

    yield answer, lambda: None


def _cells(prompts: list[list[int]], limits: list[int], part: list[int]) -> int:
    lengths = [len(prompts[i]) + limits[i] for i in part]
    return len(part) * max(lengths)


KINDS = {
    "stock": sglang, "ours": sglang, "dense": dense, "vllm": vllm,
    "transformers": transformers,
}  # fmt: skip


def processor_s() -> float:
    """Of this process and those below it."""
    this = psutil.Process()
    times = [each.cpu_times() for each in (this, *this.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def main() -> None:
    # Everything else that is printed goes to stderr.
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = json.loads(sys.argv[1])
    with KINDS[setup["kind"]](setup) as (answer, empty_cache):
        # As large as a step of the jobs: the first one waits for its memory.
        warm_up = {
            "prompts": [[5 + i] * 512 for i in range(16)],
            "max_tokens": [16] * 16,
            "schema": None,
        }
        answer(warm_up)
        print(json.dumps("ready"), file=said, flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            empty_cache()
            begin, begin_cpu = time.perf_counter(), processor_s()
            answers, cached = answer(job)
            seconds, cpu_s = time.perf_counter() - begin, processor_s() - begin_cpu
            found = {"answers": answers, "cached_tokens": cached}
            found |= {"seconds": seconds, "cpu_s": cpu_s}
            print(json.dumps(found), file=said, flush=True)


if __name__ == "__main__":
    main()
