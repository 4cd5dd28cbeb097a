"""Requests with odd values in every field, sent to each door of a live server.

Run by hand for more cases: ``python test/helpers/request_fuzz.py URL CASES SEED``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
)
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

WAVE = "/offline_batch/wave"
CASES_PER_WAVE = 100
CONCURRENT = 24
# A request has few tokens. One that takes longer never ends, on a busy machine too.
PATIENCE_S = 240
VOCAB = 300

WHOLE = [
    *(0, 1, 2, 5, 20, 299, 300, 301, 4096, 65_536),
    *(-1, -2, -5, -77, 1 << 20, 1 << 30, 1 << 31, -(1 << 31)),
    *((1 << 31) - 1, 1 << 32, 1 << 62, 1 << 63, -(1 << 63), 1 << 70, 10**30),
]
REAL = [0.0, -0.0, 1e-9, 1e-45, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, -1.0, 1e9, 1e38, 1e39]
TEXTS = [
    *("", "x", "The tide", "a" * 300, "\u00e9\U0001f600", "\x00", "{", "[", "(a|b)+"),
    *("batch_", "wave_", "b", "HEALTH", "tcp://127.0.0.1:9", "ipc:///nowhere"),
    *("a{1,3}", "(a+)+$", "(a*)*b", ".*" * 9, "[", "root ::= root", 'root ::= "a"'),
    *("(" * 200 + ")" * 200, "a{99999}", '{"type": "object"}', '{"$ref": "#"}', "[]"),
    *("true", "null", "last", "selected", "support", "data:image/png;base64,AA=="),
]
ODD = [None, True, False, [], {}, [None], [[]], [[1]], [0], [1, 2], [-1], [300], ["x"]]
MORE = [
    *([1.5, "x"], {"a": 1}, {"id": "x"}, {"5": 2}, {"-1": 1.0}, {"300": 1.0}),
    *({"5": 1e39}, {"x": 1.0}, [{}], [{}, {}], [1 << 40], [[1 << 40]], [True]),
    *(
        {"id": "x", "offset": -5},
        list(range(VOCAB)),
        {str(i): -1e9 for i in range(VOCAB)},
    ),
    *([[0.5] * 64], [[[0.5] * 64]], {"enabled": True}, {"thinking_budget": -1}),
]
VALUES: list[Any] = WHOLE + REAL + TEXTS + ODD + MORE

NATIVE = {each.name: str(each.type) for each in dataclasses.fields(GenerateReqInput)}
SAMPLING = {
    each.name: str(each.type) for each in msgspec.structs.fields(SamplingParams)
}
LISTS: list[Any] = [
    {"text": ["a", "b"]},
    {"text": ["a", ""]},
    {"input_ids": [[5], [6, 7]]},
]
OPENAI = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": []}),
    "/v1/completions": (CompletionRequest, {"prompt": "The tide"}),
}


@dataclass
class Findings:
    """Counts of HTTP statuses by door, and the cases that should not be."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def value(rng: random.Random, kind: str) -> Any:
    """A value that a field of this type might have, or any other one."""
    fitting = [
        *(WHOLE if "int" in kind else []),
        *(REAL if "float" in kind else []),
        *(TEXTS if "str" in kind else []),
        *([True, False] if "bool" in kind else []),
    ]
    if not fitting or rng.random() < 0.2:
        return rng.choice(VALUES)
    chosen = rng.choice(fitting)
    return [chosen] if "List" in kind and rng.random() < 0.3 else chosen


def choose(rng: random.Random, kinds: dict[str, str]) -> dict[str, Any]:
    """One to three odd fields."""
    names = rng.sample(sorted(kinds), rng.choice([1, 1, 2, 3]))
    return {name: value(rng, kinds[name]) for name in names}


def native(rng: random.Random) -> dict[str, Any]:
    """A body of ``/generate`` with up to three odd fields, and few tokens."""
    sampling: Any = {"max_new_tokens": rng.choice([0, 1, 3]), "temperature": 0}
    if rng.random() < 0.7:
        sampling |= choose(rng, SAMPLING)
    # Otherwise most answers would be as long as the context allows.
    if sampling["max_new_tokens"] is None or (
        type(sampling["max_new_tokens"]) in (int, float)
        and sampling["max_new_tokens"] > 5
    ):
        sampling["max_new_tokens"] = 4
    if rng.random() < 0.05:
        sampling = rng.choice([sampling, [sampling], [sampling, {}], "x", 5])
    prompt = rng.choice([{"text": "The tide"}, {"input_ids": [5, 6, 7, 8]}])
    if rng.random() < 0.15:
        prompt = rng.choice(LISTS)
    body = {**prompt, "sampling_params": sampling}
    if rng.random() < 0.6:
        body |= choose(rng, NATIVE)
    if rng.random() < 0.4:
        body["return_logprob"] = True
        name = rng.choice(
            ["logprob_start_len", "top_logprobs_num", "token_ids_logprob"]
        )
        body[name] = rng.choice(VALUES)
    if isinstance(body.get("sampling_params"), dict) and rng.random() < 0.2:
        body["sampling_params"]["min_new_tokens"] = rng.choice([1, 2, 3])
    return body


def openai(rng: random.Random, url: str) -> dict[str, Any]:
    """A body of an OpenAI endpoint with up to three odd fields."""
    kind, body = OPENAI[url]
    body = {"model": "demo", "max_tokens": 3, **body}
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "Why?"}]
    fields = kind.model_fields.items()
    body |= choose(rng, {name: str(each.annotation) for name, each in fields})
    # SGLang's class of the body fails on any other value, with a 500 and no harm.
    if not isinstance(body.get("response_format", {}), dict):
        body["response_format"] = {"type": "json_object"}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in body and (body[name] is None or type(body[name]) in (int, float)):
            body[name] = 3
    body.setdefault("max_tokens", 3)
    return body


async def fuzz(url: str, num_cases: int, seed: int) -> Findings:
    """Send the cases, most of them in waves, the others to the online endpoints."""
    rng, found = random.Random(seed), Findings()
    gate = asyncio.Semaphore(CONCURRENT)
    calls: list[tuple[str, Any]] = []
    for _ in range(num_cases * 3 // (4 * CASES_PER_WAVE)):
        calls.append((WAVE, [native(rng) for _ in range(CASES_PER_WAVE)]))
    for i in range(num_cases - len(calls) * CASES_PER_WAVE):
        door = ["/generate", *OPENAI][i % 3]
        calls.append((door, native(rng) if i % 3 == 0 else openai(rng, door)))
    rng.shuffle(calls)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(
        url, timeout=timeout, connector=connector
    ) as session:

        async def send(door: str, body: Any) -> None:
            async with gate:
                if len(found.faults) < 30:
                    await _send(session, door, body, found)

        await asyncio.gather(*(send(*call) for call in calls))
    return found


async def _send(
    session: aiohttp.ClientSession, door: str, body: Any, found: Findings
) -> None:
    data = json.dumps({"requests": body} if door == WAVE else body)
    try:
        async with session.post(
            door, data=data, headers={"Content-Type": "application/json"}
        ) as answer:
            text = await answer.text()
            status = answer.status
    except (TimeoutError, aiohttp.ClientError) as error:
        found.faults.append(f"{door}: {error!r}: {data[:3000]}")
        return
    if door != WAVE or status != 200:
        _judge(door, status, body, text, found)
        return
    answers = [json.loads(each) for each in text.splitlines()]
    if len(answers) != len(body):
        found.faults.append(f"{len(answers)} of {len(body)} answers: {data[:3000]}")
    for each in answers:
        one = body[each["index"]]
        _judge(door, each["status_code"], one, json.dumps(each["body"]), found)


def _judge(door: str, status: int, body: Any, text: str, found: Findings) -> None:
    found.statuses[f"{door} {status}"] += 1
    # An answer that could be 200 and is 503 was aborted by somebody.
    # SGLang's own answer online to a grammar that allows no token.
    # And to a sampling mask of no tokens.
    online = door != WAVE and any(
        each in text
        for each in ("Grammar accept_token failed", "did not return captured sampling")
    )
    if status >= 500 and status != 501 and not online:
        found.faults.append(f"{door} {status} {text[:300]}: {json.dumps(body)[:2000]}")


if __name__ == "__main__":
    result = asyncio.run(fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    print(json.dumps(dict(sorted(result.statuses.items())), indent=1))
    print("\n".join(result.faults[:30]))
    raise SystemExit(bool(result.faults))
