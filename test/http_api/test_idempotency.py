"""Calls that are repeated: with a key, and by clients that got no answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from builders import CHAT, make_body
from route_server import Server, error_of

from sglang_batch.server.http import idempotency
from sglang_batch.server.http import openai_routes as batches_module
from sglang_batch.server.http.idempotency import key_lock

CREATE = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
UPLOAD = {"bytes": 3, "filename": "x", "mime_type": "x", "purpose": "evals"}
REPLAYED = "idempotency-replayed"


def post_batch(server: Server, key: str | None = "k", **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return server.http.post("/v1/batches", json={**CREATE, **fields}, headers=headers)


def post_file(
    server: Server, key: str = "k", data: bytes = b"x", **fields: str
) -> httpx.Response:
    return server.http.post(
        "/v1/files",
        data={"purpose": "user_data", **fields},
        files={"file": ("name", data)},
        headers={"Idempotency-Key": key},
    )


def num_batches(server: Server) -> int:
    return len(server.http.get("/v1/batches?limit=100").json()["data"])


def test_the_same_call_with_the_same_key_is_executed_once(server: Server) -> None:
    first = post_batch(server)
    assert REPLAYED not in first.headers
    again = post_batch(server)
    assert again.headers[REPLAYED] == "true"
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["content-type"] == first.headers["content-type"]
    assert post_batch(server, "another").json()["id"] != first.json()["id"]
    assert post_batch(server, None).json()["id"] != first.json()["id"]
    assert num_batches(server) == 3


def test_forms_are_the_same_whatever_their_boundary(server: Server) -> None:
    first, again = post_file(server), post_file(server)
    assert (
        first.request.headers["content-type"] != again.request.headers["content-type"]
    )
    assert again.json() == first.json()
    assert again.headers[REPLAYED] == "true"
    assert len(server.client.files.list().data) == 1
    assert list(server.service.store.incoming.iterdir()) == []


def test_uploads_and_messages_have_keys_too(server: Server) -> None:
    key = {"Idempotency-Key": "k1"}
    begin = [server.http.post("/v1/uploads", json=UPLOAD, headers=key) for _ in "12"]
    assert begin[0].json() == begin[1].json()
    url = f"/v1/uploads/{begin[0].json()['id']}"
    parts = [
        server.http.post(
            f"{url}/parts",
            files={"data": ("x", b"abc")},
            headers={"Idempotency-Key": "k2"},
        )
        for _ in "12"
    ]
    assert parts[0].json() == parts[1].json()
    body = {"part_ids": [parts[0].json()["id"]]}
    done = [
        server.http.post(
            f"{url}/complete", json=body, headers={"Idempotency-Key": "k3"}
        )
        for _ in "12"
    ]
    assert done[0].json() == done[1].json()
    assert done[1].json()["status"] == "completed"
    params = make_body(max_tokens=1)
    requests = [{"custom_id": "a", "params": params}]
    made = [
        server.http.post(
            "/v1/messages/batches",
            json={"requests": requests},
            headers={"Idempotency-Key": "k4"},
        )
        for _ in "12"
    ]
    assert made[0].status_code == 200, made[0].text
    assert made[0].json()["id"] == made[1].json()["id"]
    for answers_given in (begin, parts, done, made):
        assert [REPLAYED in a.headers for a in answers_given] == [False, True]


@pytest.mark.parametrize(
    "other",
    [
        lambda server: post_batch(server, completion_window="1h"),
        lambda server: post_file(server),
        lambda server: server.http.post(
            "/v1/uploads", json=CREATE | UPLOAD, headers={"Idempotency-Key": "k"}
        ),
    ],
)
def test_a_key_is_of_one_call(
    server: Server, other: Callable[[Server], httpx.Response]
) -> None:
    post_batch(server)
    answer = other(server)
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    assert error_of(answer)["code"] == "idempotency_key_reused"
    assert (num_batches(server), list(server.client.files.list())) == (1, [])


@pytest.mark.parametrize("fields", [{"purpose": "evals"}, {"data": b"y"}])
def test_a_key_is_of_one_form(server: Server, fields: dict[str, Any]) -> None:
    assert post_file(server).status_code == 200
    assert post_file(server, **fields).status_code == 409


def test_what_failed_can_be_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk")

    with monkeypatch.context() as failing:
        failing.setattr(server.service, "create_batch", fail)
        assert post_batch(server).status_code == 500
    answer = post_batch(server)
    assert answer.status_code == 200
    assert REPLAYED not in answer.headers


def test_an_answer_is_kept_for_a_day(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = post_batch(server).json()["id"]
    now = idempotency.now()
    monkeypatch.setattr(idempotency, "now", lambda: now + 86_390)
    assert post_batch(server).json()["id"] == first
    monkeypatch.setattr(idempotency, "now", lambda: now + 86_410)
    assert post_batch(server).json()["id"] != first


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_has_a_length(bare_server: Server, key: str) -> None:
    answer = post_batch(bare_server, key)
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "invalid_idempotency_key"


def test_a_key_in_use_by_another_process_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = key_lock(server.service.store, "", "k")
    assert lock.acquire("another process") is None
    with monkeypatch.context() as impatient:
        impatient.setattr(idempotency, "PATIENCE_S", 0.01)
        answer = post_batch(server)
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "true"
    assert error_of(answer)["code"] == "idempotency_key_in_use"
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(post_batch, server)
        assert not waiting.done()
        lock.release()
        assert waiting.result().status_code == 200


@pytest.mark.slow
def test_of_fifty_calls_at_once_one_is_executed(server: Server) -> None:
    with ThreadPoolExecutor(50) as threads:
        batches = list(threads.map(lambda _: post_batch(server), range(50)))
        files = list(threads.map(lambda _: post_file(server, "f"), range(50)))
    for given in (batches, files):
        assert {answer.status_code for answer in given} == {200}
        assert len({answer.json()["id"] for answer in given}) == 1
        assert sum(REPLAYED not in answer.headers for answer in given) == 1
    assert num_batches(server) == 1
    assert len(server.client.files.list().data) == 1


def test_fifty_files_at_once_are_all_whole(server: Server) -> None:
    contents = [bytes([i]) * (i * 1000) for i in range(50)]

    def upload(data: bytes) -> tuple[str, bytes]:
        answer = server.http.post(
            "/v1/files", data={"purpose": "evals"}, files={"file": ("x", data)}
        )
        file_id: str = answer.json()["id"]
        return file_id, server.http.get(f"/v1/files/{file_id}/content").content

    with ThreadPoolExecutor(50) as threads:
        found = list(threads.map(upload, contents))
    assert [data for _, data in found] == contents
    assert len({file_id for file_id, _ in found}) == 50


# Clients that repeat calls without an answer ------------------------------------


def repeat(server: Server, count: str = "1", **fields: Any) -> str:
    answer = server.http.post(
        "/v1/batches",
        json={**CREATE, **fields},
        headers={"x-stainless-retry-count": count},
    )
    batch_id: str = answer.json()["id"]
    return batch_id


def test_a_repeated_call_gets_the_batch_that_the_first_made(server: Server) -> None:
    first = repeat(server, "0", metadata={"a": "b"})
    assert repeat(server, "2", metadata={"a": "b"}) == first
    others = [
        repeat(server, metadata={"a": "c"}),
        repeat(server),
        repeat(server, metadata={"a": "b"}, completion_window="1h"),
        repeat(server, metadata={"a": "b"}, priority=1),
        repeat(server, metadata={"a": "b"}, endpoint="/v1/embeddings"),
        repeat(server, "0", metadata={"a": "b"}),
    ]
    assert len({first, *others}) == 7


def test_a_batch_of_long_ago_is_not_what_a_repeated_call_means(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = repeat(server, "0")
    created_at = server.client.batches.retrieve(first).created_at
    monkeypatch.setattr(batches_module, "now", lambda: created_at + 600)
    assert repeat(server) == first
    monkeypatch.setattr(batches_module, "now", lambda: created_at + 601)
    assert repeat(server) != first


def test_a_field_of_the_body_means_the_same_as_the_header(server: Server) -> None:
    first = post_batch(server, None, idempotency_key="k")
    again = post_batch(server, None, idempotency_key="k")
    assert again.headers[REPLAYED] == "true"
    assert again.content == first.content
    assert post_batch(server, "k", idempotency_key="k").content == first.content
    for key, body_key in (("k", "other"), (None, ""), (None, "x" * 256), (None, 7)):
        answer = post_batch(server, key, idempotency_key=body_key)
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "invalid_idempotency_key"
    assert post_batch(server, None, idempotency_key=None).status_code == 200
    assert num_batches(server) == 2


def test_a_field_of_a_form_means_the_same_as_the_header(server: Server) -> None:
    form: Any = {"data": {"purpose": "evals", "idempotency_key": "f"}}
    files: Any = {"file": ("name", b"x")}
    first = server.http.post("/v1/files", files=files, **form)
    again = server.http.post("/v1/files", files=files, **form)
    assert (again.headers[REPLAYED], again.content) == ("true", first.content)
