"""Answers of one engine with some flags: of all requests in one call, and one by one.

Runs in a process of its own: ``main`` prints them as one line of JSON, with the state of the
scheduler afterwards.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from sglang.srt.entrypoints.engine import Engine

NUM_GROUPS, GROUP, SHARED = 3, 6, 60


def prompts() -> list[list[int]]:
    """Groups that share a prefix, in turn."""
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(20, 120) for _ in range(count)]

    shared = [tokens(SHARED) for _ in range(NUM_GROUPS)]
    return [
        shared[i % NUM_GROUPS] + tokens(rng.randrange(3, 30))
        for i in range(NUM_GROUPS * GROUP)
    ]


def sampling(index: int) -> dict[str, Any]:
    temperature = 0.7 if index % 2 else 0
    return {
        "max_new_tokens": 24 + index,
        "temperature": temperature,
        "sampling_seed": index,
        "ignore_eos": True,
    }


def answers(engine: Any, numbers: list[int], **more: Any) -> list[dict[str, Any]]:
    asked = prompts()
    done = engine.generate(
        input_ids=[asked[i] for i in numbers],
        sampling_params=[sampling(i) for i in numbers],
        return_logprob=True,
        **more,
    )
    return [
        {
            "tokens": one["output_ids"],
            "logprobs": [each[0] for each in one["meta_info"]["output_token_logprobs"]],
            "experts": one["meta_info"].get("routed_experts"),
            "cached": one["meta_info"]["cached_tokens"],
        }
        for one in done
    ]


def main() -> None:
    model, arguments = sys.argv[1], json.loads(sys.argv[2])
    more = {
        "return_routed_experts": arguments.get("enable_return_routed_experts", False)
    }
    engine = Engine(
        model_path=model,
        dtype="float32",
        random_seed=0,
        offline_batch=True,
        log_level="info",
        **arguments,
    )
    try:
        numbers = list(range(NUM_GROUPS * GROUP))
        found: dict[str, Any] = {"together": answers(engine, numbers, **more)}
        info = engine.get_server_info()["internal_states"][0]["offline_batch"]
        found["state"] = info
        found["alone"] = []
        for i in numbers:
            engine.flush_cache()
            found["alone"] += answers(engine, [i], **more)
    finally:
        engine.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
