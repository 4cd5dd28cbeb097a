"""The page /batches: its files and its data."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from time import time
from typing import Any

import pytest
from builders import CHAT, MODEL, ids_of, make_lines
from route_server import Server, serving

from sglang_batch.job.engine import KvUse
from sglang_batch.scheduling.running_tree import TreeNow
from sglang_batch.server.http import page_routes as page_module

EVIL = "<script>alert(1)</script>"
FILES = resources.files("sglang_batch.server.http").joinpath("page")


def data_of(server: Server, key: str = "", **params: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = server.http.get("/batches/data", params=params, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.parametrize("path", list(page_module.FILES))
def test_files_of_the_page_are_served_with_a_strict_policy(
    bare_server: Server, path: str
) -> None:
    answer = bare_server.http.get(path)
    name, media_type = page_module.FILES[path]
    assert answer.content == FILES.joinpath(name).read_bytes()
    assert answer.headers["content-type"].startswith(media_type)
    policy = answer.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    allowed = {source for rule in policy for source in rule.split()[1:]}
    assert allowed == {"'none'", "'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_refers_to_nothing_but_its_own_files() -> None:
    html = FILES.joinpath("index.html").read_text()
    links = re.findall(r'(?:src|href)="([^"#]*)"', html)
    served = {path.lstrip("/") for path in page_module.FILES}
    assert set(links) <= served
    assert "style=" not in html and "onclick" not in html
    kept = {name for name, _ in page_module.FILES.values()}
    assert kept == {file.name for file in FILES.iterdir()}
    for name in kept:
        text = FILES.joinpath(name).read_text()
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}
        # What clients send becomes text, never HTML.
        assert not re.search(r"innerHTML\s*=[^=]|insertAdjacentHTML|outerHTML", text)


def test_the_page_is_there_without_a_key_and_its_data_is_not(tmp_path: Path) -> None:
    with serving(tmp_path, {b"key": "ann"}) as server:
        for path in page_module.FILES:
            assert server.http.get(path).status_code == 200, path
            assert server.http.post(path).status_code == 401, path
        for path in ("/batches/data", "/batches/other", "/batches/", "/v1/batches"):
            assert server.http.get(path).status_code == 401, path
        authorized = {"Authorization": "Bearer key"}
        answer = server.http.get("/batches/data", headers=authorized)
        assert answer.json()["batches"] == []


def test_callers_see_only_their_own(tmp_path: Path) -> None:
    with serving(tmp_path, {b"key-a": "ann", b"key-b": "ben"}) as server:
        for key in ("key-a", "key-b"):
            client = server.client_of(key)
            data = "".join(f"{line}\n" for line in make_lines(1)).encode()
            file = client.files.create(file=(f"{key}.jsonl", data), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            (shown,) = data_of(server, key)["batches"]
            assert (shown["id"], shown["input_filename"]) == (batch.id, f"{key}.jsonl")


def test_a_batch_has_what_its_row_shows(server: Server) -> None:
    server.engine.hold(ids_of(range(1, 4)))
    batch = server.start(*make_lines(4), metadata={"team": EVIL})
    server.call(server.engine.until_stalled, 1, 3)
    while not (shown := data_of(server)["batches"][0])["request_counts"]["completed"]:
        pass
    assert shown["id"] == batch.id
    assert shown["status"] == "in_progress"
    assert shown["endpoint"] == CHAT
    assert shown["metadata"] == {"team": EVIL}
    assert shown["input_filename"] == "in.jsonl"
    assert shown["request_counts"] == {"total": 4, "completed": 1, "failed": 0}
    assert (shown["errors"], shown["num_errors"]) == ([], 0)
    assert shown["error_reasons"] == []
    assert shown["path"] == f"v1/batches/{batch.id}"
    assert shown["downloads"] == {"so_far": f"v1/batches/{batch.id}/results"}
    server.call(server.engine.release)
    server.ended(batch)
    ended = data_of(server)["batches"][0]
    assert list(ended["downloads"]) == ["output"]
    assert server.http.get(f"/{ended['downloads']['output']}").status_code == 200


def test_errors_by_kind_and_of_the_file(server: Server) -> None:
    batch = server.ended(server.start("not json", EVIL, *make_lines(1)))
    assert batch.status == "failed"
    server.service.store.update_batch(
        batch.id, error_reasons=json.dumps([{"code": EVIL, "message": "", "lines": 2}])
    )
    (shown,) = data_of(server)["batches"]
    assert shown["num_errors"] == len(shown["errors"]) == 2
    assert shown["errors"][0]["line"] == 1
    assert shown["error_reasons"] == [{"code": EVIL, "message": "", "lines": 2}]


def test_errors_are_grouped_by_reason_while_the_batch_runs(server: Server) -> None:
    server.engine.hold(["r3"])
    for i in range(3):
        message = f"{EVIL}: the prompt 'p{i}' has {1000 * i} tokens"
        server.engine.fail_line(f"r{i}", 400, "too_long", message)
    batch = server.start(*make_lines(4))
    server.call(server.engine.until_stalled, 3, 1)
    while data_of(server)["batches"][0]["request_counts"]["failed"] < 3:
        pass
    (shown,) = data_of(server)["batches"]
    assert shown["status"] == "in_progress"
    message = f"{EVIL}: the prompt 'p0' has 0 tokens"
    assert shown["error_reasons"] == [
        {"code": "too_long", "message": message, "lines": 3}
    ]
    server.call(server.engine.release)
    server.ended(batch)


def test_search_finds_older_batches_and_only_the_callers(tmp_path: Path) -> None:
    with serving(tmp_path, {b"key-a": "ann", b"key-b": "ben"}) as server:
        for number in range(page_module.MAX_BATCHES + 2):
            server.service.store.insert(
                "batches",
                {
                    "id": f"batch_{number}",
                    "status": "completed",
                    "endpoint": CHAT,
                    "input_file_id": "file-1",
                    "completion_window": "24h",
                    "created_at": 0,
                    "expires_at": 1,
                    "owner": "ben" if number == 1 else "ann",
                    "metadata": json.dumps({"100%": "é_"}) if number < 2 else None,
                },
            )

        def found(key: str, text: str) -> list[str]:
            shown = data_of(server, key, search=text)["batches"]
            return [batch["id"] for batch in shown]

        assert "batch_0" not in found("key-a", "")
        for text in ("batch_0", "100%", "É_".lower(), " 100% "):
            assert found("key-a", text) == ["batch_0"], text
        assert found("key-b", "100%") == ["batch_1"]
        assert found("key-a", "%%") == found("key-a", "x'; DROP TABLE batches") == []
        assert found("key-a", "BATCH_50") == ["batch_50"]


def test_points_are_sent_once(server: Server) -> None:
    history = server.service.history
    server.engine.kv = KvUse(3, 400, 100, 20, 80, 1000)
    server.engine.hold(["r0"])
    batch = server.start(*make_lines(1))
    server.call(server.engine.until_stalled, 0, 1)
    for sampled_at in (4e9, 4e9 + 5):
        server.call(history.sample, sampled_at)
    after = data_of(server, after=4e9)
    assert abs(after["now"] - time()) < 60
    (point,) = after["points"]
    assert point["time"] == 4e9 + 5
    assert point["kv"]["left"] == 400
    assert point["lines_left"] == 1
    assert [p["time"] for p in data_of(server)["points"]][-2:] == [4e9, 4e9 + 5]
    server.call(server.engine.release)
    server.ended(batch)


def test_a_message_batch_is_called_by_the_name_that_its_client_has(
    server: Server,
) -> None:
    request = {
        "custom_id": "a",
        "params": {
            "model": MODEL,
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "hello"}],
        },
    }
    made = server.http.post("/v1/messages/batches", json={"requests": [request]}).json()
    path = f"/v1/messages/batches/{made['id']}"
    while server.http.get(path).json()["processing_status"] != "ended":
        pass
    (shown,) = data_of(server)["batches"]
    assert shown["id"] == made["id"]
    assert f"/{shown['path']}" == path
    assert shown["metadata"] is None  # ours, not the client's
    assert server.http.get(f"/{shown['downloads']['results']}").status_code == 200


TREE: TreeNow = {
    "jobs": [
        {
            "job": "batch_1",
            "policy": "dfs",
            "priority": 0,
            "waiting": 3,
            "followers": 0,
            "prefixes": 2,
            "in_use_tokens": 64,
            "kept_tokens": 0,
        }
    ],
    "nodes": [
        {
            "job": "batch_1",
            "node": node,
            "parent": node - 1,
            "prefix_tokens": 64 * node,
            "tokens": 64,
            "state": state,
            "pinned": False,
            "running": 2 - node,
            "uses_left": 3,
            "next_use": 0,
            "density": None,
        }
        for node, state in ((1, "kept"), (2, "absent"))
    ],
}


def test_the_tree_of_each_replica_is_listed(server: Server) -> None:
    empty = {"object": "offline_batch.tree", "replicas": []}
    assert server.http.get("/offline_batch/tree").json() == empty
    server.engine.trees = [TREE, TREE]
    found = server.http.get("/offline_batch/tree?limit=1").json()["replicas"]
    assert found == [
        {"replica": number, "jobs": TREE["jobs"], "nodes": TREE["nodes"][:1]}
        for number in (0, 1)
    ]
    for limit in (0, 1001):
        answer = server.http.get(f"/offline_batch/tree?limit={limit}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "limit"


def test_the_tree_is_for_admins(tmp_path: Path) -> None:
    with serving(tmp_path, {b"key-a": "ann"}) as server:
        headers = {"Authorization": "Bearer key-a"}
        answer = server.http.get("/offline_batch/tree", headers=headers)
        assert answer.status_code == 403
        assert not data_of(server, "key-a")["is_admin"]
