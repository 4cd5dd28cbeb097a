"""A front and two offline servers behind it: batches, online calls, a server's death."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from batches import client, jsonl, line, results, submit, wait
from free_ports import free_port
from servers import Server, kill_group, server, wait_until_ready

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class FleetServers:
    """One server with an engine is shared with other tests; the other may be killed."""

    kept: Server
    own: Server
    front: Server

    def engines(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(
            f"{self.front.url}/offline_batch/engines"
        ) as answer:
            rows: list[dict[str, Any]] = json.load(answer)["engines"]
        return rows


@pytest.fixture(scope="module")
def fleet(
    offline_server: Server, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FleetServers]:
    directory = tmp_path_factory.mktemp("fleet")
    own = ("--offline-batch", f"--offline-batch-dir={directory / 'own'}")
    with server(demo_model, *own, log_dir=directory) as other:
        # The first step of a server is far slower than others, and the kept one has had it.
        client(other.url).completions.create(
            model="demo", prompt="Hello " * 100, max_tokens=64
        )
        port, log_path = free_port(), directory / "front.log"
        command = [
            *(sys.executable, "-m", "sglang_batch", "serve", f"--port={port}"),
            f"--workers={offline_server.url},{other.url}",
            f"--offline-batch-dir={directory / 'front'}",
        ]
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        front = Server(process, f"http://127.0.0.1:{port}", log_path)
        try:
            wait_until_ready(front)
            yield FleetServers(offline_server, other, front)
        finally:
            kill_group(process)


def grouped_lines(
    seed: int, num_groups: int, per_group: int, max_tokens: int
) -> list[dict[str, Any]]:
    """Lines whose prompts share a prefix with those of their group, in random order."""
    rng = random.Random(seed)
    lines = []
    for group in range(num_groups):
        prefix = "".join(rng.choices("abcdefghij ", k=200 + 10 * group))
        for number in range(per_group):
            body = {"prompt": f"{prefix} {number}", "max_tokens": max_tokens}
            body["ignore_eos"] = True
            lines.append(line(f"{group}-{number}", body, COMPLETIONS))
    rng.shuffle(lines)
    return lines


def texts(url: str, output_file_id: str | None) -> dict[str, str]:
    found = results(client(url), output_file_id)
    assert len({item["custom_id"] for item in found}) == len(found)
    return {
        item["custom_id"]: item["response"]["body"]["choices"][0]["text"]
        for item in found
    }


def test_a_batch_has_the_answers_of_one_server(fleet: FleetServers) -> None:
    # Long enough for both: one that begins a second late would have its lines taken away.
    content = jsonl(grouped_lines(1, num_groups=20, per_group=8, max_tokens=96))
    answers = []
    for url in (fleet.front.url, fleet.kept.url):
        api = client(url)
        batch = wait(api, submit(api, content, COMPLETIONS).id)
        assert batch.status == "completed", batch
        answers.append(texts(url, batch.output_file_id))
        if url == fleet.front.url:
            assert batch.usage is not None
            usage: dict[str, Any] = batch.usage.model_dump()
    assert answers[0] == answers[1] and len(answers[0]) == 160
    # No group is on both servers, so each prefix is computed once.
    details = usage["input_tokens_details"]
    cached_share = details["cached_tokens"] / usage["input_tokens"]
    assert cached_share == pytest.approx(details["optimal_cached_share"], abs=0.02)


def test_the_servers_are_listed(fleet: FleetServers) -> None:
    kept, own = fleet.engines()
    assert [kept["name"], own["name"]] == [fleet.kept.url, fleet.own.url]
    assert kept["status"] == own["status"] == "running"
    assert kept["answered"] + own["answered"] == 160
    assert min(kept["answered"], own["answered"]) > 30
    with urllib.request.urlopen(f"{fleet.front.url}/batches/data") as answer:
        shown = json.load(answer)["engines"]
    for before, now in zip((kept, own), shown, strict=True):
        assert 0 < before["there_s"] <= now["there_s"]
        assert now | {"there_s": 0} == before | {"there_s": 0}


def test_online_calls_are_passed_on(fleet: FleetServers) -> None:
    assert [model.id for model in client(fleet.front.url).models.list()] == ["demo"]
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    front, kept = client(fleet.front.url), client(fleet.kept.url)
    expected = kept.chat.completions.create(**asked).choices[0].message.content
    for _ in range(2):  # by each of the servers
        answer = front.chat.completions.create(**asked)
        assert answer.choices[0].message.content == expected
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in front.chat.completions.create(**asked, stream=True)
    ]
    assert len(pieces) > 2 and "".join(pieces) == expected


def test_the_death_of_a_server_loses_no_line_and_doubles_none(
    fleet: FleetServers,
) -> None:
    lines = grouped_lines(2, num_groups=40, per_group=10, max_tokens=64)
    api = client(fleet.front.url)
    batch = submit(api, jsonl(lines), COMPLETIONS)
    before = fleet.engines()[1]["answered"]
    while True:
        own = fleet.engines()[1]
        if own["answered"] >= before + 10 and own["running"]:
            break
        time.sleep(0.05)
    fleet.own.kill()
    batch = wait(api, batch.id)
    assert batch.status == "completed", batch
    answers = texts(fleet.front.url, batch.output_file_id)
    assert answers.keys() == {each["custom_id"] for each in lines}
    kept, own = fleet.engines()
    assert (kept["status"], kept["losses"]) == ("running", 0)
    assert own["status"] in ("starting", "lost") and own["losses"] == 1
    assert own["reason"] == "its server is gone"
    assert own["answered"] < before + len(lines)
    for _ in range(3):
        api.completions.create(model="demo", prompt="Hello", max_tokens=2)
