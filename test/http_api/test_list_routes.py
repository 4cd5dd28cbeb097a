"""Lists of files and batches over HTTP, page by page."""

from __future__ import annotations

from typing import Any

import pytest
from route_server import Server, error_of


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
    assert param in error["message"]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_page_after_something_unknown_is_not_found(
    bare_server: Server, path: str
) -> None:
    answer = bare_server.http.get(f"{path}?after=nothing")
    assert answer.status_code == 404
    assert error_of(answer)["param"] == "after"
