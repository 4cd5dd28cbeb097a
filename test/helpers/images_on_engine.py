"""Questions about images on one engine; ``main`` prints answers and encoder runs.

Encoder runs are counted where the model's vision tower gets images.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.job import Job
from sglang_batch.request import BatchRequestInput, RequestOutput
from sglang_batch.srt.engine import in_process

RUNS = "ENCODER_RUNS_FILE"
_encode = Model.get_image_feature


def _noted(model: Any, items: Any) -> Any:
    with open(os.environ[RUNS], "a") as file:
        for item in items:
            file.write("image\n" * len(item.image_grid_thw))
    return _encode(model, items)


# The engine's processes are forks of this one.
Model.get_image_feature = _noted


def request(index: int, url: str, question: str, most: int) -> BatchRequestInput:
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question},
    ]
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
            body["choices"][0]["message"]["content"]
            if output.ok
            else "error: " + body["error"]["message"]
        )

    config = OfflineBatchConfig(policy=given["policy"])
    args = in_process.parse_server_args(sys.argv[1:])
    with in_process.engine(args) as (engine, loop):
        loop.run_until_complete(engine.connect())
        manager = engine._tokenizer_manager
        if given["ahead"]:
            engine._media_room = asyncio.Semaphore(given["ahead"])
        name = f"batch_{time.monotonic_ns()}"
        job = Job(name, requests, range(len(requests)), engine, config, sink)
        loop.run_until_complete(job.run())
    with open(os.environ[RUNS]) as file:
        runs = len(file.readlines())
    found = {
        "texts": [texts[i] for i in range(len(requests))],
        "encoded": runs,
        "ratio": job.prefix_sharing_ratio,
    }
    print(json.dumps(found | usage))
