"""Driving a server's batch API with the official client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from openai import OpenAI
from openai.types import Batch

TIMEOUT_S = 240
# Keys of a server.
ADMIN, ANN, BOB = "key-of-the-admin", "key-of-ann", "key-of-bob"
TERMINAL = ("completed", "failed", "cancelled", "expired")


_clients: list[OpenAI] = []


def client(url: str, key: str = "none") -> OpenAI:
    """A client of a server, until :func:`close_clients`."""
    _clients.append(OpenAI(base_url=f"{url}/v1", api_key=key, timeout=60))
    return _clients[-1]


def close_clients() -> None:
    while _clients:
        _clients.pop().close()


def line(
    custom_id: str, body: dict[str, Any], url: str = "/v1/chat/completions"
) -> dict[str, Any]:
    body = {"model": "demo", "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


def submit(
    api: OpenAI, content: bytes, endpoint: str = "/v1/chat/completions"
) -> Batch:
    file = api.files.create(file=("input.jsonl", content), purpose="batch")
    return api.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h"
    )  # type: ignore[call-overload]


def wait(api: OpenAI, batch_id: str) -> Batch:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        batch = api.batches.retrieve(batch_id)
        if batch.status in TERMINAL:
            return batch
        time.sleep(0.1)
    raise AssertionError(f"batch {batch_id} is still {batch.status}: {batch}")


def results(api: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a result file; none where the batch has no such file."""
    if file_id is None:
        return []
    text = api.files.content(file_id).text
    return [json.loads(item) for item in text.split("\n") if item]
