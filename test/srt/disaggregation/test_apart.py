"""Prefill and decode in two servers: equal answers, and what kills one of them loses no
line and answers none twice."""

from __future__ import annotations

import csv
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from apart_servers import ApartServers, apart_servers
from batches import client, jsonl, line, results, submit, wait
from prompts import questions
from servers import Server, kill_group, wait_until_ready

NUM_LINES = 400
# KV of the decode server: for a few requests.
DECODE_TOKENS = 2560
DEMO_TOKEN_BYTES = 512


def input_lines() -> list[dict[str, Any]]:
    return [
        line(
            f"line-{i}",
            {"messages": [{"role": "user", "content": question}], "max_tokens": 16},
        )
        for i, question in enumerate(questions(NUM_LINES))
    ]


@pytest.fixture(scope="module")
def pair(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApartServers]:
    directory = tmp_path_factory.mktemp("apart")
    with apart_servers(
        demo_model,
        directory,
        decode_args=(f"--max-total-tokens={DECODE_TOKENS}",),
        offload_bytes=2 * DECODE_TOKENS * DEMO_TOKEN_BYTES,
        policy="length-aligned",
        step_log=str(directory / "steps.csv"),
    ) as servers:
        # The first plan of an installation waits for the planner to be compiled, which is
        # longer than a call waits.
        api = client(servers.decode.url)
        assert wait(api, submit(api, jsonl(input_lines()[:4])).id).status == "completed"
        yield servers


@pytest.fixture(scope="module")
def one_process(offline_server: Server) -> dict[str, Any]:
    """The answers of one server that does both, by custom_id."""
    api = client(offline_server.url)
    batch = wait(api, submit(api, jsonl(input_lines())).id)
    return texts(results(api, batch.output_file_id))


def texts(found: list[dict[str, Any]]) -> dict[str, Any]:
    assert len({item["custom_id"] for item in found}) == len(found)
    assert {item["response"]["status_code"] for item in found} <= {200}
    return {
        item["custom_id"]: item["response"]["body"]["choices"][0]["message"]["content"]
        for item in found
    }


def generate(url: str, body: dict[str, Any]) -> Any:
    return post(f"{url}/generate", body)


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def totals(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=10) as answer:
        state: dict[str, Any] = json.load(answer)["internal_states"][0]["offline_batch"]
        return state


def finished_lines(log: Path) -> dict[str, Any]:
    """The result lines of a log of finished requests, by custom_id."""
    if not log.exists():
        return {}
    lines = [json.loads(record)[3] for record in log.read_bytes().split(b"\n")[:-1]]
    assert len({item["custom_id"] for item in lines}) == len(lines)
    return {item["custom_id"]: item for item in lines}


def wait_for_results(log: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(finished_lines(log)) < count:
        assert time.monotonic() < deadline, f"{log} stays under {count} results"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "body",
    [
        {"text": "The tide comes in."},
        {"text": ["One prompt.", "Another one, which is longer." * 40, "Short"]},
        {"input_ids": list(range(40, 240)), "return_logprob": True},
        {"text": "Several answers", "sampling_params": {"n": 3}},
        {
            "text": "JSON",
            "sampling_params": {"regex": "[ab]{3,9}", "min_new_tokens": 2},
        },
        {"text": "A stop", "sampling_params": {"stop": ["o"], "max_new_tokens": 64}},
    ],
    ids=["one", "list", "logprobs", "samples", "grammar", "stop"],
)
def test_single_calls_have_the_answers_of_one_process(
    pair: ApartServers, offline_server: Server, body: dict[str, Any]
) -> None:
    params = {"temperature": 0, "max_new_tokens": 20, **body.get("sampling_params", {})}
    body = {**body, "sampling_params": params}
    found, wanted = (
        answer if isinstance(answer, list) else [answer]
        for answer in (
            generate(pair.decode.url, body),
            generate(offline_server.url, body),
        )
    )
    assert [item["output_ids"] for item in found] == [
        item["output_ids"] for item in wanted
    ]
    for each, other in zip(found, wanted, strict=True):
        for name in ("output_token_logprobs",):
            logprobs = [
                [x[0] for x in e["meta_info"].get(name, ())] for e in (each, other)
            ]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"return_logprob": True, "logprob_start_len": 0}, "Log probabilities of"),
        ({"sampling_params": {"beam_width": 4, "n": 2}}, "Beam search"),
        ({"sampling_params": {"regex": "("}}, ""),
    ],
)
def test_what_cannot_be_sent_is_an_error_of_the_request(
    pair: ApartServers, body: dict[str, Any], reason: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        generate(pair.decode.url, {"text": "A prompt", **body})
    with raised.value as error:
        assert error.code == 400
        assert reason in error.read().decode()


def test_a_batch_has_the_answers_of_one_process_and_computes_prefixes_once(
    pair: ApartServers, one_process: dict[str, Any], offline_server: Server
) -> None:
    before, joined = totals(pair.prefill), totals(pair.decode)["resumed"]
    api = client(pair.decode.url)
    batch = wait(api, submit(api, jsonl(input_lines())).id)
    assert texts(results(api, batch.output_file_id)) == one_process
    after = totals(pair.prefill)
    computed = after["prefill_tokens"] - before["prefill_tokens"]
    assert computed <= 1.05 * totals(offline_server)["prefill_tokens"]
    assert after["decode_tokens"] == 0
    assert not after["jobs"] and not after["kv_use"]["running"]
    # All KV came to the host, where requests waited for the decodes.
    assert totals(pair.decode)["resumed"] - joined >= NUM_LINES
    with (pair.store.parent / "steps.csv").open() as log:
        assert max(int(row["waiting"]) for row in csv.DictReader(log)) > 4


def test_a_batch_that_is_cancelled_leaves_nothing_behind(
    pair: ApartServers, offline_server: Server
) -> None:
    api = client(pair.decode.url)
    # Long answers: many are on their way, on the host and running when it ends.
    lines = [
        {**each, "body": {**each["body"], "max_tokens": 200}} for each in input_lines()
    ]
    batch = submit(api, jsonl(lines))
    log = pair.store / "batches" / batch.id / "results.jsonl"
    wait_for_results(log, 4)
    params = {"temperature": 0, "max_new_tokens": 20}
    body = {"text": "Now, at once.", "sampling_params": params}
    online = generate(pair.decode.url, body)
    assert len(finished_lines(log)) < NUM_LINES // 2, "it waited for the batch"
    assert online["output_ids"] == generate(offline_server.url, body)["output_ids"]
    api.batches.cancel(batch.id)
    assert wait(api, batch.id).status == "cancelled"
    deadline = time.monotonic() + 20
    while (left := leftovers(totals(pair.decode))) or totals(pair.prefill)["jobs"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def leftovers(state: dict[str, Any]) -> dict[str, Any]:
    names = ("jobs", "waiting", "offloaded_now", "offloaded_host_bytes")
    found = {name: state[name] for name in names} | {
        "running": state["kv_use"]["running"]
    }
    return {name: value for name, value in found.items() if value}


def test_requests_that_lose_their_kv_are_computed_again_from_where_they_were(
    pair: ApartServers, one_process: dict[str, Any]
) -> None:
    api = client(pair.decode.url)
    before = totals(pair.decode)["decode_tokens"]
    batch = submit(api, jsonl(input_lines()))
    log = pair.store / "batches" / batch.id / "results.jsonl"
    wait_for_results(log, 40)
    post(f"{pair.decode.url}/pause_generation", {"mode": "retract"})
    post(f"{pair.decode.url}/continue_generation", {})
    done = wait(api, batch.id)
    assert texts(results(api, done.output_file_id)) == one_process
    assert "did not compute a request again" not in pair.decode.log
    # No token was generated twice: the first of each comes from the prefill server.
    assert totals(pair.decode)["decode_tokens"] - before <= NUM_LINES * 15
    assert not leftovers(totals(pair.decode))


def test_a_prefill_server_that_is_killed_and_started_again_loses_no_line(
    pair: ApartServers, one_process: dict[str, Any]
) -> None:
    api = client(pair.decode.url)
    batch = submit(api, jsonl(input_lines()))
    log = pair.store / "batches" / batch.id / "results.jsonl"
    wait_for_results(log, NUM_LINES // 4)
    kill_group(pair.prefill.process)
    assert len(finished_lines(log)) < NUM_LINES, "the kill came too late"
    pair.start_prefill()
    done = wait(api, batch.id)
    assert done.error_file_id is None
    assert texts(results(api, done.output_file_id)) == one_process


def test_a_decode_server_that_is_killed_continues_and_answers_nothing_twice(
    pair: ApartServers, one_process: dict[str, Any]
) -> None:
    wait_until_ready(pair.prefill)
    batch = submit(client(pair.decode.url), jsonl(input_lines()))
    log = pair.store / "batches" / batch.id / "results.jsonl"
    wait_for_results(log, NUM_LINES // 4)
    kill_group(pair.decode.process)
    before = finished_lines(log)
    assert NUM_LINES // 4 <= len(before) < NUM_LINES, "the kill came too late"
    pair.start_decode()
    wait_until_ready(pair.decode)
    api = client(pair.decode.url)
    done = wait(api, batch.id)
    found = results(api, done.output_file_id)
    assert texts(found) == one_process
    by_id = {item["custom_id"]: item for item in found}
    assert all(by_id[custom_id] == item for custom_id, item in before.items())


def test_both_servers_are_idle_and_whole_in_the_end(pair: ApartServers) -> None:
    params = {"max_new_tokens": 4, "ignore_eos": True}
    bodies = [{"text": f"After all {i}", "sampling_params": params} for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda body: generate(pair.decode.url, body), bodies)
        assert [len(answer["output_ids"]) for answer in answers] == [4] * 8
    deadline = time.monotonic() + 20
    while totals(pair.prefill)["kv_use"]["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for server in (pair.prefill, pair.decode):
        assert server.process.poll() is None
        assert "memory leak" not in server.log
        assert "Traceback" not in server.log
