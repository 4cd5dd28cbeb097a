"""Adapters with prefill and decode in two servers: answers are those of the adapter."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from adapter_job import Line, lines, merged_answers, write_checkpoints
from apart_servers import ApartServers, apart_servers
from batches import client, jsonl, line, results, submit, wait

NUM_ADAPTERS, MOST = 3, 2


@pytest.fixture(scope="module")
def job() -> list[Line]:
    return lines(36, NUM_ADAPTERS, base=12)


@pytest.fixture(scope="module")
def pair(
    job: list[Line], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ApartServers, list[str]]]:
    folder = tmp_path_factory.mktemp("apart_adapters")
    model, paths = write_checkpoints(folder, NUM_ADAPTERS)
    with apart_servers(
        model,
        folder,
        *("--enable-lora", "--lora-backend=torch_native"),
        *(f"--max-loras-per-batch={MOST}", "--lora-paths", *paths),
        decode_args=("--max-total-tokens=1024",),
    ) as servers:
        yield servers, merged_answers(model, folder, job)


def input_lines(job: list[Line]) -> list[dict[str, Any]]:
    made = []
    for i, each in enumerate(job):
        body: dict[str, Any] = {
            "model": "demo" if each.adapter < 0 else f"demo:a{each.adapter}",
            "prompt": each.prompt,
            "max_tokens": each.max_new_tokens,
            "temperature": 0,
        }
        made.append(line(f"line-{i}", body, "/v1/completions"))
    return made


def texts(found: list[dict[str, Any]]) -> list[str]:
    by_id = {
        item["custom_id"]: item["response"]["body"]["choices"][0]["text"]
        for item in found
    }
    return [by_id[f"line-{i}"] for i in range(len(by_id))]


def test_answers_are_those_of_the_adapter(
    pair: tuple[ApartServers, list[str]], job: list[Line]
) -> None:
    servers, right = pair
    api = client(servers.decode.url)
    batch = wait(api, submit(api, jsonl(input_lines(job)), "/v1/completions").id)
    assert texts(results(api, batch.output_file_id)) == right


def test_an_adapter_that_nobody_has_is_its_lines_error(
    pair: tuple[ApartServers, list[str]], job: list[Line]
) -> None:
    servers, right = pair
    api = client(servers.decode.url)
    unknown = input_lines([job[0]._replace(adapter=NUM_ADAPTERS)])
    unknown[0]["custom_id"] = "unknown"
    data = jsonl(input_lines(job[:4]) + unknown)
    batch = wait(api, submit(api, data, "/v1/completions").id)
    assert texts(results(api, batch.output_file_id)) == right[:4]
    (error,) = results(api, batch.error_file_id)
    assert error["custom_id"] == "unknown"
    assert f"a{NUM_ADAPTERS}" in json.dumps(error)


def test_a_request_that_loses_its_kv_is_computed_again_with_its_adapter(
    pair: tuple[ApartServers, list[str]], job: list[Line]
) -> None:
    servers, right = pair
    api = client(servers.decode.url)
    batch = submit(api, jsonl(input_lines(job)), "/v1/completions")
    log = servers.store / "batches" / batch.id / "results.jsonl"
    deadline = time.monotonic() + 120
    while not log.exists() or log.read_bytes().count(b"\n") < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    post(f"{servers.decode.url}/pause_generation", {"mode": "retract"})
    post(f"{servers.decode.url}/continue_generation", {})
    done = wait(api, batch.id)
    assert texts(results(api, done.output_file_id)) == right
    assert "did not compute a request again" not in servers.decode.log


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60):
        pass
