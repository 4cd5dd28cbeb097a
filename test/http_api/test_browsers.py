"""Calls of web pages, headers of all answers, HEAD, and calls that no route takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from builders import make_line
from fastapi.routing import APIRoute
from route_server import Server, error_of, serving

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.server.http.all_routes import ROUTERS

PAGE = "https://app.example.com"
EVIL = "https://evil.example.com"
PREFLIGHT = {"access-control-request-method": "DELETE"}
GETS = [
    route.path
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute) and "GET" in (route.methods or ())
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config: dict[str, Any] = {
        "allowed_origins": (PAGE,),
        "public_url": "https://batches.example.com/llm/",
    }
    with serving(tmp_path_factory.mktemp("browsers"), **config) as server:
        yield server


def paths(server: Server) -> list[str]:
    ids = {
        "file_id": server.upload(),
        "batch_id": server.ended(server.start(make_line("a"))).id,
        "message_batch_id": "msgbatch_0",
    }
    return [path.format(**ids) for path in GETS]


@pytest.mark.parametrize("origin", [EVIL, "null", f"{PAGE}.evil.com", "http://", "*"])
def test_pages_of_other_origins_read_and_change_nothing(
    server: Server, origin: str
) -> None:
    headers = {"origin": origin}
    for path in paths(server):
        for method in ("GET", "DELETE", "OPTIONS"):
            answer = server.http.request(method, path, headers=headers | PREFLIGHT)
            assert answer.status_code == 403, (method, path)
            assert "access-control-allow-origin" not in answer.headers
    before = [file.id for file in server.client.files.list()]
    # A form, and JSON as text, are sent without asking first.
    form: dict[str, Any] = {"data": {"purpose": "evals"}, "files": {"file": b"x"}}
    answer = server.http.post("/v1/files", headers=headers, **form)
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (403, "origin_not_allowed")
    assert "allowed_origins" in error["message"]
    assert [file.id for file in server.client.files.list()] == before
    answer = server.http.get("/v1/messages/batches", headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (403, "error")


def test_pages_of_configured_origins_may_call(server: Server) -> None:
    headers = {"origin": PAGE}
    answer = server.http.options("/v1/files/x", headers=headers | PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "DELETE" in answer.headers["access-control-allow-methods"]
    for path in paths(server):
        answer = server.http.get(path, headers=headers)
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "Origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers
        assert "X-Last-Line" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://testserver"},
        {"origin": "https://testserver"},
        {"origin": "https://batches.example.com"},
        {"origin": "https://behind.proxy", "sec-fetch-site": "same-origin"},
        {},
    ],
)
def test_the_servers_own_page_and_programs_may_call(
    server: Server, headers: dict[str, str]
) -> None:
    answer = server.http.get("/v1/files", headers=headers)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origins", [["app.example.com"], [f"{PAGE}/"], ["null"], [1], "x", {}]
)
def test_origins_are_as_browsers_send_them(origins: Any) -> None:
    with pytest.raises(ConfigError, match=r"allowed_origins=.*https://app\.example"):
        OfflineBatchConfig(allowed_origins=origins)
    text = f'{{"allowed_origins": ["{PAGE}:8443", "http://[::1]:80"]}}'
    assert len(OfflineBatchConfig.from_json(text).allowed_origins) == 2
    with pytest.raises(ConfigError, match="public_url"):
        OfflineBatchConfig(public_url="batches.example.com")


def test_every_answer_has_its_headers(server: Server) -> None:
    for path in [*paths(server), "/v1/files/none", "/batches", "/v1/files/a/b/c"]:
        for method in ("GET", "HEAD", "PUT"):
            answer = server.http.request(method, path)
            assert answer.headers["x-content-type-options"] == "nosniff", (method, path)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("abc-1/2", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ('a"b', False),
        ("a b", False),
        ("\xe9", False),
    ],
)
def test_a_request_id_is_sent_back_and_logged(
    server: Server, caplog: pytest.LogCaptureFixture, given: str, is_kept: bool
) -> None:
    for path in ("/v1/files/none", "/v1/messages/batches/none", "/v1/batches"):
        headers = {"x-request-id": given.encode("latin-1")}
        with caplog.at_level(logging.INFO):
            caplog.clear()
            answer = server.http.delete(path, headers=headers)
        found = answer.headers["x-request-id"]
        assert (found == given) == is_kept
        assert is_kept or found.startswith("req_")
        assert f"request_id={found}" in caplog.text
        assert answer.headers.get("request-id", found) == found


def test_head_is_get_without_a_body(server: Server) -> None:
    for path in paths(server):
        got = server.http.get(path)
        head = server.http.head(path)
        assert head.status_code == got.status_code
        assert head.content == b""
        kept = {"content-length", "content-type", "x-incomplete", "x-last-line"}
        for name in kept & set(got.headers):
            if not path.endswith("/data"):
                assert head.headers[name] == got.headers[name]


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/v1/batches/x/y", "/offline_batch/limits/a/b"]
)
def test_unknown_paths_have_a_nested_error(server: Server, path: str) -> None:
    answer = server.http.get(path)
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert f"GET {path}" in error["message"]


def test_unknown_paths_elsewhere_are_the_servers(server: Server) -> None:
    assert server.http.get("/nothing").json() == {"detail": "Not Found"}
    answer = server.http.get("/v1/messages/batches/a/b/c")
    assert answer.json()["error"]["type"] == "not_found_error"
    answer = server.http.request("BREW", "/v1/files")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(
    ("filename", "shown"),
    [
        ("a.jsonl", 'filename="a.jsonl"'),
        ("../../etc/passwd", 'filename="passwd"'),
        ("C:\\Users\\a.txt", 'filename="a.txt"'),
        ("..", 'filename="file"'),
        ("\u00e9\u202e.txt", "filename*=utf-8''%C3%A9.txt"),
        ("a;x=b", "filename*=utf-8''a%3Bx%3Db"),
    ],
)
def test_a_download_has_a_base_name(server: Server, filename: str, shown: str) -> None:
    file = server.client.files.create(file=(filename, b"x"), purpose="evals")
    answer = server.http.get(f"/v1/files/{file.id}/content")
    assert answer.headers["content-disposition"] == f"attachment; {shown}"


def test_links_start_with_the_public_url_or_the_host_of_the_call(
    server: Server, tmp_path: Any
) -> None:
    params = {"model": "demo", "max_tokens": 1, "messages": []}
    body = {"requests": [{"custom_id": "a", "params": params}]}
    url, host = "/v1/messages/batches", {"host": EVIL.removeprefix("https://")}
    with serving(tmp_path) as plain:
        for each, begin in (
            (server, "https://batches.example.com/llm"),
            (plain, f"http://{host['host']}"),
        ):
            made = each.http.post(url, json=body, headers=host).json()
            while made["processing_status"] != "ended":
                made = each.http.get(f"{url}/{made['id']}", headers=host).json()
            assert made["results_url"] == f"{begin}{url}/{made['id']}/results"
