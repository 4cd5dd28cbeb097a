"""Builders for tests: lines, files, requests and answers.

Every builder has defaults, so a test names only the values that it is about.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sglang_batch.batch_api.protocol import error_body
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.request import BatchRequestInput, RequestOutput, Usage

CHAT = "/v1/chat/completions"
MODEL = "demo"
# Seconds, far above the duration of any scenario that does not hang.
PATIENCE_S = 20.0
NO_USAGE = Usage()

T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Run an asynchronous scenario, which fails if it hangs."""

    async def limited() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await scenario

    return asyncio.run(limited())


def make_body(
    text: str = "hello", *, without: str = "", **fields: Any
) -> dict[str, Any]:
    """The body of a chat completion. ``without`` leaves one key out."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
    body.pop(without, None)
    return body


def make_line(
    custom_id: object = "a",
    text: str = "hello",
    *,
    method: object = "POST",
    url: object = CHAT,
    body: object = None,
    without: str = "",
) -> str:
    """One line of an input file. ``without`` leaves one key out."""
    line = {
        "custom_id": custom_id,
        "method": method,
        "url": url,
        "body": make_body(text) if body is None else body,
    }
    line.pop(without, None)
    return json.dumps(line)


def make_lines(num_lines: int, text: str = "prompt {}") -> list[str]:
    """Valid lines ``r0``, ``r1``, and so on. ``{}`` in the text becomes the number."""
    return [make_line(f"r{i}", text.format(i)) for i in range(num_lines)]


def make_file(
    directory: Path,
    lines: Iterable[str | bytes] | bytes | None = None,
    name: str = "input.jsonl",
) -> Path:
    """A file of these lines, each ended by a newline. Bytes are written as they are."""
    path = directory / name
    if lines is None:
        lines = [make_line()]
    if not isinstance(lines, bytes):
        encoded = [line.encode() if isinstance(line, str) else line for line in lines]
        lines = b"".join(line + b"\n" for line in encoded)
    path.write_bytes(lines)
    return path


def make_request(
    index: int = 0, text: str = "hello", custom_id: str | None = None, **fields: Any
) -> BatchRequestInput:
    """A chat completion, ``r0`` by default. ``fields`` are added to its body."""
    body = json.dumps(make_body(text, **fields)).encode()
    return BatchRequestInput(index, custom_id or f"r{index}", CHAT, body)


def make_requests(texts: Sequence[str]) -> list[BatchRequestInput]:
    """Requests ``r0``, ``r1``, ... with these prompts."""
    return [make_request(i, text) for i, text in enumerate(texts)]


def make_output(
    status_code: int = 200, body: object = None, usage: Usage = NO_USAGE
) -> RequestOutput:
    if body is None:
        body = (
            {"object": "chat.completion"}
            if status_code < 400
            else error_body("It failed.", status_code=status_code)
        )
    return RequestOutput(status_code, "req-1", json.dumps(body).encode(), usage)


def make_machine(kv_capacity_tokens: int = 100_000, **limits: Any) -> Machine:
    """Costs of Llama-3-8B on an A100 as BlendServe has them, without weights' reads."""
    cost = CostModel(token_time_s=16e9 / 312e12, kv_read_time_s=131_072 / 2.039e12)
    return Machine(cost, EngineLimits(kv_capacity_tokens, **limits))


def ids_of(indices: Iterable[int]) -> list[str]:
    """The custom ids of the requests with these numbers."""
    return [f"r{i}" for i in indices]


class Answers(dict[str, RequestOutput]):
    """A sink: each answer under its custom id, once."""

    def __call__(self, request: BatchRequestInput, output: RequestOutput) -> None:
        assert request.custom_id not in self
        self[request.custom_id] = output


def answer_text(line: dict[str, Any]) -> str:
    """The answer's text in a line of an output file."""
    text: str = line["response"]["body"]["choices"][0]["message"]["content"]
    return text


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The lines of a result file."""
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.split(b"\n")[:-1]]
