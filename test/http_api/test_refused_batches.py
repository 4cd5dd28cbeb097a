"""What a batch cannot be made of, and how it is said."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
from builders import CHAT, make_line
from route_server import Server, error_of

from sglang_batch.batch_api.protocol import ENDPOINTS
from sglang_batch.job.engine import WAVE_PATH

DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b'{"a": "\xff"}', b'{"a": "\\ud800"}', DEEP]
)
@pytest.mark.parametrize("path", ["/v1/batches", WAVE_PATH])
def test_a_body_that_is_no_json_object_is_refused(
    bare_server: Server, path: str, body: bytes
) -> None:
    answer = bare_server.http.post(path, content=body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["param"], error["code"]) == (None, None)


CREATE = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}


def refused(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    """The error for a batch with these fields, which must not be created."""
    answer = server.http.post("/v1/batches", json=fields)
    assert answer.status_code == 400
    assert server.http.get("/v1/batches").json()["data"] == []
    return error_of(answer)


@pytest.mark.parametrize("key", CREATE)
@pytest.mark.parametrize("null", [False, True])
def test_a_missing_key_is_named(bare_server: Server, key: str, null: bool) -> None:
    fields: dict[str, Any] = {k: v for k, v in CREATE.items() if k != key}
    assert refused(bare_server, {**fields, key: None} if null else fields) == {
        "message": f"Missing required parameter: '{key}'.",
        "type": "invalid_request_error",
        "param": key,
        "code": "missing_required_parameter",
    }


@pytest.mark.parametrize("key", CREATE)
@pytest.mark.parametrize("value", [1, [], {}, True])
def test_a_key_of_another_type_is_named(
    bare_server: Server, key: str, value: Any
) -> None:
    error = refused(bare_server, {**CREATE, key: value})
    assert (error["param"], error["code"]) == (key, "invalid_type")


def test_an_endpoint_that_is_not_known_is_named_with_those_that_are(
    bare_server: Server,
) -> None:
    supported = ", ".join(f"'{url}'" for url in ENDPOINTS)
    assert refused(bare_server, {**CREATE, "endpoint": "/v1/magic"}) == {
        "message": f"Invalid value: '/v1/magic'. Supported values are: {supported}.",
        "type": "invalid_request_error",
        "param": "endpoint",
        "code": "invalid_value",
    }


@pytest.mark.parametrize(
    "window",
    ["", "soon", "24", "h", "0s", "-1h", "1.5h", "24H", "367d", "9" * 99 + "s"],
)
def test_a_window_that_is_no_duration_is_refused(
    bare_server: Server, window: str
) -> None:
    error = refused(bare_server, {**CREATE, "completion_window": window})
    assert (error["param"], error["code"]) == ("completion_window", "invalid_value")
    assert f"'{window}'" in error["message"]


@pytest.mark.parametrize(
    ("window", "seconds"),
    [("24h", 86_400), ("45s", 45), ("1h30m", 5400), ("7d", 604_800)],
)
def test_a_batch_may_have_any_window(server: Server, window: str, seconds: int) -> None:
    batch = server.start(completion_window=window)
    assert batch.completion_window == window
    assert batch.expires_at == batch.created_at + seconds


@pytest.mark.parametrize(
    ("metadata", "param", "code"),
    [
        ("text", "metadata", "invalid_type"),
        (["a"], "metadata", "invalid_type"),
        ({f"k{i}": "v" for i in range(17)}, "metadata", "invalid_value"),
        ({"k" * 65: "v"}, f"metadata.{'k' * 65}", "invalid_value"),
        ({"k": "v" * 513}, "metadata.k", "invalid_value"),
        ({"k": 1}, "metadata.k", "invalid_type"),
        ({"k": None}, "metadata.k", "invalid_type"),
        ({"tags": {"a": "b"}}, "metadata.tags", "invalid_type"),
    ],
)
def test_metadata_that_cannot_be_kept_is_named(
    bare_server: Server, metadata: Any, param: str, code: str
) -> None:
    error = refused(bare_server, {**CREATE, "metadata": metadata})
    assert (error["param"], error["code"]) == (param, code)


def test_metadata_of_a_wrong_type_is_refused_in_openais_words(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        server.start(metadata={"tags": ["a"]})
    error = raised.value
    assert (error.param, error.code) == ("metadata.tags", "invalid_type")
    assert isinstance(error.body, dict)
    assert error.body["message"] == (
        "Invalid type for 'metadata.tags': expected a string, but got an array instead."
    )


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"k" * 64: "v" * 512}, {f"k{i}": "" for i in range(16)}, {"\u00e9": "\u2028"}],
)  # fmt: skip
def test_metadata_within_the_limits_comes_back(server: Server, metadata: Any) -> None:
    batch = server.start(metadata=metadata)
    assert server.client.batches.retrieve(batch.id).metadata == metadata


def test_a_file_of_another_purpose_is_refused(server: Server) -> None:
    file_id = server.upload(purpose="user_data")
    error = refused(server, {**CREATE, "input_file_id": file_id})
    assert error["param"] == "input_file_id"
    assert "'user_data'" in error["message"]


def test_keys_that_are_not_known_are_ignored(server: Server) -> None:
    batch = server.start(extra_body={"colour": "red"})
    assert server.ended(batch).status == "completed"


@pytest.mark.parametrize("priority", [None, 0, 5, -1000, 1000])
def test_a_batch_may_have_a_priority(server: Server, priority: int | None) -> None:
    batch = server.start(extra_body={"priority": priority})
    shown = server.http.get(f"/v1/batches/{batch.id}").json()
    assert shown.get("priority") == (priority or None)  # of most there is no such key
    row = server.service.store.get_batch(batch.id)
    assert row is not None
    assert row["priority"] == (priority or 0)


@pytest.mark.parametrize("priority", [1001, -1001, "5", 1.0, True, [], {}, 1 << 70])
def test_a_priority_out_of_range_is_refused(bare_server: Server, priority: Any) -> None:
    error = refused(bare_server, {**CREATE, "priority": priority})
    assert (error["param"], error["code"]) == ("priority", "invalid_value")


def test_a_batch_may_say_how_long_its_results_are_kept(server: Server) -> None:
    kept = {"anchor": "created_at", "seconds": 3600}
    batch = server.ended(server.start(output_expires_after=kept))
    row = server.service.store.get_batch(batch.id)
    assert row is not None
    assert row["output_expires_after"] == 3600
    assert batch.output_file_id is not None
    file = server.client.files.retrieve(batch.output_file_id)
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 3600


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("3600", "output_expires_after"),
        ([], "output_expires_after"),
        ({}, "output_expires_after.anchor"),
        ({"anchor": "now", "seconds": 3600}, "output_expires_after.anchor"),
        ({"anchor": "created_at"}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 3599}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 2592001}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": "3600"}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": True}, "output_expires_after.seconds"),
    ],
)
def test_an_expiry_of_results_out_of_range_is_refused(
    bare_server: Server, value: Any, param: str
) -> None:
    error = refused(bare_server, {**CREATE, "output_expires_after": value})
    assert error["param"] == param


def test_why_a_batch_is_paused_is_shown(server: Server) -> None:
    server.engine.hold(["a"])
    batch = server.start(make_line("a"))
    while "a" not in server.engine.running:
        time.sleep(0.002)
    server.service.store.pause(batch.id, "outside its hours", ("in_progress",))
    shown = server.http.get(f"/v1/batches/{batch.id}").json()
    assert shown["paused_reason"] == "outside its hours"


def test_an_error_nobody_expected_has_the_same_body(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("disk I/O error")

    monkeypatch.setattr(server.service.store, "get_batch", broken)
    answer = server.http.get("/v1/batches/batch_1")
    assert answer.status_code == 500
    assert "disk" not in error_of(answer)["message"]  # that is for the log


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET or POST"),
        ("PUT", "/v1/batches/batch_1", "DELETE or GET"),
        ("GET", "/v1/batches/batch_1/cancel", "POST"),
        ("PATCH", "/v1/uploads/upload_1/parts", "POST"),
    ],
)
def test_another_method_is_refused_with_the_same_body(
    bare_server: Server, method: str, path: str, allowed: str
) -> None:
    answer = bare_server.http.request(method, path)
    assert answer.status_code == 405
    assert error_of(answer)["message"] == (
        f"Method {method} is not allowed for {path}. Use {allowed}."
    )
