"""An idle server waits for work without using a core, and any message wakes it."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from batches import client, jsonl, line, submit, wait
from servers import Server

# SGLang's engine looks for lost messages at this interval. Work that is found only then
# takes half of it on average.
SLEEP_S = 1.0
REQUEST = {"text": "Hello", "sampling_params": {"max_new_tokens": 1}}


def post(server: Server, path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        server.url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        data: bytes = answer.read()
    return data


def test_an_idle_server_uses_no_core(offline_server: Server) -> None:
    time.sleep(SLEEP_S)
    offline_server.assert_idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/offline_batch/wave", {"requests": [REQUEST]}), ("/generate", REQUEST)],
)
def test_work_wakes_a_sleeping_engine(
    offline_server: Server, path: str, body: dict[str, Any]
) -> None:
    seconds = fastest(lambda: post(offline_server, path, body))
    assert seconds < SLEEP_S / 2


def test_a_batch_wakes_a_sleeping_engine(offline_server: Server) -> None:
    api = client(offline_server.url)
    message = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    content = jsonl([line("a", message)])

    def run() -> None:
        batch = wait(api, submit(api, content).id)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 1

    assert fastest(run) < SLEEP_S


def fastest(work: Callable[[], object], repeats: int = 4) -> float:
    """Seconds that it takes, at best, an engine that sleeps before."""
    found = []
    for _ in range(repeats):
        time.sleep(0.3)
        began = time.monotonic()
        work()
        found.append(time.monotonic() - began)
    return min(found)


def test_a_paused_engine_uses_no_core(offline_server: Server) -> None:
    post(offline_server, "/pause_generation", {"mode": "in_place"})
    try:
        offline_server.assert_idle()
    finally:
        post(offline_server, "/continue_generation", {})
    assert post(offline_server, "/generate", REQUEST)
