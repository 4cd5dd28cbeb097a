"""Answers of one engine with some flags: of many requests in one call, and one by one.

Runs in a process of its own: ``main`` prints them as one line of JSON, with the state of the
scheduler in between.
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


def sampling(index: int, most: int) -> dict[str, Any]:
    return {
        "max_new_tokens": most + index,
        "temperature": index % 2 * 0.7,
        "sampling_seed": index,
    }


def answers(
    engine: Any, numbers: list[int], most: int, **more: Any
) -> list[dict[str, Any]]:
    asked = prompts()
    done = engine.generate(
        input_ids=[asked[i] for i in numbers],
        sampling_params=[sampling(i, most) for i in numbers],
        return_logprob=True,
        **more,
    )
    return [
        {
            "tokens": one["output_ids"],
            "logprobs": [each[0] for each in one["meta_info"]["output_token_logprobs"]],
            "experts": one["meta_info"].get("routed_experts"),
            "cached": one["meta_info"]["cached_tokens"],
            "verified": one["meta_info"].get("spec_verify_ct"),
        }
        for one in done
    ]


def main() -> None:
    model, most, arguments = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    more = {"return_routed_experts": "enable_return_routed_experts" in arguments}
    engine = Engine(
        model_path=model,
        dtype="float32",
        random_seed=0,
        offline_batch=True,
        log_level="info",
        **arguments,
    )
    try:
        found: dict[str, Any] = {"alone": []}
        # SGLang draws otherwise in a batch where one request takes the likeliest token.
        for kind in ("greedy", "sampled"):
            numbers = list(range(kind == "sampled", NUM_GROUPS * GROUP, 2))
            found[kind] = answers(engine, numbers, most, **more)
        info = engine.get_server_info()["internal_states"][0]["offline_batch"]
        found["state"] = info
        for i in range(NUM_GROUPS * GROUP):
            if "speculative_algorithm" not in arguments:  # it would forget the answers
                engine.flush_cache()
            found["alone"] += answers(engine, [i], most, **more)
    finally:
        engine.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
