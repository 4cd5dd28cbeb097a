"""What a server takes: sizes, room, full disks, and how long files are kept."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from route_server import Server, error_of, serving

from sglang_batch.server.http import parameters
from sglang_batch.store import batch_store
from sglang_batch.store.incoming import IncomingFile

DAY = 86_400


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[Server]:
    """One that takes files of 100 bytes, and 250 bytes of them."""
    with serving(tmp_path, max_file_bytes=100, storage_bytes=250) as server:
        yield server


def upload(server: Server, num_bytes: int) -> Any:
    return server.http.post(
        "/v1/files",
        data={"purpose": "user_data"},
        files={"file": ("x", b"x" * num_bytes)},
    )


def left(server: Server) -> list[str]:
    root = server.service.store.directory
    return [p.name for name in ("files", "incoming") for p in root.glob(f"{name}/*")]


def test_a_file_that_is_too_large_is_refused_and_gone(small_server: Server) -> None:
    assert upload(small_server, 100).status_code == 200
    answer = upload(small_server, 101)
    assert answer.status_code == 413
    assert answer.headers["x-should-retry"] == "false"
    error = error_of(answer)
    assert (error["param"], error["code"]) == ("file", "file_too_large")
    assert "100" in error["message"]
    assert len(left(small_server)) == 1
    answer = small_server.http.post(
        "/v1/uploads",
        json={"bytes": 101, "filename": "x", "mime_type": "x", "purpose": "evals"},
    )
    assert answer.status_code == 413


def test_the_rest_of_a_large_file_is_read_but_not_kept(
    small_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    write = IncomingFile.write

    def count(sink: Any, data: bytes) -> None:
        nonlocal written
        write(sink, data)
        if sink.path.exists():
            written = max(written, sink.path.stat().st_size)

    monkeypatch.setattr(IncomingFile, "write", count)
    answer = upload(small_server, 8 << 20)
    assert answer.status_code == 413
    assert written <= 100


def test_a_store_that_is_full_says_so_until_something_is_deleted(
    small_server: Server,
) -> None:
    first = upload(small_server, 100).json()["id"]
    assert upload(small_server, 100).status_code == 200
    answer = upload(small_server, 51)
    assert answer.status_code == 413
    error = error_of(answer)
    assert error["code"] == "storage_full"
    assert "200 of the 250 bytes" in error["message"]
    assert "DELETE /v1/files" in error["message"]
    assert len(left(small_server)) == 2
    assert upload(small_server, 50).status_code == 200
    small_server.client.files.delete(first)
    assert upload(small_server, 100).status_code == 200


def test_parts_of_uploads_take_room_too(small_server: Server) -> None:
    uploads = small_server.client.uploads
    new: Any = {"filename": "x", "mime_type": "x", "purpose": "evals"}
    begun = uploads.create(bytes=100, **new)
    uploads.parts.create(begun.id, data=b"x" * 100)
    uploads.parts.create(begun.id, data=b"x" * 100)
    with pytest.raises(openai.APIStatusError) as raised:
        uploads.parts.create(begun.id, data=b"x" * 51)
    assert (raised.value.status_code, raised.value.code) == (413, "storage_full")
    with pytest.raises(openai.APIStatusError) as raised:
        uploads.create(bytes=51, **new)
    assert raised.value.status_code == 413
    assert small_server.service.store.bytes_stored() == 200
    uploads.cancel(begun.id)
    assert small_server.service.store.bytes_stored() == 0


def test_results_that_are_not_finished_take_room(server: Server) -> None:
    stored = server.service.store.bytes_stored()
    path = server.service.store.work_dir("batch_1")
    path.mkdir()
    (path / "results.jsonl").write_bytes(b"12345")
    assert server.service.store.bytes_stored() == stored + 5


@pytest.mark.parametrize(
    ("code", "status_code", "said"),
    [
        (errno.ENOSPC, 507, "DELETE /v1/files"),
        (errno.EDQUOT, 507, "full"),
        (errno.EROFS, 500, "--offline-batch-dir"),
        (errno.EACCES, 500, "--offline-batch-dir"),
    ],
)
@pytest.mark.parametrize("when", ["begun", "written", "moved"])
def test_a_disk_that_takes_nothing_is_said_and_nothing_half_is_left(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    status_code: int,
    said: str,
    when: str,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    names = {
        "begun": "sglang_batch.store.incoming.tempfile.mkstemp",
        "written": "sglang_batch.store.incoming.os.pwrite",
        "moved": "sglang_batch.server.service.move_into_place",
    }
    with monkeypatch.context() as full:
        full.setattr(names[when], fail, raising=False)
        answer = upload(server, 3 << 20)
    assert answer.status_code == status_code
    assert answer.headers["x-should-retry"] == "false"
    assert said in error_of(answer)["message"]
    assert left(server) == []
    assert upload(server, 10).status_code == 200


def test_a_full_database_is_a_full_disk(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(server.service.store, "record_file", fail)
    assert upload(server, 10).status_code == 507
    assert left(server) == []


def test_an_empty_file_is_taken_and_its_batch_fails(server: Server) -> None:
    file = server.client.files.create(file=("in.jsonl", b""), purpose="batch")
    assert file.bytes == 0
    batch = server.client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    assert server.ended(batch).status == "failed"


@pytest.mark.parametrize(("purpose", "days"), [("batch", 3), ("user_data", None)])
def test_files_of_batches_expire_unless_the_client_says_when(
    tmp_path: Path, purpose: Any, days: int | None
) -> None:
    with serving(tmp_path, file_days=3) as server:
        file = server.client.files.create(file=("a.jsonl", b"x"), purpose=purpose)
        if days is None:
            assert file.expires_at is None
        else:
            assert file.expires_at is not None
            assert file.expires_at - file.created_at == days * DAY


def test_an_expired_file_is_gone_before_it_is_collected(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = server.upload(purpose="evals")
    file = server.client.files.retrieve(server.upload())
    assert file.expires_at is not None
    monkeypatch.setattr(batch_store, "now", lambda: file.expires_at - 1)
    assert server.client.files.retrieve(file.id).id == file.id
    monkeypatch.setattr(batch_store, "now", lambda: file.expires_at)
    assert [f.id for f in server.client.files.list()] == [kept]
    for path in (file.id, f"{file.id}/content"):
        assert server.http.get(f"/v1/files/{path}").status_code == 404
    # A list that has shown it goes on.
    assert server.http.get(f"/v1/files?after={file.id}").status_code == 200
    batch = server.ended(
        server.client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
    )
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert str(batch.errors.data[0].message).startswith("Cannot find file")


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"expires_after[anchor]": "now"}, "expires_after.anchor"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        ({"expires_after[seconds]": "\u0663\u0666\u0660\u0660"}, "expires_after.seconds"),
        ({"expires_after[seconds]": ""}, "expires_after.seconds"),
        ({"expires_after[anchor]": "", "expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ({"expires_after[second]": "3600"}, "expires_after.seconds"),
        ({"expires_after": "3600"}, "expires_after"),
        ({"expires_after": ""}, "expires_after"),
        ({"expires_after": '{"anchor": "created_at", "seconds": 3600}'}, "expires_after"),
        ({"expires_after[seconds]": ["3600", "7200"]}, "expires_after[seconds]"),
        ({"purpose": ["batch", "user_data"]}, "purpose"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_used_is_refused_as_a_whole(
    bare_server: Server, form: dict[str, Any], param: str
) -> None:
    """An ignored lifetime would be found out when the file has gone, or has not."""
    answer = bare_server.http.post(
        "/v1/files", data={"purpose": "batch", **form}, files={"file": ("a", b"x")}
    )
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_a_form_has_one_file_and_may_have_unknown_fields(bare_server: Server) -> None:
    """As the keys of a JSON body, unknown ones are ignored."""
    file = ("file", ("a", b"x"))
    more: dict[str, Any] = {"purpose": "batch", "colour": "red"}
    more["shade"] = ["light", "dark"]
    kept = bare_server.http.post("/v1/files", data=more, files=[file])
    assert (kept.status_code, kept.json()["bytes"]) == (200, 1)
    answer = bare_server.http.post("/v1/files", data=more, files=[file, file])
    assert (answer.status_code, error_of(answer)["param"]) == (400, "file")
    assert left(bare_server) == [kept.json()["id"]]
    bare_server.http.delete(f"/v1/files/{kept.json()['id']}")


def test_a_form_that_is_cut_off_makes_no_file(bare_server: Server) -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nxyz'
    )
    kind = {"content-type": "multipart/form-data; boundary=b"}
    for rest, status_code in ((b"", 400), (b"\r\n--b\r\n", 400)):
        answer = bare_server.http.post("/v1/files", content=body + rest, headers=kind)
        assert answer.status_code == status_code
        assert "ends before" in error_of(answer)["message"]
    assert left(bare_server) == []


def test_fields_that_are_no_files_have_a_limit(
    bare_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "MAX_FIELD_BYTES", 100)
    answer = bare_server.http.post(
        "/v1/files",
        data={"purpose": "batch", "more": "x" * 101},
        files={"file": ("a", b"x"), "file2": ("b", b"y")},
    )
    assert answer.status_code == 400
    assert "100" in error_of(answer)["message"]
    assert left(bare_server) == []
