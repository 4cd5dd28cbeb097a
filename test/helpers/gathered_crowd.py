"""Two thousand calls at the same time, gathered, a third of whose clients leave meanwhile.

``main`` prints what came of them as JSON. Its argument is the model.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

CALLS = 2000
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def main() -> None:
    import sglang

    engine: Any = sglang.Engine(
        model_path=sys.argv[1],
        dtype="float32",
        random_seed=0,
        max_total_tokens=12_000,
        log_level="error",
        offline_batch=True,
        offline_batch_config={"gather_s": 0.02},
    )
    chance = random.Random(5)
    shared = [[chance.randrange(32, 120) for _ in range(24)] for _ in range(20)]
    prompts = [
        [*shared[i % 20][: chance.randrange(25)], 40 + i // 80, 40 + i % 80, 50]
        for i in range(CALLS)
    ]
    expected = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    found = engine.loop.run_until_complete(crowd(engine, prompts, chance))
    wrong = [
        i
        for i, answer in enumerate(found["answers"])
        if answer is not None and answer != expected[i]["output_ids"]
    ]
    different = len({tuple(each["output_ids"]) for each in expected})
    del found["answers"]
    engine.shutdown()
    print(json.dumps({**found, "wrong": wrong, "different": different}))


async def crowd(
    engine: Any, prompts: list[list[int]], chance: random.Random
) -> dict[str, Any]:
    """All calls at once. Every third client leaves, within the time that they take."""
    began = time.monotonic()
    manager = engine.tokenizer_manager
    leaves = [i % 3 == 0 for i in range(len(prompts))]
    tasks = [asyncio.ensure_future(call(engine, prompt)) for prompt in prompts]
    num_answered = 0
    one_more = asyncio.Event()

    def count(_task: object) -> None:
        nonlocal num_answered
        num_answered += 1
        one_more.set()

    for task in tasks:
        task.add_done_callback(count)
    leaving = [i for i, leave in enumerate(leaves) if leave]
    chance.shuffle(leaving)
    left: Counter[str] = Counter()
    for number, i in enumerate(leaving):
        # Some before they are sent, others while they wait or run.
        while num_answered < number * 2 and not tasks[i].done():
            one_more.clear()
            await one_more.wait()
        left["in flight" if not tasks[i].done() else "answered"] += 1
        tasks[i].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    kinds = Counter(type(each).__name__ for each in answers)
    kept = [
        answer if isinstance(answer, list) else None
        for answer, leave in zip(answers, leaves, strict=True)
    ]
    missing = [
        i
        for i, leave in enumerate(leaves)
        if kept[i] is None and not leave  # an answer that nobody gave up
    ]
    deadline = time.monotonic() + 30
    while manager.rid_to_state and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    while (jobs := await open_jobs(manager)) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return {
        "answers": kept,
        "kinds": kinds,
        "left": left,
        "missing": missing,
        "states": len(manager.rid_to_state),
        "unsent": len(manager.offline_unsent),
        "jobs": jobs,
        "seconds": time.monotonic() - began,
    }


async def call(engine: Any, prompt: list[int]) -> list[int]:
    answer = await engine.async_generate(input_ids=prompt, sampling_params=GREEDY)
    ids: list[int] = answer["output_ids"]
    return ids


async def open_jobs(manager: Any) -> int:
    [state] = await manager.get_internal_state()
    return int(state["offline_batch"]["jobs"])


if __name__ == "__main__":
    main()
