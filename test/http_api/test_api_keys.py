"""API keys: which clients may call, and which objects each sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from builders import CHAT, make_line
from openai import OpenAI
from route_server import Server, error_of, fixed_keys, serving
from starlette.websockets import WebSocketDisconnect

from sglang_batch.errors import ConfigError
from sglang_batch.server.access.keys import read_api_keys

KEYS = {b"key-a": "ann", b"key-a2": "ann", b"key-b": "bob", b"key-root": "root"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("keyed"), keys=KEYS) as server:
        yield server


# The file of keys ---------------------------------------------------------------


def test_a_file_of_keys_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "# who calls\n\n ann key-a \nbob\tkey-b client\r\n#x y\nann key-a2\n"
        "root key-root admin"
    )
    assert read_api_keys(str(path)) == fixed_keys(KEYS)
    path.write_text(path.read_text(), encoding="utf-8-sig")  # as Windows' editors do
    assert read_api_keys(str(path)) == fixed_keys(KEYS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ann key-a\nbob", "keys:2: "),
        ("ann key-a b", "keys:1: the third word of 'ann' must be client or admin"),
        ("ann key-a client b", "keys:1: .*not 4 words"),
        ("ann key-a\nann key-b admin", "keys:2: 'ann' is both a client and an admin"),
        ("--admin-api-key key-a", "keys:1: .*'--admin-api-key'"),
        ("ann key-a\n\nbob key-a", "keys:3: .*'bob'.*line 1"),
        ("a/b key", "keys:1: .*'a/b'"),
        ("ann k\u00e9y", "keys:1: .*'ann'.*ASCII"),
        (f"ann {'k' * 513}", "keys:1: .*'ann'"),
        ("", "every call would be refused"),
        ("# ann key", "every call would be refused"),
        (None, "cannot read"),
        (b"\xff\xfe", "cannot read"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_by_its_line(
    tmp_path: Path, text: Any, said: str
) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said) as raised:
        read_api_keys(str(path))
    assert "key-a" not in str(raised.value)


# Who may call -------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "key-a"},
        {"authorization": "Basic key-a"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer key"},
        {"authorization": "Bearer key-a key-b"},
        {"authorization": b"Bearer k\xe9y"},
        {"x-api-key": "key"},
        {"x-api-key": "key-a", "authorization": "Bearer key-b"},
        [("authorization", "Bearer key-a"), ("authorization", "Bearer key-b")],
        [("x-api-key", "key-a"), ("x-api-key", "")],
        {"host": "x/health", "authorization": "Bearer no"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches/batch_1", "/nothing"])
def test_a_call_without_a_key_is_refused(
    keyed: Server, path: str, headers: Any
) -> None:
    answer = keyed.http.get(path, headers=headers)
    assert answer.status_code == 401
    assert error_of(answer)["code"] == "invalid_api_key"


def test_a_call_with_a_key_is_let_in(keyed: Server) -> None:
    for value in ("Bearer key-a", "bearer key-b", "Bearer  key-a2 "):
        answer = keyed.http.get("/v1/files", headers={"authorization": value})
        assert answer.status_code == 200
    with pytest.raises(openai.AuthenticationError):
        keyed.client.files.list()


def test_both_headers_are_taken_and_messages_are_refused_in_their_own_shape(
    keyed: Server,
) -> None:
    path = "/v1/messages/batches"
    for headers in ({"x-api-key": "key-a"}, {"authorization": "Bearer key-a"}):
        assert keyed.http.get(path, headers=headers).status_code == 200
        assert keyed.http.get("/v1/files", headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "no"}):
        answer = keyed.http.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "authentication_error"


def test_a_server_without_keys_lets_everybody_in(bare_server: Server) -> None:
    assert bare_server.http.get("/v1/files").status_code == 200


# What each sees -----------------------------------------------------------------


def make_batch(client: OpenAI, file_id: str) -> str:
    return client.batches.create(
        input_file_id=file_id, endpoint=CHAT, completion_window="24h"
    ).id


def ended(client: OpenAI, batch_id: str) -> Any:
    while (batch := client.batches.retrieve(batch_id)).status in (
        "validating",
        "in_progress",
        "finalizing",
    ):
        pass
    return batch


def test_others_see_nothing_of_a_clients(keyed: Server) -> None:
    ann, bob = keyed.client_of("key-a"), keyed.client_of("key-b")
    file = ann.files.create(file=("in.jsonl", make_line().encode()), purpose="batch")
    batch = ended(ann, make_batch(ann, file.id))
    assert batch.status == "completed"
    begun = ann.uploads.create(
        bytes=0, filename="x", mime_type="x", purpose="user_data"
    )
    assert {f.id for f in ann.files.list()} == {file.id, batch.output_file_id}
    assert [b.id for b in ann.batches.list()] == [batch.id]
    assert [*bob.files.list(), *bob.batches.list()] == []
    calls: list[Callable[[], Any]] = [
        lambda: bob.files.retrieve(file.id),
        lambda: bob.files.content(file.id),
        lambda: bob.files.content(batch.output_file_id),
        lambda: bob.files.delete(file.id),
        lambda: bob.files.list(after=file.id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.list(after=batch.id),
        lambda: bob.get(f"/batches/{batch.id}/results", cast_to=object),
        lambda: bob.uploads.cancel(begun.id),
        lambda: bob.uploads.complete(begun.id, part_ids=[]),
        lambda: bob.uploads.parts.create(begun.id, data=b"x"),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call()
    [error] = ended(bob, make_batch(bob, file.id)).errors.data
    assert error.message.startswith("Cannot find file")
    # The same client, with another of its keys.
    assert keyed.client_of("key-a2").files.content(file.id).read()
    assert ann.uploads.complete(begun.id, part_ids=[]).file is not None


def test_two_clients_may_use_the_same_idempotency_key(keyed: Server) -> None:
    made = [
        keyed.client_of(key).files.create(
            file=("x", b"x"),
            purpose="user_data",
            extra_headers={"Idempotency-Key": "1"},
        )
        for key in ("key-a", "key-b", "key-a2")
    ]
    assert made[0].id == made[2].id != made[1].id


def test_a_websocket_needs_a_key_too(keyed: Server) -> None:
    with (
        pytest.raises(WebSocketDisconnect) as closed,
        keyed.http.websocket_connect("/v1/realtime"),
    ):
        pass
    assert closed.value.code == 1008
