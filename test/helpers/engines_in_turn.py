"""Engines of one process, one after the other and side by side; ``main`` prints their answers.

Its arguments: the model, and JSON of what happens in turn: ``[name, "start", arguments]``,
``[name, "ask"]``, ``[[name, name], "ask"]`` of several at the same time, ``[name, "end"]``,
which ends those of all, as SGLang does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from typing import Any

# For the engines that start after one has ended.
MORE_FORK_SERVERS = 2
GREEDY = {"temperature": 0, "max_new_tokens": 12}
PROMPTS = [
    "The tide comes in twice a day. " * 4 + f"Question {i % 5}{'?' * (i % 3)}"
    for i in range(8)
]
IDS = [[1 + i, 40, 50, 60 + i] for i in range(4)]


def main() -> None:
    import sglang

    model, steps = sys.argv[1], json.loads(sys.argv[2])
    before = process_state()
    engines: dict[str, Any] = {}
    answers = []
    for name, what, *arguments in steps:
        if what == "start":
            engines[name] = sglang.Engine(
                model_path=model,
                dtype="float32",
                random_seed=0,
                max_total_tokens=4000,
                log_level="error",
                **arguments[0],
            )
        elif what == "ask":
            names = [name] if isinstance(name, str) else name
            loop = engines[names[0]].loop
            found = loop.run_until_complete(all_at_once([engines[n] for n in names]))
            answers += [[each, *one] for each, one in zip(names, found, strict=True)]
            answers += [[each, "blocking", blocking(engines[each])] for each in names]
        else:
            # Each of these ends the process if its children end without it.
            for each in engines.values():
                each.tokenizer_manager._subprocess_watchdog.stop()
            for each in list(engines):
                engines.pop(each).shutdown()
    after = process_state()
    print(json.dumps({"answers": answers, "before": before, "after": after}))


def process_state() -> dict[str, Any]:
    """What an engine may leave behind in its process."""
    return {
        "environment": sorted(
            # The others are SGLang's own, set by each of its engines.
            name
            for name in os.environ
            if name.startswith("SGLANG_") and name != "SGLANG_RUN_ID"
        ),
        "gc": gc.get_threshold(),
    }


async def all_at_once(engines: list[Any]) -> list[Any]:
    return await asyncio.gather(*map(all_kinds, engines))


async def all_kinds(engine: Any) -> list[Any]:
    """An answer of each kind of call, and how the ids of its requests begin."""
    several = {**GREEDY, "n": 3}
    calls = {
        "single": engine.async_generate(PROMPTS[0], GREEDY),
        "ids": engine.async_generate(input_ids=IDS[1], sampling_params=GREEDY),
        "list": engine.async_generate(PROMPTS, GREEDY),
        "list of ids": engine.async_generate(input_ids=IDS, sampling_params=GREEDY),
        "each its own": engine.async_generate(
            PROMPTS, [{**GREEDY, "max_new_tokens": 3 + i} for i in range(len(PROMPTS))]
        ),
        "several answers": engine.async_generate(PROMPTS[1], several),
        "several of each": engine.async_generate(PROMPTS[:3], several),
        "logprobs": engine.async_generate(
            PROMPTS[:3], GREEDY, return_logprob=True, top_logprobs_num=2
        ),
        "scores": engine.async_score(PROMPTS[0], PROMPTS[:3], label_token_ids=[40, 50]),
        "stream": streamed(engine, PROMPTS[2]),
        "stream of a list": streamed(engine, PROMPTS[:4]),
    }
    calls |= {
        f"gathered {i}": engine.async_generate(each, GREEDY)
        for i, each in enumerate(PROMPTS)
    }
    found = await asyncio.gather(*calls.values())
    return [dict(zip(calls, map(shown, found), strict=True)), ids(found)]


async def streamed(engine: Any, prompt: Any) -> list[Any]:
    """The last chunk of each answer."""
    last: dict[int, Any] = {}
    async for chunk in await engine.async_generate(prompt, GREEDY, stream=True):
        last[chunk.get("index", 0)] = chunk
    return [last[index] for index in sorted(last)]


def blocking(engine: Any) -> dict[str, Any]:
    """The same calls as a script makes them."""
    return {
        "single": shown(engine.generate(PROMPTS[3], GREEDY)),
        "list": shown(engine.generate(PROMPTS[:5], GREEDY)),
        "stream": shown(list(engine.generate(PROMPTS[4], GREEDY, stream=True))[-1]),
        "refused": refused(engine),
    }


def refused(engine: Any) -> str:
    """What a call is told that SGLang refuses."""
    try:
        engine.generate(input_ids=[[1], [1] * 50_000], sampling_params=GREEDY)
    except ValueError as error:
        return type(error).__name__
    return "nothing"


def shown(answer: Any) -> Any:
    """What of an answer does not depend on how it was computed."""
    if isinstance(answer, list):
        return [shown(each) for each in answer]
    if hasattr(answer, "scores"):
        return [[round(value, 4) for value in row] for row in answer.scores]
    found = [answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]]
    chances = answer["meta_info"].get("output_token_logprobs") or []
    return [*found, [[round(each[0], 3), each[1]] for each in chances]]


def ids(answers: Any) -> list[str]:
    """How the ids of a list's requests begin, which tell whether the list was planned."""
    begins = set()
    for answer in answers:
        if isinstance(answer, list) and len(answer) == len(PROMPTS):
            begins |= {each["meta_info"]["id"][:5] for each in answer}
    return sorted({each if each == "list_" else "" for each in begins})


if __name__ == "__main__":
    main()
