"""Greedy answers with penalties, alone and in lists that arrive while others run.

``main`` prints them as JSON. Its arguments: the model, and those of the engine as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

COUNT = 16
KINDS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.8},
    {"presence_penalty": 1.2},
    {"repetition_penalty": 1.5},
]


def main() -> None:
    import sglang

    engine: Any = sglang.Engine(
        model_path=sys.argv[1],
        dtype="float32",
        random_seed=0,
        log_level="error",
        **json.loads(sys.argv[2]),
    )
    chance = random.Random(8)
    prompts = [[chance.randrange(32, 120) for _ in range(12)] for _ in range(COUNT)]
    params = [
        {
            "temperature": 0,
            "max_new_tokens": 30 + 2 * i,
            "ignore_eos": i % 5 > 0,
            "min_new_tokens": i,
            **KINDS[i % len(KINDS)],
        }
        for i in range(COUNT)
    ]
    alone = [
        engine.generate(input_ids=prompts[i], sampling_params=params[i])["output_ids"]
        for i in range(COUNT)
    ]
    in_lists = [
        engine.loop.run_until_complete(lists(engine, prompts, params, chance))
        for _ in range(6)
    ]
    states = engine.get_server_info()["internal_states"]
    engine.shutdown()
    print(json.dumps({"alone": alone, "in lists": in_lists, "states": states}))


async def lists(
    engine: Any, prompts: list[Any], params: list[Any], chance: random.Random
) -> list[Any]:
    """The answers in lists of a few prompts each, the next while the last one runs."""
    order = list(range(COUNT))
    chance.shuffle(order)
    calls = []
    for begin in range(0, COUNT, 4):
        chosen = order[begin : begin + 4]
        call = engine.async_generate(
            input_ids=[prompts[i] for i in chosen],
            sampling_params=[params[i] for i in chosen],
        )
        calls.append(asyncio.ensure_future(call))
        await asyncio.sleep(chance.random() * 0.05)
    found: dict[int, Any] = {}
    for begin, answers in zip(
        range(0, COUNT, 4), await asyncio.gather(*calls), strict=True
    ):
        for i, answer in zip(order[begin : begin + 4], answers, strict=True):
            found[i] = answer["output_ids"]
    return [found[i] for i in range(COUNT)]


if __name__ == "__main__":
    main()
