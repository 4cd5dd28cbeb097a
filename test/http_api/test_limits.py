"""What a hostile client can make the server keep: space is reserved, bodies are bounded."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builders import CHAT, make_line
from prometheus_client import CollectorRegistry, make_asgi_app
from route_server import Server, error_of, serving
from starlette.routing import Mount

from sglang_batch.server.http import message_batch_routes, parameters
from sglang_batch.store import incoming

MB = 1 << 20
FORM = {"content-type": "multipart/form-data; boundary=b"}
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nevals\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
NEW_UPLOAD: dict[str, Any] = {"filename": "x", "mime_type": "x", "purpose": "evals"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps 20 MB, and one that receives 2 bodies at a time."""
    config: dict[str, Any] = {"storage_bytes": 20 * MB, "max_uploads": 2}
    with serving(tmp_path_factory.mktemp("limits"), **config) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_left(server: Server) -> Iterator[None]:
    yield
    for file in server.client.files.list():
        server.client.files.delete(file.id)
    assert list(server.service.store.incoming.iterdir()) == []
    assert server.service.store.bytes_stored() == 0
    assert not server.service.num_receiving


class Call:
    """A call over plain ASGI, whose body is sent piece by piece."""

    def __init__(self, server: Server, path: str, headers: dict[str, str]) -> None:
        self.num_read = 0
        self.status = 0
        self.answer = b""
        self.headers: dict[str, str] = {}
        self._server = server
        self._pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("testserver", 80),
        }

    def send(self, piece: bytes, more: bool = True) -> None:
        self._pieces.put_nowait((piece, more))

    async def run(self) -> dict[str, Any]:
        """The answer's body, or nothing if the call gets none."""
        await self._server.http.app(self._scope, self._receive, self._send)
        found: dict[str, Any] = json.loads(self.answer)
        return found

    async def _receive(self) -> dict[str, Any]:
        piece, more = await self._pieces.get()
        self.num_read += len(piece)
        return {"type": "http.request", "body": piece, "more_body": more}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        self.answer += message.get("body", b"")


def upload(server: Server, num_bytes: int) -> Any:
    form: dict[str, Any] = {"data": {"purpose": "evals"}}
    return server.http.post(
        "/v1/files", files={"file": ("x", b"x" * num_bytes)}, **form
    )


def most_on_disk(server: Server, work: Any) -> int:
    """The most bytes that the store's directories had while something was done."""
    over, most = threading.Event(), 0

    def watch() -> None:
        nonlocal most
        store = server.service.store
        while not over.is_set():
            # A file that is moved between two folders meanwhile is seen in both.
            sizes: dict[int, int] = {}
            for name in ("incoming", "files", "uploads"):
                for path in (store.directory / name).rglob("*"):
                    try:
                        found = path.stat()
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(found.st_mode):
                        sizes[found.st_ino] = found.st_blocks * 512
            most = max(most, sum(sizes.values()))
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    return most


@pytest.mark.parametrize("path", ["/v1/files", "/v1/messages/batches"])
def test_a_body_that_announces_too_much_is_refused_before_it_is_read(
    server: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_batch.server.http.all_routes.DRAIN_S", 0.01)

    async def call() -> tuple[Call, dict[str, Any]]:
        made = Call(server, path, FORM | {"content-length": str(30 * MB)})
        return made, await made.run()

    made, body = server.call(call)
    assert (made.status, made.num_read) == (413, 0)
    assert "storage_bytes" in body["error"]["message"]
    assert made.headers["connection"] == "close"


def test_a_body_of_unknown_size_stops_at_the_limit(server: Server) -> None:
    def pieces() -> Iterator[bytes]:
        yield PURPOSE + FILE
        for _ in range(60):
            yield b"x" * MB
        yield b"\r\n--b--\r\n"

    answers: list[Any] = []

    def send() -> None:
        answers.append(server.http.post("/v1/files", content=pieces(), headers=FORM))

    assert most_on_disk(server, send) <= 21 * MB
    assert answers[0].status_code == 413
    assert error_of(answers[0])["code"] == "storage_full"


def test_uploads_at_the_same_time_are_counted_together(server: Server) -> None:
    statuses: list[int] = []

    def send() -> None:
        with ThreadPoolExecutor(2) as pool:
            for answer in pool.map(lambda _: upload(server, 12 * MB), range(2)):
                statuses.append(answer.status_code)

    assert most_on_disk(server, send) <= 21 * MB
    assert sorted(statuses) == [200, 413]


def test_reserved_space_is_refused_to_others_and_returned(server: Server) -> None:
    with server.service.room.receive(15 * MB):
        answer = upload(server, 6 * MB)
        assert answer.status_code == 413
        assert f"{15 * MB} of the {20 * MB} bytes" in error_of(answer)["message"]
    assert upload(server, 6 * MB).status_code == 200


@pytest.mark.parametrize(
    ("path", "begin"),
    [("/v1/files", PURPOSE + FILE), ("/v1/messages/batches", b'{"requests": [')],
)
def test_a_slow_body_keeps_little_space_from_others(
    server: Server, path: str, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_batch.server.http.all_routes.DRAIN_S", 0.01)
    call = Call(server, path, FORM | {"content-length": str(19 * MB)})

    async def begin_slowly() -> asyncio.Task[Any]:
        running = asyncio.create_task(call.run())
        call.send(begin + b" " * 2 * MB)
        while not any(path.stat().st_size for path in incoming_files(server)):
            await asyncio.sleep(0.002)
        return running

    async def end() -> None:
        call.send(b"", False)
        await running

    running = server.call(begin_slowly)
    assert upload(server, 3 * MB).status_code == 200
    server.call(end)
    assert call.status == 400


def incoming_files(server: Server) -> list[Path]:
    return list(server.service.store.incoming.iterdir())


def test_joining_parts_needs_room_for_the_copy(server: Server) -> None:
    uploads = server.client.uploads
    begun = uploads.create(bytes=11 * MB, **NEW_UPLOAD)
    part = uploads.parts.create(begun.id, data=b"x" * 11 * MB)
    body = {"part_ids": [part.id]}
    answer = server.http.post(f"/v1/uploads/{begun.id}/complete", json=body)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "storage_full")
    assert uploads.cancel(begun.id).status == "cancelled"


def test_uploads_leave_the_disk_some_room(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = (1 << 30) + 5 * MB

    monkeypatch.setattr(incoming.shutil, "disk_usage", lambda _: Usage)
    assert upload(server, 4 * MB).status_code == 200
    with server.service.room.receive(3 * MB):
        answer = upload(server, 4 * MB)
    assert answer.status_code == 507
    error = error_of(answer)
    assert error["code"] == "disk_full"
    assert "min_free_bytes" in error["message"]
    assert "DELETE /v1/files" in error["message"]


@pytest.mark.parametrize(
    "path",
    ["/v1/batches", "/v1/uploads", "/v1/uploads/upload_1/complete", "/v1/files/x"],
)
@pytest.mark.parametrize("announced", [True, False])
def test_json_bodies_have_a_limit(server: Server, path: str, announced: bool) -> None:
    data = b'{"metadata": "' + b"x" * 2 * MB + b'"}'
    content: Any = data if announced else iter([data[:MB], data[MB:]])
    answer = server.http.post(path, content=content)
    assert answer.status_code == (405 if "/files" in path else 413)
    if "/files" not in path:
        assert str(parameters.MAX_JSON_BYTES) in error_of(answer)["message"]


def test_waves_and_message_batches_have_limits_of_their_own(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_batch.server.http import job_routes

    monkeypatch.setattr(job_routes, "MAX_WAVE_BYTES", 100)
    answer = server.http.post("/offline_batch/wave", content=b" " * 101)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    monkeypatch.setattr(message_batch_routes.messages, "MAX_BYTES", 100)
    answer = server.http.post("/v1/messages/batches", content=b" " * 101)
    assert answer.status_code == 413
    assert "at most 100 bytes" in answer.json()["error"]["message"]


FIELD = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'


@pytest.mark.parametrize(
    "parts",
    [
        b"".join(FIELD % (b"f%d" % i, b"") for i in range(10_000)),
        b"".join(FIELD % (b"n%d" % i * 300, b"") for i in range(99)) * 2,
        FIELD % (b"a", b"x" * 300_000),
        FILE.replace(b'"file"', b'"other"') + b"x" * 300_000 + b"\r\n",
        FIELD % (b"n" * 4000, b"") * 99,
        b"--b\r\n" + b"X: " + b"y" * 300_000,
    ],
    ids=["many", "names", "value", "other file", "long names", "header"],
)
def test_forms_have_limits(server: Server, parts: bytes) -> None:
    content = parts + PURPOSE + FILE + b"x\r\n--b--\r\n"
    answer = server.http.post("/v1/files", content=content, headers=FORM)
    assert answer.status_code == 400
    error_of(answer)


def test_what_follows_a_form_has_a_limit(server: Server) -> None:
    content = PURPOSE + FILE + b"x\r\n--b--\r\n" + b"x" * 2 * MB
    answer = server.http.post("/v1/files", content=content, headers=FORM)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "form_too_large")
    assert str(parameters.MAX_FIELD_BYTES) in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("path", "key", "most"),
    [
        ("/v1/uploads", "mime_type", 255),
        ("/v1/uploads", "filename", 1024),
        ("/v1/batches", "input_file_id", 256),
        ("/v1/batches", "completion_window", 256),
    ],
)
def test_strings_have_limits(server: Server, path: str, key: str, most: int) -> None:
    fields: dict[str, Any] = {"bytes": 1, **NEW_UPLOAD}
    fields |= {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"}
    answer = server.http.post(path, json={**fields, key: "x" * (most + 1)})
    assert (answer.status_code, error_of(answer)["param"]) == (400, key)
    assert str(most) in error_of(answer)["message"]
    assert len(answer.content) < 400


@pytest.mark.parametrize("where", ["endpoint", "completion_window", "metadata"])
def test_errors_quote_little_of_a_long_value(server: Server, where: str) -> None:
    long: Any = "x" * 900_000
    fields = {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"}
    fields[where] = {long: 1} if where == "metadata" else long
    answer = server.http.post("/v1/batches", json=fields)
    assert answer.status_code == 400
    assert len(answer.content) < 1000


def test_a_client_sends_a_limited_number_of_bodies_at_a_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "PATIENCE_S", 0.1)
    chunked = FORM | {"transfer-encoding": "chunked"}

    async def call() -> list[Call]:
        calls = [Call(server, "/v1/files", chunked) for _ in range(3)]
        tasks = []
        for each in calls:
            each.send(PURPOSE)
            tasks.append(asyncio.create_task(each.run()))
            await asyncio.sleep(0.01)
        calls[2].send(b"", False)
        await asyncio.wait({tasks[2]})
        for each in calls[:2]:
            each.send(FILE + b"x\r\n--b--\r\n", False)
        await asyncio.wait(tasks)
        return calls

    calls = server.call(call)
    assert [each.status for each in calls] == [200, 200, 429]
    assert 1 <= int(calls[2].headers["retry-after"]) <= 8
    assert json.loads(calls[2].answer)["error"]["code"] == "too_many_uploads"


@pytest.mark.parametrize("most", [4096, 100])
def test_bodies_at_once_wait_for_their_turn(
    server: Server, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(parameters, "MAX_WAITING", most)

    async def call() -> list[Call]:
        calls = [Call(server, "/v1/files", FORM) for _ in range(300)]
        for each in calls:
            each.send(PURPOSE + FILE + b"x\r\n--b--\r\n", False)
        async with asyncio.TaskGroup() as tasks:
            for each in calls:
                tasks.create_task(each.run())
        return calls

    calls = server.call(call)
    refused = [each for each in calls if each.status == 429]
    assert len(refused) == max(0, 300 - 2 - most)
    assert {each.status for each in calls} <= {200, 429}
    # Those that are refused do not all come again at the same time.
    moments = {each.headers["retry-after"] for each in refused}
    assert len(moments) > 3 or not refused


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/messages/batches"])
@pytest.mark.parametrize("pause_s", [0.01, None])
def test_a_body_that_stalls_or_drips_times_out(
    tmp_path: Path, path: str, pause_s: float | None
) -> None:
    with serving(tmp_path, upload_timeout_s=0.1) as server:

        async def call() -> Call:
            made = Call(server, path, FORM | {"content-length": "1000"})
            made.send(b"-")

            async def drip() -> None:
                while pause_s is not None:
                    await asyncio.sleep(pause_s)
                    made.send(b"-")

            dripping = asyncio.create_task(drip())
            await asyncio.wait_for(made.run(), 5)
            dripping.cancel()
            return made

        made = server.call(call)
        assert made.status == 408
        assert b"upload_timeout_s" in made.answer
        assert list(server.service.store.incoming.iterdir()) == []


@pytest.mark.parametrize("size", ["-1", "1e3", "x", "", "9" * 400, "\u0661", "1, 1"])
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/messages/batches"])
def test_odd_content_lengths_are_no_server_error(
    server: Server, path: str, size: str
) -> None:
    async def call() -> int:
        made = Call(server, path, FORM | {"content-length": size})
        made.send(b"{}", False)
        await made.run()
        return made.status

    assert 400 <= server.call(call) < 500


@pytest.mark.parametrize("name", ["content-encoding", "x-body-compressed"])
def test_compressed_bodies_are_refused(server: Server, name: str) -> None:
    answer = server.http.post("/v1/batches", content=b"x", headers={name: "gzip"})
    assert (answer.status_code, error_of(answer)["code"]) == (
        415,
        "unsupported_encoding",
    )


def test_a_search_has_a_limit(server: Server) -> None:
    for length, status_code in ((200, 200), (201, 400), (60_000, 400)):
        answer = server.http.get(f"/batches/data?search={'x' * length}")
        assert answer.status_code == status_code


def test_a_batch_that_is_over_can_be_deleted(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        batch = server.ended(server.start(make_line("a"), make_line("fails")))
        assert server.http.delete(f"/v1/batches/{batch.id}").json() == {
            "id": batch.id,
            "object": "batch",
            "deleted": True,
        }
        for path in (
            f"/v1/batches/{batch.id}",
            f"/v1/files/{batch.output_file_id}",
            f"/v1/files/{batch.error_file_id}/content",
        ):
            assert server.http.get(path).status_code == 404
        assert server.http.get(f"/v1/files/{batch.input_file_id}").status_code == 200
        server.engine.hold(["b"])
        running = server.start(make_line("b"))
        answer = server.http.delete(f"/v1/batches/{running.id}")
        assert answer.status_code == 409
        assert "Cancel it" in error_of(answer)["message"]
        server.client.batches.cancel(running.id)


@pytest.mark.parametrize("window", ["\u0662\u0664h", "24\uff48", "\u00b2h", "1\u0660m"])
def test_windows_of_other_digits_are_refused(server: Server, window: str) -> None:
    body = {"input_file_id": "x", "endpoint": CHAT, "completion_window": window}
    answer = server.http.post("/v1/batches", json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "completion_window")


@pytest.mark.parametrize("is_open", [False, True])
def test_metrics_take_a_key_when_there_are_keys(tmp_path: Path, is_open: bool) -> None:
    keys = {b"k": "ann", b"r": "root"}
    with serving(tmp_path, keys, api_key="r", open_metrics=is_open) as server:
        # As SGLang adds it while it starts.
        route = Mount("/metrics", make_asgi_app(CollectorRegistry()))
        route.path_regex = re.compile("^/metrics(?P<path>.*)$")
        app: Any = server.http.app
        app.routes.append(route)

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return server.http.get("/metrics", headers=headers).status_code

        assert [status(key) for key in ("r", "k", "none")] == (
            [200, 200, 200] if is_open else [200, 403, 401]
        )
