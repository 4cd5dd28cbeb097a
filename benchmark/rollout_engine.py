"""One engine in a process of its own, for ``savings_parts/rollouts.py``: steps of a training run.

    python benchmark/rollout_engine.py DIRECTORY

DIRECTORY has ``task.json``. Results are written to ``result.json`` there. A sample's length is
decided by ``min_new_tokens`` and a bias for the end token after it, so neither engine knows it
beforehand.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import throughput_probe
from report import paths_given

from sglang_batch.run.demo_model import SPECIAL_IDS

TASK_FILE, RESULT_FILE, STEPS_FILE = "task.json", "result.json", "steps.bin"
END_TOKENS = [str(SPECIAL_IDS[name]) for name in ("<|eos|>", "<|end|>")]
# Most tokens of a sample: all that an engine knows of it.
MAX_NEW_TOKENS = 1024


def sampling(length: int, most: int = MAX_NEW_TOKENS) -> dict[str, Any]:
    """Parameters with which an answer has so many tokens, though ``most`` are allowed."""
    return {
        "temperature": 1.0,
        "max_new_tokens": most,
        "min_new_tokens": length - 1,
        "logit_bias": dict.fromkeys(END_TOKENS, 100.0),
    }


class Samples:
    """What became of the samples of a step."""

    def __init__(self) -> None:
        self.tokens = 0  # of answers
        self.finished = self.aborted = 0

    def add(self, num_tokens: int, *, aborted: bool) -> None:
        self.tokens += num_tokens
        self.aborted += aborted
        self.finished += not aborted


async def run_ours(engine: Any, step: dict[str, Any], history: Any) -> Samples:
    """A call for all groups of a step, as the server runs it."""
    from sglang_batch.config import OfflineBatchConfig
    from sglang_batch.job.inflight_limit import InflightLimit
    from sglang_batch.rollout import RolloutCall, RolloutGroup
    from sglang_batch.server.service import RolloutRun
    from sglang_batch.srt.calls.call_items import engine_of

    groups = [
        RolloutGroup.model_validate(
            {
                "input_ids": prompt,
                "samples": [{"sampling_params": sampling(each)} for each in lengths],
            }
        )
        for prompt, lengths in zip(step["prompts"], step["lengths"], strict=True)
    ]
    n = len(step["lengths"][0])
    call = RolloutCall(groups=history.expecting(groups), n=n, k=step["k"])
    name = f"rollout_{step['name']}"
    run = RolloutRun(name, call, await engine_of(engine.tokenizer_manager))
    found = Samples()
    async for group in run.groups(OfflineBatchConfig(), InflightLimit(), 0):
        history.observe(groups[group.index], group)
        for sample in group.samples:
            if sample.status == "failed":
                raise RuntimeError(str(sample.error))
            found.add(len(sample.output_ids), aborted=sample.status == "aborted")
    return found


async def run_stock(engine: Any, step: dict[str, Any]) -> Samples:
    """A request for each sample, all at once. The driver aborts siblings itself."""
    found = Samples()

    async def group(prompt: list[int], lengths: list[int], nth: int) -> None:
        rids = [f"{step['name']}-{nth:04d}-{i:04d}" for i in range(len(lengths))]
        finished = 0

        async def sample(rid: str, length: int) -> None:
            nonlocal finished
            answer = await engine.async_generate(
                input_ids=prompt, sampling_params=sampling(length), rid=rid
            )
            aborted = answer["meta_info"]["finish_reason"]["type"] == "abort"
            found.add(len(answer["output_ids"]), aborted=aborted)
            finished += not aborted
            if finished == step["k"] and not aborted:
                for other in rids:
                    engine.tokenizer_manager.abort_request(other)

        await asyncio.gather(*map(sample, rids, lengths))

    await asyncio.gather(
        *(
            group(prompt, lengths, nth)
            for nth, (prompt, lengths) in enumerate(
                zip(step["prompts"], step["lengths"], strict=True)
            )
        )
    )
    return found


def main() -> None:
    [scratch] = paths_given(__doc__, "DIRECTORY")
    task = json.loads((scratch / TASK_FILE).read_text())
    throughput_probe.install(scratch / STEPS_FILE)
    import sglang

    from sglang_batch.rollout import LengthHistory

    ours = task["arguments"].get("offline_batch", False)
    engine = sglang.Engine(model_path=task["model"], **task["arguments"])
    results = []
    try:
        loop = engine.loop
        histories: dict[str, LengthHistory] = {}
        for step in task["steps"]:
            loop.run_until_complete(engine.tokenizer_manager.flush_cache())
            begin = time.perf_counter()
            if ours:
                history = histories.setdefault(step["run"], LengthHistory())
                found = loop.run_until_complete(run_ours(engine, step, history))
            else:
                found = loop.run_until_complete(run_stock(engine, step))
            seconds = time.perf_counter() - begin
            time.sleep(0.2)
            steps = throughput_probe.read_steps(scratch / STEPS_FILE, begin)
            results.append(
                {
                    "name": step["name"],
                    "steps": len(steps),
                    "seconds": seconds,
                    "cpu_s": float(steps["cpu_s"].sum()),
                    "decode_rows": int(steps["decode_rows"].sum()),
                    "prefill_tokens": int(steps["prefill_tokens"].sum()),
                    **vars(found),
                }
            )
            print(results[-1], file=sys.stderr, flush=True)
    finally:
        engine.shutdown()
    (scratch / RESULT_FILE).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
