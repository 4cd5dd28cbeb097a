"""Lists of files and batches over HTTP, page by page."""

from __future__ import annotations

from typing import Any

import pytest
from keyed_server import call
from route_server import Server, error_of

from sglang_batch.server.retention import collect
from sglang_batch.store.batch_store import now


def test_files_are_listed_newest_first_over_pages(server: Server) -> None:
    ids = [server.upload() for _ in range(5)]
    page = server.client.files.list(limit=2)
    assert [file.id for file in page.data] == ids[:2:-1]
    assert page.has_more
    assert [file.id for file in page] == ids[::-1]  # the client asks for the rest


def test_files_are_listed_oldest_first_and_by_purpose(server: Server) -> None:
    ids = [server.upload(purpose=p) for p in ("batch", "evals", "batch", "evals")]
    page = server.client.files.list(order="asc", limit=1, purpose="evals")
    assert [file.id for file in page] == [ids[1], ids[3]]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_page_says_whether_there_is_more(server: Server, path: str) -> None:
    empty: dict[str, Any] = {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
    }
    assert server.http.get(path).json() == {**empty, "has_more": False}
    for _ in range(4):
        server.start()
    pages, after = [], ""
    for _ in range(2):
        page = server.http.get(f"{path}?limit=2{after}").json()
        assert page["object"] == "list"
        assert [page["first_id"], page["last_id"]] == [x["id"] for x in page["data"]]
        after = f"&after={page['last_id']}"
        pages.append(page)
    assert pages[0]["has_more"]
    if path == "/v1/batches":  # of files there are results too
        assert not pages[1]["has_more"]
        assert server.http.get(f"{path}?limit=2{after}").json()["data"] == []


def test_batches_are_listed_newest_first_over_pages(server: Server) -> None:
    ids = [server.start().id for _ in range(5)]
    page = server.client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:2:-1]
    assert [batch.id for batch in page] == ids[::-1]
    assert [batch.id for batch in server.client.batches.list()] == ids[::-1]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?limit=10001", "limit"),
        ("/v1/files?limit=many", "limit"),
        ("/v1/files?order=sideways", "order"),
        ("/v1/batches?limit=0", "limit"),
        ("/v1/batches?limit=101", "limit"),
        ("/v1/batches?limit=-1", "limit"),
        ("/v1/batches?limit=1.5", "limit"),
    ],
)
def test_a_parameter_of_a_list_out_of_range_is_refused(
    bare_server: Server, path: str, param: str
) -> None:
    answer = bare_server.http.get(path)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert param in error["message"] and path.rpartition("=")[2] in error["message"]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_page_after_something_unknown_is_not_found(
    bare_server: Server, path: str
) -> None:
    answer = bare_server.http.get(f"{path}?after=nothing")
    assert answer.status_code == 404
    assert error_of(answer)["param"] == "after"


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/messages/batches"])
def test_an_empty_cursor_is_none(server: Server, path: str) -> None:
    server.ended(server.start())
    names = ("after_id", "before_id") if "messages" in path else ("after",)
    for name in names:
        answer = server.http.get(f"{path}?{name}=")
        assert answer.status_code == 200
        assert answer.json() == server.http.get(path).json()


@pytest.mark.parametrize("gone", ["deleted", "expired", "removed"])
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_list_goes_on_after_a_file_that_has_gone(
    server: Server, monkeypatch: pytest.MonkeyPatch, gone: str, order: Any
) -> None:
    ids = [server.upload() for _ in range(5)]
    ids = ids if order == "asc" else ids[::-1]
    seen = []
    for file in server.client.files.list(limit=2, order=order):
        seen.append(file.id)
        if gone == "deleted":
            server.client.files.delete(file.id)
        else:
            with server.service.store.atomic() as db:
                db.execute("UPDATE files SET expires_at = 1 WHERE id = ?", (file.id,))
        if gone == "removed":
            server.call(collect, server.service.store, server.service.config, now())
    assert seen == ids
    assert server.client.files.list().data == []


def test_a_list_goes_on_after_a_batch_that_was_deleted(server: Server) -> None:
    ids = [server.ended(server.start()).id for _ in range(5)]
    seen = []
    for batch in server.client.batches.list(limit=2):
        seen.append(batch.id)
        assert server.http.delete(f"/v1/batches/{batch.id}").status_code == 200
    assert seen == ids[::-1]
    assert server.client.batches.list().data == []


@pytest.mark.parametrize("cursor", ["after_id", "before_id"])
def test_a_list_goes_on_after_a_message_batch_that_was_deleted(
    server: Server, cursor: str
) -> None:
    path = "/v1/messages/batches"
    message = {"role": "user", "content": "a"}
    params = {"model": "demo", "max_tokens": 8, "messages": [message]}
    made = []
    for _ in range(5):
        body = {"requests": [{"custom_id": "a", "params": params}]}
        made.append(server.http.post(path, json=body).json()["id"])
    made = made if cursor == "before_id" else made[::-1]
    place, seen = made[0], made[:1]
    while True:
        while server.http.delete(f"{path}/{place}").status_code != 200:
            pass  # it has not ended
        page = server.http.get(f"{path}?limit=2&{cursor}={place}").json()
        if not page["data"]:
            break
        found = [each["id"] for each in page["data"]]
        seen += found if cursor == "after_id" else found[::-1]
        place = page["last_id" if cursor == "after_id" else "first_id"]
        assert page["has_more"] == (len(seen) < 5)
    assert seen == made


def test_a_cursor_is_one_of_the_callers_own(keyed: Server) -> None:
    root = keyed.client
    for add in (lambda: keyed.upload(), lambda: keyed.ended(keyed.start()).id):
        each = add()
        path = "/v1/files" if each.startswith("file") else "/v1/batches"
        assert keyed.http.delete(f"{path}/{each}").status_code == 200
        for key, status in (("key-root", 200), ("key-ann", 404)):
            for method, url in (
                ("GET", f"{path}?after={each}"),
                ("DELETE", f"{path}/{each}"),
            ):
                assert call(keyed, key, method, url).status_code == status, (key, url)
        other = "/v1/messages/batches"
        assert keyed.http.get(f"{other}?after_id={each}").status_code == 404
    assert root.files.list().has_more is False
