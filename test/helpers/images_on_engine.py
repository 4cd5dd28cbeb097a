"""Questions about images and sounds on one engine; ``main`` prints answers and encoder runs.

Encoder runs are counted where the model's encoder gets them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from sglang.srt.models.mistral import Mistral3ForConditionalGeneration
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from sglang.srt.models.qwen2_audio import Qwen2AudioForConditionalGeneration

from sglang_batch.batch_api.protocol import TRANSCRIPTIONS_URL
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job import job_planner
from sglang_batch.job.job import Job
from sglang_batch.request import BatchRequestInput, RequestOutput, named_job_id
from sglang_batch.srt.engine import in_process
from sglang_batch.srt.scheduler import plan_scheduler

RUNS = "ENCODER_RUNS_FILE"


def _note_runs(model: type, sizes: str, method: str = "get_image_feature") -> None:
    """Note each image that the model encodes. The engine's processes are forks of this.

    sizes: the field of SGLang's items that has an entry per image.
    """
    encode = getattr(model, method)

    def noted(self: Any, items: Any) -> Any:
        with open(os.environ[RUNS], "a") as file:
            for item in items:
                file.write("image\n" * len(getattr(item, sizes)))
        return encode(self, items)

    setattr(model, method, noted)


_note_runs(Qwen2_5_VLForConditionalGeneration, "image_grid_thw")
_note_runs(Mistral3ForConditionalGeneration, "image_sizes")
_note_runs(Qwen2AudioForConditionalGeneration, "feature", "get_audio_feature")


_num_placeholders = plan_scheduler.num_placeholders
_build_tree = job_planner.build_prefix_tree
_planned = [0]


def _note_placeholders(*args: Any) -> int:
    """Note how many placeholders the scheduler counts in a step."""
    number = _num_placeholders(*args)
    with open(os.environ[RUNS], "a") as file:
        file.write("placeholder\n" * number)
    return number


def _note_plan(*args: Any, **options: Any) -> Any:
    tree = _build_tree(*args, **options)
    _planned.append(0 if tree.media is None else tree.media.num_unique)
    return tree


plan_scheduler.num_placeholders = _note_placeholders
job_planner.build_prefix_tree = _note_plan


def request(
    index: int, media: str | dict[str, Any], question: str, most: int
) -> BatchRequestInput:
    """A line about an image, or a part of a message. One with a file is transcribed."""
    if isinstance(media, str):
        media = {"type": "image_url", "image_url": {"url": media}}
    if "file_url" in media:
        data = json.dumps({"model": "demo", **media}).encode()
        return BatchRequestInput(index, f"r{index}", TRANSCRIPTIONS_URL, data)
    parts = [media, {"type": "text", "text": question}]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": most,
        "temperature": 0,
    }
    data = json.dumps(body).encode()
    return BatchRequestInput(index, f"r{index}", "/v1/chat/completions", data)


def main() -> None:
    given = json.load(sys.stdin)
    requests = [request(i, *each) for i, each in enumerate(given["lines"])]
    texts: dict[int, str] = {}
    usage = {"cached": 0, "input": 0, "sent": 0}

    def sink(line: BatchRequestInput, output: RequestOutput) -> None:
        body = json.loads(output.body)
        usage["cached"] += output.usage.cached_tokens
        usage["sent"] = max(usage["sent"], len(manager.rid_to_state))
        usage["input"] += output.usage.input_tokens
        texts[line.index] = (
            (body.get("text") or body["choices"][0]["message"]["content"])
            if output.ok
            else "error: " + body["error"]["message"]
        )

    config = OfflineBatchConfig(policy=given["policy"])
    args = in_process.parse_server_args(sys.argv[1:])
    with in_process.engine(args) as (engine, loop):
        loop.run_until_complete(engine.connect())
        manager = engine.manager
        if given["ahead"]:
            engine._media_room = asyncio.Semaphore(given["ahead"])
        name = named_job_id(str(time.monotonic_ns()))
        job = Job(name, requests, range(len(requests)), engine, config, sink)
        loop.run_until_complete(job.run())
    with open(os.environ[RUNS]) as file:
        noted = file.read().split()
    found = {
        "texts": [texts[i] for i in range(len(requests))],
        "encoded": noted.count("image"),
        # Among the tokens that the scheduler computes, and in the plan.
        "placeholders": (noted.count("placeholder"), max(_planned)),
        "ratio": job.prefix_sharing_ratio,
    }
    print(json.dumps(found | usage))
