"""Uploads in parts over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from builders import make_line
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Upload
from openai.types.uploads import UploadPart
from route_server import Server, error_of

from sglang_batch.batch_api import protocol
from sglang_batch.server.http import openai_routes as uploads_module
from sglang_batch.store import incoming as store_module
from sglang_batch.store.incoming import UploadStore

NEW = {
    "bytes": 6,
    "filename": "in.jsonl",
    "mime_type": "application/jsonl",
    "purpose": "batch",
}


def begin(server: Server, num_bytes: int = 6, **fields: Any) -> Upload:
    return server.client.uploads.create(**{**NEW, "bytes": num_bytes, **fields})


def add(server: Server, upload: Upload, *parts: bytes) -> list[str]:
    return [
        server.client.uploads.parts.create(upload.id, data=data).id for data in parts
    ]


def complete(server: Server, upload: Upload, body: Any) -> Any:
    return server.http.post(f"/v1/uploads/{upload.id}/complete", json=body)


def in_store(server: Server) -> list[str]:
    """The paths of all files in the store except its database."""
    root = server.service.store.directory
    names = ("files", "uploads", "incoming")
    return [str(p.relative_to(root)) for name in names for p in root.glob(f"{name}/*")]


def test_three_parts_become_one_file(server: Server) -> None:
    upload = begin(server)
    assert (upload.object, upload.status, upload.file) == ("upload", "pending", None)
    assert upload.expires_at == upload.created_at + 3600
    assert set(server.http.post("/v1/uploads", json=NEW).json()) == set(
        Upload.model_fields
    )
    part = server.client.uploads.parts.create(upload.id, data=b"ab")
    assert (part.object, part.upload_id) == ("upload.part", upload.id)
    assert set(part.model_dump()) == set(UploadPart.model_fields)
    ids = [part.id, *add(server, upload, b"cd", b"ef")]
    done = server.client.uploads.complete(
        upload.id, part_ids=ids, md5=hashlib.md5(b"abcdef").hexdigest()
    )
    assert done.status == "completed"
    assert done.file is not None
    assert (done.file.bytes, done.file.purpose) == (6, "batch")
    assert done.file == server.client.files.retrieve(done.file.id)
    assert server.client.files.content(done.file.id).read() == b"abcdef"
    assert in_store(server) == [f"files/{done.file.id}"]


def test_the_clients_own_way_of_uploading_in_chunks(server: Server) -> None:
    data = b"".join(make_line(f"r{i}").encode() + b"\n" for i in range(40))
    upload = server.client.uploads.upload_file_chunked(
        file=data,
        filename="in.jsonl",
        bytes=len(data),
        mime_type="application/jsonl",
        purpose="batch",
        part_size=1000,
    )
    assert upload.file is not None
    batch = server.client.batches.create(
        input_file_id=upload.file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    ended = server.ended(batch)
    assert ended.request_counts is not None
    assert (ended.status, ended.request_counts.completed) == ("completed", 40)


@settings(max_examples=examples(20), deadline=None)
@given(st.data())
def test_parts_are_put_together_in_the_order_that_is_asked_for(
    bare_server: Server, data: st.DataObject
) -> None:
    contents = data.draw(st.lists(st.binary(max_size=5), max_size=5))
    sent = data.draw(st.permutations(range(len(contents))))
    wanted = b"".join(contents)
    upload = begin(bare_server, len(wanted))
    ids = {i: add(bare_server, upload, contents[i])[0] for i in sent}
    part_ids = [ids[i] for i in range(len(contents))]
    done = bare_server.client.uploads.complete(upload.id, part_ids=part_ids)
    assert done.file is not None
    assert bare_server.client.files.content(done.file.id).read() == wanted
    bare_server.client.files.delete(done.file.id)


def test_a_part_that_was_sent_twice_may_be_left_out(server: Server) -> None:
    upload = begin(server)
    _, second, other = add(server, upload, b"abc", b"abc", b"def")
    done = server.client.uploads.complete(upload.id, part_ids=[second, other])
    assert done.file is not None
    assert server.client.files.content(done.file.id).read() == b"abcdef"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"part_ids": ["0", "part_none"]}, "part_ids"),
        ({"part_ids": ["0", "0"]}, "part_ids"),
        ({"part_ids": ["0", "other"]}, "part_ids"),
        ({"part_ids": ["0"]}, "part_ids"),
        ({"part_ids": []}, "part_ids"),
        ({}, "part_ids"),
        ({"part_ids": "0"}, "part_ids"),
        ({"part_ids": [0]}, "part_ids"),
        ({"part_ids": ["0", "1"], "md5": "0" * 32}, "md5"),
        ({"part_ids": ["0", "1"], "md5": 3}, "md5"),
    ],
)
def test_what_the_parts_do_not_make_is_refused_and_can_be_tried_again(
    bare_server: Server, fields: dict[str, Any], param: str
) -> None:
    upload, another = begin(bare_server), begin(bare_server)
    names = dict(
        zip(
            ("0", "1", "other"),
            add(bare_server, upload, b"abc", b"def")
            + add(bare_server, another, b"def"),
            strict=True,
        )
    )
    body = dict(fields)
    if isinstance(body.get("part_ids"), list):
        body["part_ids"] = [names.get(p, p) for p in body["part_ids"]]
    answer = complete(bare_server, upload, body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    whole = [names["0"], names["1"]]
    done = complete(bare_server, upload, {"part_ids": whole}).json()
    assert done["status"] == "completed"
    bare_server.client.files.delete(done["file"]["id"])


@pytest.mark.parametrize("end", ["completed", "cancelled", "expired"])
def test_an_upload_that_ended_takes_nothing_more(
    server: Server, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    upload = begin(server)
    ids = add(server, upload, b"abcdef")
    if end == "completed":
        server.client.uploads.complete(upload.id, part_ids=ids)
    elif end == "cancelled":
        assert server.client.uploads.cancel(upload.id).status == "cancelled"
        assert in_store(server) == []
    else:
        monkeypatch.setattr(store_module, "now", lambda: upload.expires_at)
    path = f"/v1/uploads/{upload.id}"
    calls = {
        "cancelled": server.http.post(f"{path}/cancel"),
        "completed": complete(server, upload, {"part_ids": ids}),
        "": server.http.post(f"{path}/parts", files={"data": ("x", b"abc")}),
    }
    for call, answer in calls.items():
        if call == end:  # the same call again
            assert answer.json()["status"] == end
            continue
        assert answer.status_code == 409
        assert answer.headers["x-should-retry"] == "false"
        assert end in error_of(answer)["message"]


def test_an_upload_that_ends_while_a_part_comes_does_not_get_it(
    server: Server,
) -> None:
    upload = begin(server)
    uploads = UploadStore(server.service.store)
    source = server.service.store.incoming / "part"
    source.write_bytes(b"abc")
    assert uploads.cancel(upload.id)
    assert uploads.add_part(upload.id, "part_1", source, lambda: None) is None
    assert not (uploads.directory(upload.id) / "part_1").exists()


def test_of_calls_that_complete_with_the_same_parts_all_get_one_file(
    server: Server,
) -> None:
    for _ in range(5):
        upload = begin(server)
        body = {"part_ids": add(server, upload, b"abc", b"def")}
        with ThreadPoolExecutor(4) as threads:
            answers = list(
                threads.map(lambda _: complete(server, upload, body), range(4))  # noqa: B023
            )
        assert [a.status_code for a in answers] == [200] * 4
        assert len({a.json()["file"]["id"] for a in answers}) == 1
    assert len(server.client.files.list().data) == 5
    assert len(in_store(server)) == 5  # and nothing of those that lost


def test_a_call_that_another_overtakes_gets_its_file(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other completes the upload just after this one has read its state."""
    upload = begin(server)
    body = {"part_ids": add(server, upload, b"abc", b"def")}
    others: list[Any] = []
    read = UploadStore.get

    def overtaken(self: UploadStore, *which: Any) -> Any:
        row = read(self, *which)
        # Routes read it first on the loop, which must not wait.
        if asyncio._get_running_loop() is None and not others:
            others.append(None)
            others[0] = complete(server, upload, body)
        return row

    monkeypatch.setattr(UploadStore, "get", overtaken)
    answer = complete(server, upload, body)
    answers = [answer, *others]
    assert [each.status_code for each in answers] == [200] * len(answers)
    assert len({each.json()["file"]["id"] for each in answers}) == 1
    assert len(in_store(server)) == 1


def test_a_server_that_dies_while_it_completes_can_do_it_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = begin(server)
    body = {"part_ids": add(server, upload, b"abc", b"def")}

    def die(*_: Any) -> bool:
        raise KeyError

    with monkeypatch.context() as dying:
        dying.setattr(UploadStore, "complete", die)
        assert complete(server, upload, body).status_code == 500
    assert in_store(server) == [f"uploads/{upload.id}"]
    assert complete(server, upload, body).json()["status"] == "completed"


def test_a_part_or_an_upload_that_is_too_large_is_refused(
    bare_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = begin(bare_server)
    monkeypatch.setattr(uploads_module, "MAX_PART_BYTES", 4)
    with pytest.raises(openai.APIStatusError) as raised:
        add(bare_server, upload, b"abcde")
    assert raised.value.status_code == 413
    add(bare_server, upload, b"abcd")
    monkeypatch.setattr(protocol, "MAX_UPLOAD_BYTES", 6)
    with pytest.raises(openai.APIStatusError) as raised:
        add(bare_server, upload, b"abc")
    assert raised.value.status_code == 413
    add(bare_server, upload, b"ab")
    with pytest.raises(openai.APIStatusError) as raised:
        begin(bare_server, 7)
    assert raised.value.status_code == 413
    bare_server.client.uploads.cancel(upload.id)
    assert not [path for path in in_store(bare_server) if upload.id in path]
    assert not [path for path in in_store(bare_server) if "incoming" in path]


def test_an_expiry_is_passed_on_to_the_file(server: Server) -> None:
    upload = begin(server, 0, expires_after={"anchor": "created_at", "seconds": 7200})
    done = server.client.uploads.complete(upload.id, part_ids=[])
    assert done.file is not None
    assert done.file.expires_at is not None
    assert done.file.expires_at - done.file.created_at == 7200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({key: None}, key) for key in NEW),
        ({"bytes": -1}, "bytes"),
        ({"bytes": True}, "bytes"),
        ({"bytes": 1.5}, "bytes"),
        ({"bytes": "6"}, "bytes"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"filename": 7}, "filename"),
        ({"filename": "x" * 2000}, "filename"),
        ({"filename": "in.csv"}, None),
        ({"expires_after": 3600}, "expires_after"),
        ({"expires_after": {"seconds": 3600}}, "expires_after.anchor"),
        (
            {"expires_after": {"anchor": "created_at", "seconds": 1}},
            "expires_after.seconds",
        ),
    ],
)
def test_an_upload_of_wrong_fields_is_refused(
    bare_server: Server, fields: dict[str, Any], param: str | None
) -> None:
    answer = bare_server.http.post("/v1/uploads", json={**NEW, **fields})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_what_is_not_there_is_not_found(bare_server: Server) -> None:
    for path, content in (
        ("cancel", None),
        ("complete", b'{"part_ids": []}'),
        ("parts", b""),
    ):
        answer = bare_server.http.post(f"/v1/uploads/upload_0/{path}", content=content)
        assert answer.status_code == 404
        assert error_of(answer)["param"] == "id"
    upload = begin(bare_server)
    answer = bare_server.http.post(f"/v1/uploads/{upload.id}/parts", data={"data": "x"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "data"


def test_a_part_may_be_sent_as_text(server: Server) -> None:
    upload = begin(server)
    form = (
        b'--b\r\nContent-Disposition: form-data; name="data"\r\n\r\nabcdef\r\n--b--\r\n'
    )
    part = server.http.post(
        f"/v1/uploads/{upload.id}/parts",
        content=form,
        headers={"content-type": "multipart/form-data; boundary=b"},
    )
    done = complete(server, upload, {"part_ids": [part.json()["id"]]}).json()
    assert server.client.files.content(done["file"]["id"]).read() == b"abcdef"
