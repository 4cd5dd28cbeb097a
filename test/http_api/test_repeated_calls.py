"""Calls whose answers were lost: the same call again has the same answer."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_line
from keyed_server import KEYS_PATH, add, call, start
from route_server import Server

NEW = {"filename": "a.jsonl", "purpose": "batch", "mime_type": "text/plain", "bytes": 2}


def twice(server: Server, method: str, path: str, **kwargs: Any) -> Any:
    """Make a call again, as an official client does, and return the one answer."""
    answers = [
        server.http.request(
            method, path, headers={"x-stainless-retry-count": str(count)}, **kwargs
        )
        for count in range(3)
    ]
    assert [each.status_code for each in answers] == [200] * 3, answers[1].text
    assert answers[0].json() == answers[1].json() == answers[2].json()
    return answers[0].json()


def begun(server: Server, *parts: bytes) -> tuple[str, list[str]]:
    upload = server.http.post("/v1/uploads", json=NEW).json()["id"]
    path = f"/v1/uploads/{upload}"
    added = [
        server.http.post(f"{path}/parts", files={"data": part}).json()["id"]
        for part in parts
    ]
    return path, added


@pytest.mark.slow
def test_to_complete_an_upload(server: Server) -> None:
    path, parts = begun(server, b"{", b"}")
    found = twice(server, "POST", f"{path}/complete", json={"part_ids": parts})
    assert found["status"] == "completed"
    assert len(server.client.files.list().data) == 1
    others: list[dict[str, Any]] = [{"part_ids": parts[::-1]}, {"part_ids": parts[:1]}]
    others.append({"part_ids": parts, "md5": "0" * 32})
    for other in others:
        answer = server.http.post(f"{path}/complete", json=other)
        assert answer.status_code == 409, other
    assert server.http.post(f"{path}/cancel").status_code == 409
    server.client.files.delete(found["file"]["id"])
    answer = server.http.post(f"{path}/complete", json={"part_ids": parts})
    assert answer.status_code == 409


def test_to_cancel_an_upload(server: Server) -> None:
    path, parts = begun(server, b"{}")
    assert twice(server, "POST", f"{path}/cancel")["status"] == "cancelled"
    answer = server.http.post(f"{path}/complete", json={"part_ids": parts})
    assert answer.status_code == 409


def test_to_delete_a_file(server: Server) -> None:
    path = f"/v1/files/{server.upload()}"
    assert twice(server, "DELETE", path)["deleted"] is True
    assert server.http.get(path).status_code == 404
    assert server.http.delete("/v1/files/file-0").status_code == 404


def test_to_cancel_and_delete_a_batch(server: Server) -> None:
    server.call(server.engine.hold, ["a"])
    batch = server.start(make_line("a"))
    path = f"/v1/batches/{batch.id}"
    found = [server.http.post(f"{path}/cancel").json() for _ in range(2)]
    assert {each["status"] for each in found} <= {"cancelling", "cancelled"}
    assert found[0]["cancelling_at"] == found[1]["cancelling_at"]
    server.ended(batch)
    assert server.http.post(f"{path}/cancel").status_code == 200
    assert twice(server, "DELETE", path)["deleted"] is True
    assert server.http.get(path).status_code == 404
    assert server.http.delete("/v1/batches/batch_0").status_code == 404


def test_to_cancel_and_delete_a_message_batch(server: Server) -> None:
    server.call(server.engine.hold, ["a"])
    message = {"role": "user", "content": "a"}
    params = {"model": "demo", "max_tokens": 8, "messages": [message]}
    body = {"requests": [{"custom_id": "a", "params": params}]}
    made = server.http.post("/v1/messages/batches", json=body).json()
    path = f"/v1/messages/batches/{made['id']}"
    found = [server.http.post(f"{path}/cancel") for _ in range(2)]
    assert [each.status_code for each in found] == [200, 200]
    while server.http.get(path).json()["processing_status"] != "ended":
        pass
    assert server.http.post(f"{path}/cancel").status_code == 200
    assert twice(server, "DELETE", path)["type"] == "message_batch_deleted"
    assert server.http.get(path).status_code == 404
    assert server.http.get(f"{path}/results").status_code == 404


def test_to_revoke_a_key_with_its_batches(keyed: Server) -> None:
    made = add(keyed, "bob")
    keyed.call(keyed.engine.hold, ["a"])
    batch = start(keyed.client_of(made["value"]), make_line("a"))
    path = f"{KEYS_PATH}/{made['id']}?cancel_batches=true"
    assert twice(keyed, "DELETE", path)["cancelled_batches"] == [batch.id]
    while call(keyed, "key-root", "GET", f"/v1/batches/{batch.id}").json()[
        "status"
    ] != ("cancelled"):
        pass
    assert twice(keyed, "DELETE", path)["cancelled_batches"] == [batch.id]


@pytest.mark.parametrize("tag", ["{}", "W/{}", '"x", {}', "*"])
def test_a_file_that_the_client_has_is_not_sent(server: Server, tag: str) -> None:
    path = f"/v1/files/{server.upload()}/content"
    whole = server.http.get(path)
    etag = whole.headers["etag"]
    headers = {"if-none-match": tag.format(etag)}
    same = server.http.get(path, headers=headers)
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == etag
    headers = {"if-none-match": '"other"'}
    assert server.http.get(path, headers=headers).content == whole.content
    headers = {"if-modified-since": whole.headers["last-modified"]}
    assert server.http.get(path, headers=headers).status_code == 304
