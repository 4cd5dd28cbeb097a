"""Calls with a key on a server that dies take effect once or not at all."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from builders import CHAT, make_body
from route_server import Server

from sglang_batch.server.http import idempotency

CREATE = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
UPLOAD = {"bytes": 3, "filename": "x", "mime_type": "x", "purpose": "evals"}


def post(server: Server, path: str, key: str, **content: Any) -> httpx.Response:
    return server.http.post(path, headers={"Idempotency-Key": key}, **content)


def all_calls(server: Server) -> list[httpx.Response]:
    """Each kind of call that makes something, twice, under a key of its own."""
    upload = server.http.post("/v1/uploads", json=UPLOAD).json()["id"]
    data = {"files": {"data": ("x", b"abc")}}
    part = server.http.post(f"/v1/uploads/{upload}/parts", **data).json()["id"]
    requests = [{"custom_id": "a", "params": make_body(max_tokens=1)}]
    file = {"data": {"purpose": "user_data"}, "files": {"file": ("name", b"x")}}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/batches", {"json": CREATE}),
        ("/v1/files", file),
        ("/v1/uploads", {"json": UPLOAD}),
        (f"/v1/uploads/{upload}/parts", data),
        (f"/v1/uploads/{upload}/complete", {"json": {"part_ids": [part]}}),
        ("/v1/messages/batches", {"json": {"requests": requests}}),
    ]
    return [post(server, path, path, **call) for path, call in calls for _ in range(2)]


def num_rows(server: Server) -> list[int]:
    tables = ("batches", "files", "uploads", "upload_parts", "idempotent_answers")
    query = "SELECT COUNT(*) AS n FROM "
    return [server.service.store.rows(query + table)[0]["n"] for table in tables]


def test_what_is_done_and_its_answer_are_one_transaction(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = idempotency.keep_answer
    calls = 0

    def die_first(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise OSError("the server died")
        keep(*args)

    monkeypatch.setattr(idempotency, "keep_answer", die_first)
    found = all_calls(server)
    assert [answer.status_code for answer in found] == [500, 200] * 6
    # Two batches, two files and one of messages, two uploads, no remaining part (the
    # upload with parts is completed), six answers.
    assert num_rows(server) == [2, 3, 2, 0, 6]


def test_an_answer_is_kept_before_anything_else_can_fail(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise OSError("the server died")

    with monkeypatch.context() as dying:
        dying.setattr(server.service, "_wake_runner", die)
        assert post(server, "/v1/batches", "k", json=CREATE).status_code == 500
    again = post(server, "/v1/batches", "k", json=CREATE)
    assert again.headers["idempotency-replayed"] == "true"
    assert [batch.id for batch in server.client.batches.list()] == [again.json()["id"]]
