"""Links in answers can be called as they are, and follow no header of strangers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request
from route_server import serving

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.server.http.parameters import base_url


def link(
    headers: dict[str, str],
    *,
    client: str = "10.1.2.3",
    scheme: str = "http",
    root_path: str = "",
    **settings: Any,
) -> str:
    service = SimpleNamespace(config=OfflineBatchConfig(**settings))
    app = SimpleNamespace(state=SimpleNamespace(offline_batch_service=service))
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return base_url(
        Request(
            {
                "type": "http",
                "app": app,
                "headers": raw,
                "client": (client, 1),
                "scheme": scheme,
                "root_path": root_path,
            }
        )
    )


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1:30000", "[::1]:30000", "a.example.com", "A_b.internal:8"],
)
def test_a_link_has_the_host_of_the_call(host: str) -> None:
    assert link({"host": host}) == f"http://{host}"
    assert link({"host": host}, scheme="https") == f"https://{host}"
    assert link({"host": host}, root_path="/llm") == f"http://{host}/llm"
    public = {"public_url": "https://b.example.com/llm/"}
    assert link({"host": host}, **public) == "https://b.example.com/llm"


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "a b",
        "a/b",
        "a@b",
        "a\\b",
        "a?b",
        "a#b",
        "a:b",
        "a:99999",
        "a:0",
        "a%2eb",
        "[::1",
        "::1",
        "a\r\nb",
        "a\n",
        "a,b",
        'a"b',
        "<a>",
        "é",
        "a" * 256,
        "-",
        ".",
        "a:",
        "[:::]",
        "[1:2]",
        "[::1.2.3]",
        "256.1.1.1",
        "1.2.3.4.5",
        "a..b",
        "a" * 64 + ".b",
    ],
)
def test_what_is_no_host_makes_links_paths(host: str) -> None:
    assert link({"host": host}) == ""
    assert link({}) == ""
    forwarded = link({"x-forwarded-host": host}, trusted_proxies=("10.0.0.0/8",))
    assert forwarded in ("", "http://a")  # the first of "a,b"


def test_forwarded_headers_count_from_trusted_proxies_only() -> None:
    headers = {
        "host": "inner:30000",
        "x-forwarded-host": "b.example.com, other",
        "x-forwarded-proto": "HTTPS",
    }
    assert link(headers) == "http://inner:30000"
    for proxies in (("10.1.2.3",), ("192.168.0.0/16", "10.0.0.0/8")):
        assert link(headers, trusted_proxies=proxies) == "https://b.example.com"
        found = link(headers, client="11.1.2.3", trusted_proxies=proxies)
        assert found == "http://inner:30000"
    odd = headers | {"x-forwarded-proto": "javascript"}
    assert link(odd, trusted_proxies=("10.1.2.3",)) == ""


@pytest.mark.parametrize("value", ["proxy", "10.0.0.1/8", "10.0.0.0/40", "", 7])
def test_what_is_no_network_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="trusted_proxies"):
        OfflineBatchConfig(trusted_proxies=(value,))


def test_an_answer_that_is_repeated_names_the_host_of_its_own_call(
    tmp_path: Path,
) -> None:
    path = "/v1/messages/batches"
    params = {"model": "demo", "max_tokens": 1, "messages": []}
    body = {"requests": [{"custom_id": "twice", "params": params}]}
    with serving(tmp_path) as server:
        made = server.http.post(path, json=body).json()
        while made["processing_status"] != "ended":
            made = server.http.get(f"{path}/{made['id']}").json()
        # A client that got no answer calls again, with a key, when the batch has ended.
        again = {"x-stainless-retry-count": "1", "idempotency-key": "key"}
        for host in ("first.example", "second.example"):
            shown = server.http.post(path, json=body, headers=again | {"host": host})
            url = f"http://{host}{path}/{made['id']}/results"
            assert shown.json()["results_url"] == url
    assert shown.headers["idempotency-replayed"] == "true"
