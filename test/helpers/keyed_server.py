"""A server with the keys of an admin and a client, and calls with these keys."""

from __future__ import annotations

from typing import Any

import openai
from builders import CHAT, make_line
from route_server import Server

KEYS = {b"key-root": "root", b"key-ann": "ann"}
KEYS_PATH = "/offline_batch/keys"


def add(server: Server, name: str, **fields: Any) -> dict[str, Any]:
    answer = server.http.post(KEYS_PATH, json={"name": name, **fields})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def call(server: Server, key: str, method: str, path: str, **kwargs: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return server.http.request(method, path, headers=headers, **kwargs)


def start(client: openai.OpenAI, *lines: str) -> Any:
    data = "".join(f"{line}\n" for line in lines or [make_line()]).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h"
    )


def usage_of(server: Server, name: str) -> dict[str, Any]:
    rows = server.http.get("/offline_batch/usage").json()["data"]
    [row] = [row for row in rows if row["name"] == name]
    found: dict[str, Any] = row
    return found
