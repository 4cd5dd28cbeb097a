"""The models and daily limits of keys, and their usage."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from builders import CHAT, ids_of, make_line, make_lines, parse_lines
from fastapi import FastAPI
from fastapi.testclient import TestClient
from keyed_server import KEYS, KEYS_PATH, add, call, start, usage_of
from route_server import Server, error_of, serving

from sglang_batch.errors import ApiError
from sglang_batch.job.engine import WAVE_PATH
from sglang_batch.server.access import usage
from sglang_batch.server.access.keys import Allowance, ModelRules
from sglang_batch.server.http import authorization
from sglang_batch.server.http.authorization import KeyMiddleware
from sglang_batch.store.batch_store import BatchStore

# Limits -------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def refused(client: openai.OpenAI, *lines: str) -> Any:
    with pytest.raises(openai.RateLimitError) as raised:
        start(client, *lines)
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert 0 < int(raised.value.response.headers["retry-after"]) <= 86_400
    return raised.value.body


def test_batches_and_lines_per_day_are_limited(keyed: Server) -> None:
    bob = keyed.client_of(add(keyed, "bob", batches_per_day=2)["value"])
    eve = keyed.client_of(add(keyed, "eve", lines_per_day=5)["value"])
    for client, lines in ((bob, 1), (bob, 1), (eve, 2), (eve, 3)):
        start(client, *make_lines(lines))
    body = refused(bob)
    assert (body["type"], body["code"]) == ("requests", "rate_limit_exceeded")
    assert "batches per day of this API key: limit 2, used 2" in body["message"]
    assert "lines per day" in refused(eve)["message"]
    assert (usage_of(keyed, "eve")["batches"], usage_of(keyed, "eve")["lines"]) == (
        2,
        5,
    )
    keyed.http.post("/offline_batch/limits/eve", json={"lines_per_day": 7})
    start(eve, *make_lines(2))
    assert "used 7, requested 1" in refused(eve)["message"]
    params = {"model": "demo", "max_tokens": 1, "messages": []}
    messages = {"requests": [{"custom_id": "a", "params": params}]}
    limits = {"batches_per_day": None, "lines_per_day": 2}
    keyed.http.post("/offline_batch/limits/bob", json=limits)
    answer = call(
        keyed, bob.api_key, "POST", "/v1/messages/batches", json=messages
    ).json()
    assert answer["error"]["type"] == "rate_limit_error"


def test_a_limit_that_is_left_out_keeps_its_value(keyed: Server) -> None:
    def limit(**fields: Any) -> dict[str, Any]:
        found: dict[str, Any] = keyed.http.post(path, json=fields).json()
        return found

    path = "/offline_batch/limits/bob"
    add(keyed, "bob", models=["demo"], lines_per_day=5, tokens_per_day=9)
    expected = {"models": ["demo"], "batches_per_day": None, "lines_per_day": 5}
    expected["enqueued_tokens"] = None
    assert limit(tokens_per_day=10) == expected | {"tokens_per_day": 10}
    again = add(keyed, "bob", same_owner=True, batches_per_day=3)
    assert (again["models"], again["lines_per_day"]) == (["demo"], 5)
    assert limit() == expected | {"batches_per_day": 3, "tokens_per_day": 10}
    misspelled = keyed.http.post(path, json={"token_per_day": 5})
    assert misspelled.status_code == 400
    assert error_of(misspelled)["param"] == "token_per_day"
    assert "tokens_per_day" in error_of(misspelled)["message"]
    assert limit(models=None, tokens_per_day=None) == {
        **expected,
        "models": None,
        "batches_per_day": 3,
        "tokens_per_day": None,
    }


def test_a_batch_above_the_enqueued_tokens_of_its_key_fails_alone(
    keyed: Server,
) -> None:
    lines = make_lines(40)
    size = round(sum(len(line) + 1 for line in lines) / 4)
    keyed.engine.hold(ids_of(range(40)))
    bob = keyed.client_of(add(keyed, "bob", enqueued_tokens=2 * size + 1)["value"])
    eve = keyed.client_of(add(keyed, "eve")["value"])
    batches = [start(bob, *lines) for _ in range(3)] + [start(eve, *lines)]

    def in_states(*states: str) -> list[Any]:
        found = [keyed.client.batches.retrieve(batch.id) for batch in batches]
        return [batch for batch in found if batch.status in states]

    until(lambda: not in_states("validating"))
    [failed] = in_states("failed")
    [error] = failed.errors.data
    assert (error.code, error.line) == ("token_limit_exceeded", None)
    assert error.message == (
        "Enqueued token limit reached for demo by the API key 'bob'. Limit: "
        f"{2 * size + 1:,} enqueued tokens, of which in_progress batches have about "
        f"{2 * size:,} and this one needs {size:,}. Please try again once some "
        "in_progress batches have been completed."
    )
    assert failed.request_counts.total == 0
    others = in_states("in_progress")
    assert len(others) == 3
    # A cancelled batch's tokens are free at once, while its lines still end.
    keyed.client.batches.cancel(others[0].id)
    batches.append(start(bob, *lines))
    until(lambda: not in_states("validating"))
    assert len(in_states("failed")) == 1
    too_large = keyed.ended(start(bob, *make_lines(100)))
    assert "with a smaller file, or ask the admin" in too_large.errors.data[0].message
    keyed.call(keyed.engine.release)
    for batch in in_states("in_progress"):
        assert keyed.ended(batch).status == "completed"
    batches += [start(bob, *lines), start(bob, *lines)]
    for batch in batches[-2:]:
        assert keyed.ended(batch).status == "completed"


def test_a_repeated_call_counts_once(keyed: Server) -> None:
    bob = keyed.client_of(add(keyed, "bob", batches_per_day=1)["value"])
    file = bob.files.create(file=("in.jsonl", make_line().encode()), purpose="batch")
    made = {
        bob.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            extra_headers={"Idempotency-Key": "1"},
        ).id
        for _ in range(3)
    }
    assert len(made) == 1
    assert usage_of(keyed, "bob")["batches"] == 1


def test_used_up_tokens_pause_batches_until_the_next_day(
    keyed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed.engine.hold(ids_of(range(1, 40)))
    key = add(keyed, "bob", tokens_per_day=1)["value"]
    bob = keyed.client_of(key)
    batch = start(bob, *make_lines(40))
    path = f"/v1/batches/{batch.id}"
    while "paused_reason" not in (shown := call(keyed, key, "GET", path).json()):
        pass
    assert "1 tokens per day" in shown["paused_reason"]
    assert refused(bob)["type"] == "tokens"
    keyed.call(keyed.engine.release)
    assert len(keyed.engine.executed) < 40
    today = usage.now()
    monkeypatch.setattr(usage, "now", lambda: today + 86_400)
    keyed.http.post("/offline_batch/limits/bob", json={"tokens_per_day": None})
    ended = keyed.ended(batch)
    assert ended.status == "completed"
    monkeypatch.undo()
    rows = keyed.http.get("/offline_batch/usage").json()["data"]
    total = sum(row["total_tokens"] for row in rows if row["name"] == "bob")
    assert ended.usage is not None
    assert total == ended.usage.total_tokens > 0


@pytest.mark.parametrize("tells", [True, False])
def test_a_limit_set_in_mid_run_takes_back_what_has_not_begun(
    keyed: Server, tells: bool
) -> None:
    engine, ids = keyed.engine, ids_of(range(40))
    engine.tells, engine.default_max_inflight = tells, 40
    engine.hold(ids)
    engine.queued = set(ids[5:])  # the engine has them all, and runs five
    key = add(keyed, "bob")["value"]
    batch = start(keyed.client_of(key), *make_lines(40))
    until(lambda: len(engine.running) == 40)
    keyed.http.post("/offline_batch/limits/bob", json={"tokens_per_day": 0})
    until(lambda: len(engine.running) == 5)
    assert sorted(engine.aborted) == sorted(ids[5:])
    path = f"/v1/batches/{batch.id}"
    while "5 of its lines" not in (
        reason := call(keyed, key, "GET", path).json().get("paused_reason", "")
    ):
        pass
    assert "0 tokens per day" in reason
    keyed.call(engine.release)
    while "had begun" in call(keyed, key, "GET", path).json()["paused_reason"]:
        pass
    # Counts are written now and then.
    while call(keyed, key, "GET", path).json()["request_counts"]["completed"] < 5:
        pass
    assert len(engine.executed) == 40
    engine.queued.clear()
    keyed.http.post("/offline_batch/limits/bob", json={"tokens_per_day": None})
    ended = keyed.ended(batch)
    assert ended.request_counts is not None
    assert ended.request_counts.completed == 40
    # Those that were taken back are sent again in their order, each once.
    assert len(engine.executed) == 75
    assert Counter(engine.answered) == Counter(ids)
    assert engine.executed[40:] == [
        each for each in engine.executed[:40] if each in ids[5:]
    ]


def test_limits_of_a_name_in_the_file_of_keys_can_be_set(keyed: Server) -> None:
    limits = {"models": ["demo"], "batches_per_day": 0}
    shown = keyed.http.post("/offline_batch/limits/ann", json=limits).json()
    assert shown["batches_per_day"] == 0
    refused(keyed.client_of("key-ann"))
    answer = keyed.http.post("/offline_batch/limits/nobody", json=limits)
    assert answer.status_code == 404


def test_models_are_limited_in_every_line(keyed: Server) -> None:
    bob = keyed.client_of(add(keyed, "bob", models=["other", "tuned"])["value"])
    lines = [
        make_line("a"),
        json.dumps(json.loads(make_line("b")) | {"body": {"messages": []}}),
    ]
    batch = keyed.ended(start(bob, *lines))
    assert batch.status == "failed"
    assert batch.errors is not None and batch.errors.data is not None
    assert "may not use the model" in str(batch.errors.data[0].message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        ({"model": "demo"}, True),
        ({"model": "demo:tuned"}, True),
        ({"model": "demo", "lora_path": "tuned"}, True),
        ({"model": "demo", "lora_path": [None, "tuned"]}, True),
        ({"model": "demo:other"}, False),
        ({"model": "x"}, False),
        ({"model": "demo", "lora_path": "other"}, False),
        # SGLang takes the adapter of the model before the other.
        ({"model": "demo:tuned", "lora_path": "other"}, True),
        ({"model": "demo:other", "lora_path": "tuned"}, False),
        ({"model": "demo", "lora_path": ["tuned", "other"]}, False),
        ({"model": "demo", "lora_path": [["tuned"]]}, False),
        ({"model": " demo"}, False),
        ({"model": ["demo"]}, False),
        ({}, False),
        ([], False),
        (b'{"model": "demo", "model": "x"}', False),
        (b"{", False),
        (b"\xff", False),
        (b"[" * 100_000, False),
    ],
)
def test_models_are_limited_in_online_calls(
    tmp_path: Path, body: Any, allowed: bool
) -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    def chat(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @app.post("/v1/audio/transcriptions")
    def transcribe() -> None: ...

    with serving(tmp_path, KEYS, api_key="key-root") as server:
        made = add(server, "bob", models=["demo", "demo:tuned"])
        app.state = server.http.app.state  # type: ignore[attr-defined]
        app.add_middleware(KeyMiddleware)
        http = TestClient(app, headers={"authorization": f"Bearer {made['value']}"})
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = http.post(
            "/v1/chat/completions",
            content=content,
            headers={"content-type": "application/json"},
        )
        if allowed:
            assert answer.json() == body
        else:
            assert answer.status_code == 403
            assert error_of(answer)["code"] == "model_not_allowed"
        assert http.post("/v1/audio/transcriptions").status_code == 403


CHAT_URL, SCORE_URL = "/v1/chat/completions", "/v1/score"


@pytest.mark.parametrize(
    ("url", "body", "allowed"),
    [
        (CHAT_URL, {"model": "demo:sql"}, True),
        (CHAT_URL, {"model": "any: sql"}, True),
        (CHAT_URL, {"model": "demo", "lora_path": "sql"}, True),
        (CHAT_URL, {"model": "demo", "lora_path": ["sql", "sql"]}, True),
        # These run the base model.
        (CHAT_URL, {"model": "sql"}, False),
        (CHAT_URL, {"model": "demo"}, False),
        (CHAT_URL, {"model": "sql", "lora_path": ""}, False),
        (CHAT_URL, {"model": "sql", "lora_path": []}, False),
        (CHAT_URL, {"model": "demo", "lora_path": ["sql", None]}, False),
        (SCORE_URL, {"model": "demo:sql"}, False),
        (SCORE_URL, {"model": "demo", "lora_path": "sql"}, False),
        (SCORE_URL, {"model": "sql"}, False),
    ],
)
def test_a_key_of_an_adapter_does_not_run_the_base_model(
    url: str, body: dict[str, Any], allowed: bool
) -> None:
    why = ModelRules(("sql",), ("demo",)).refusal(url, body)
    assert (why is None) == allowed
    if body == {"model": "sql"} and url == CHAT_URL:
        assert why is not None and "name one as 'demo:ADAPTER'" in why[0]
    # A served name with a colon names no adapter.
    stored = "s3://bucket/demo"
    for model, ok in ((stored, False), (f"{stored}:sql", True)):
        why = ModelRules(("sql",), (stored,)).refusal(CHAT_URL, {"model": model})
        assert (why is None) == ok
    assert ModelRules((stored,), (stored,)).refusal(CHAT_URL, {"model": stored}) is None


def test_a_wave_without_an_adapter_runs_the_base_model(keyed: Server) -> None:
    key = add(keyed, "bob", models=["sql"])["value"]
    for adapter, ok in ((None, 0), ([None], 0), ([], 0), ("sql", 1), (["sql"], 1)):
        for body in ({"text": "x", "lora_path": adapter}, {"text": "x"}):
            answer = call(keyed, key, "POST", WAVE_PATH, json={"requests": [body]})
            allowed = ok and "lora_path" in body
            assert answer.status_code == (200 if allowed else 403), body


def test_models_are_limited_in_every_line_of_a_wave(keyed: Server) -> None:
    key = add(keyed, "bob", models=["sql"])["value"]
    lines = [json.loads(make_line(f"line-{i}")) for i in range(3)]
    lines[1]["body"]["model"] += ":sql"
    del lines[2]["body"]["model"]
    answer = call(keyed, key, "POST", WAVE_PATH, json={"lines": lines})
    found = {line["index"]: line for line in parse_lines(answer.content)}
    assert [found[i]["status_code"] for i in range(3)] == [403, 200, 403]
    assert found[0]["body"]["error"]["code"] == "model_not_allowed"


def test_a_limit_is_found_by_a_session_that_is_older(keyed: Server) -> None:
    key = add(keyed, "bob")["value"]
    session = keyed.access.caller([key.encode()])
    assert session is not None
    keyed.access.count("bob", Counter(calls=1, input_tokens=5))
    keyed.access.check_tokens(session)
    keyed.http.post("/offline_batch/limits/bob", json={"tokens_per_day": 5})
    with pytest.raises(ApiError, match="limit 5, used 5"):
        keyed.access.check_tokens(session)


def test_an_online_call_meets_the_limit_of_tokens_only() -> None:
    used = {"batches": 5, "lines": 50, "tokens": 1}
    allowance = Allowance(batches=1, lines=10, tokens=2)
    usage.check_limits(allowance, used)
    for more in ({"batches": 1}, {"lines": 1}):
        with pytest.raises(ApiError):
            usage.check_limits(allowance, used, **more)


def test_use_is_never_negative(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    try:
        for change, total in ((-50, 0), (30, 30), (-10, 20), (-50, 0)):
            usage.add_usage(store, "ann", input_tokens=change)
            assert usage.used_today(store.rows, "ann")["tokens"] == total
    finally:
        store.close()


def test_tokens_count_while_they_are_being_written(
    keyed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def write(store: BatchStore, name: str, **counts: int) -> None:
        seen.append(keyed.access.used_today(name)["tokens"])
        usage.add_usage(store, name, **counts)

    monkeypatch.setattr(authorization, "add_usage", write)
    for _ in range(2):
        keyed.access.count("ann", Counter(calls=1, input_tokens=5, output_tokens=3))
        keyed.access.write()
        seen.append(keyed.access.used_today("ann")["tokens"])
    assert seen == [8, 8, 16, 16]


def test_two_writers_count_a_call_once(
    keyed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server writes every few seconds, and once more when it stops."""
    other = threading.Thread(target=keyed.access.write)

    def write(store: BatchStore, name: str, **counts: int) -> None:
        if other.ident is None:
            other.start()
            other.join(0.5)
        usage.add_usage(store, name, **counts)

    monkeypatch.setattr(authorization, "add_usage", write)
    keyed.access.count("ann", Counter(calls=1, input_tokens=5, output_tokens=3))
    keyed.access.write()
    other.join()
    assert keyed.access.used_today("ann")["tokens"] == 8


def test_a_client_sees_its_own_usage_only(keyed: Server) -> None:
    for key in ("key-ann", add(keyed, "bob")["value"]):
        keyed.ended(start(keyed.client_of(key)))
    rows = call(keyed, "key-ann", "GET", "/offline_batch/usage").json()["data"]
    assert {row["name"] for row in rows} == {"ann"}
    assert {"ann", "bob"} <= {
        row["name"] for row in keyed.http.get("/offline_batch/usage").json()["data"]
    }


@pytest.mark.parametrize(
    "body",
    [
        {"name": "a/b"},
        {"name": "."},  # clients resolve it in /offline_batch/limits/{name}
        {"name": ".."},
        {"name": "a" * 65},
        {"name": ""},
        {"name": "--admin-api-key"},
        {"name": None},
        {"name": "a", "role": "root"},
        {"name": "a", "models": []},
        {"name": "a", "models": "demo"},
        {"name": "a", "lines_per_day": -1},
        {"name": "a", "lines": 5},
        {"name": "a", "lines_per_day": 1.5},
        {"name": "a", "tokens_per_day": True},
        {"name": "a", "same_owner": "yes"},
    ],
)
def test_a_bad_parameter_of_a_key_is_named(keyed: Server, body: Any) -> None:
    answer = keyed.http.post(KEYS_PATH, json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] in body
    assert keyed.http.get(KEYS_PATH).json()["data"] == []
