"""The requests that LiteLLM sends for files and batches, as they were recorded.

``benchmark/bench_clients.py`` records them, with LiteLLM before a real server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from request_recorder import IdNames, RecordedCall, calls_of, outline_of
from route_server import ENDED, Server, serving

FLOWS: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("litellm_requests.json").read_text()
)
LONG = [f"long-{i}" for i in range(10)]


def answer_to(server: Server, call: RecordedCall, names: IdNames) -> httpx.Response:
    """Send a recorded call, with the ids of this server; wait for a batch's end."""
    path = names.real(call.path)
    while True:
        answer = server.http.request(
            call.method, path, headers=call.headers, content=names.real(call.body)
        )
        if not call.is_listing:
            names.see(answer.text)
        is_batch = call.method == "GET" and path.startswith("/v1/batches/batch_")
        if not is_batch or answer.json().get("status", "failed") in ENDED:
            return answer


@pytest.mark.parametrize("flow", FLOWS)
def test_what_litellm_sends_is_answered_as_it_was(flow: str, tmp_path: Path) -> None:
    names = IdNames()
    with serving(tmp_path) as server:
        server.engine.hold(LONG)
        for call in calls_of(FLOWS[flow]):
            answer = answer_to(server, call, names)
            assert answer.status_code == call.status, (call, answer.text)
            outline = outline_of(answer.text)
            assert outline == call.outline, (call, outline)


def test_both_ways_and_every_call_are_recorded() -> None:
    assert {name.partition("-")[0] for name in FLOWS} == {"library", "proxy"}
    calls = [call for flow in FLOWS.values() for call in calls_of(flow)]
    kinds = {
        json.loads(call.request)[0] + " " + call.path.partition("?")[0].split("/")[2]
        for call in calls
    }
    assert kinds >= {
        "POST files",
        "GET files",
        "DELETE files",
        "POST batches",
        "GET batches",
    }
    assert any(call.path.endswith("/cancel") for call in calls)
    assert {call.status for call in calls} == {200, 400, 404}
