"""A front and the servers behind it, over HTTP and without SGLang."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_service import running_service
from builders import CHAT, MODEL, make_lines, parse_lines
from fake_engine import FakeEngine
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from route_server import ENDED, error_of, fixed_keys
from threaded_apps import ThreadedApp, threaded

from sglang_batch.fleet.fleet_engine import FleetEngine
from sglang_batch.fleet.http_fleet import HttpPlace
from sglang_batch.server.access.usage import usage_since
from sglang_batch.server.http.all_routes import install
from sglang_batch.server.http.authorization import AccessControl, KeyMiddleware
from sglang_batch.server.http.front_server import OnlineCalls, front_app
from sglang_batch.server.service import BatchService

# Of the servers with engines, and of the front.
KEY = b"key-of-workers"
KEYS = {b"key-root": "root", b"key-ann": "ann"}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 2},
}


class Worker:
    """A server with an engine, and what its online routes were asked."""

    def __init__(self, directory: Path) -> None:
        self.engine = FakeEngine()
        self.calls: list[tuple[dict[str, str], Any]] = []
        self.left = threading.Event()
        app = worker_app(directory, self.engine)
        app.add_api_route("/v1/models", self._models)
        app.add_api_route(CHAT, self._chat, methods=["POST"])
        self.running = ThreadedApp(app)
        self.url = self.running.url

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL}]}

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.calls.append((dict(request.headers), body))
        if body.get("hangs"):
            while not await request.is_disconnected():
                await asyncio.sleep(0.005)
            self.left.set()
        if not body.get("stream"):
            answer = {"by": self.url, "usage": USAGE}
            return Response(json.dumps(answer), media_type="application/json")
        return StreamingResponse(_events(body), media_type="text/event-stream")


async def _events(body: dict[str, Any]) -> AsyncIterator[str]:
    for text in ("one", "two"):
        event = json.dumps({"choices": [{"delta": {"content": text}}]})
        yield f"data: {event[:9]}"  # pieces are not events
        await asyncio.sleep(0.01)
        yield f"{event[9:]}\n\n"
    if (body.get("stream_options") or {}).get("include_usage"):
        yield f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n"
    yield "data: [DONE]\n\n"


@asynccontextmanager
async def _serving(
    app: FastAPI, directory: Path, engine: Any, keys: Mapping[bytes, str]
) -> AsyncIterator[None]:
    """Have the routes of an application run batches on an engine."""
    async with running_service(directory, engine, policy="fcfs") as service:
        app.state.offline_batch_service = service
        async with AccessControl(service.store, fixed_keys(keys), None) as access:
            app.state.offline_batch_access = access
            yield


def _during(app: FastAPI, block: AbstractAsyncContextManager[None]) -> FastAPI:
    """The application, with a block around its life."""
    own = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with block, own(app) as state:
            yield state

    app.router.lifespan_context = lifespan
    return app


def worker_app(directory: Path, engine: FakeEngine) -> FastAPI:
    app = FastAPI()
    app.add_middleware(KeyMiddleware)
    install(app)
    return _during(app, _serving(app, directory, engine, {KEY: "root"}))


def app_of_front(directory: Path, urls: list[str]) -> FastAPI:
    places = [HttpPlace(url, KEY.decode()) for url in urls]
    engine = FleetEngine(places, 1, min_workers=len(places), gives_up=False)
    calls = OnlineCalls(engine, KEY.decode())
    app = front_app(engine, calls, metrics=True)

    @asynccontextmanager
    async def connected() -> AsyncIterator[None]:
        await engine.connect()
        async with _serving(app, directory, engine, KEYS):
            yield
        await calls.close()
        await engine.close()

    return _during(app, connected())


class Front:
    """A front, called by clients with and without keys."""

    def __init__(self, app: FastAPI, url: str, workers: list[Worker]) -> None:
        self.workers = workers
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=20)
        self.service: BatchService = app.state.offline_batch_service
        self.access: AccessControl = app.state.offline_batch_access

    def engines(self, key: str = "key-root") -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {key}"}
        answer = self.http.get("/offline_batch/engines", headers=headers)
        assert answer.json()["object"] == "offline_batch.engines"
        rows: list[dict[str, Any]] = answer.json()["engines"]
        return rows

    def used(self, name: str, num_calls: int) -> dict[str, int]:
        """What a client has used, once so many calls are counted."""
        while True:
            self.access.write()
            rows = usage_since(self.service.store, "", name)
            if rows and rows[0]["calls"] == num_calls:
                return rows[0]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    """A front with the keys of an admin and of a client, and two servers behind it."""
    with ExitStack() as stack:
        workers = [Worker(tmp_path / f"worker-{i}") for i in range(2)]
        for worker in workers:
            stack.callback(worker.running.stop)
        app = app_of_front(tmp_path / "front", [worker.url for worker in workers])
        running = stack.enter_context(threaded(app))
        found = Front(app, running.url, workers)
        stack.callback(found.http.close)
        yield found


def chat(front: Front, key: str = "key-ann", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return front.http.post(CHAT, json={"model": MODEL, **fields}, headers=headers)


def test_online_calls_take_turns_with_the_key_of_the_servers(front: Front) -> None:
    answers = [chat(front) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    by = [answer.json()["by"] for answer in answers]
    assert {*by[:2]} == {worker.url for worker in front.workers}
    assert by[:2] == by[2:]
    headers, body = front.workers[0].calls[0]
    assert headers["authorization"] == f"Bearer {KEY.decode()}"
    assert body == {"model": MODEL}
    used = front.used("ann", num_calls=4)
    assert (used["input_tokens"], used["output_tokens"]) == (28, 12)
    assert used["cached_tokens"] == 8


def test_streams_are_passed_on_and_counted(front: Front) -> None:
    for asks in (False, True):
        options = {"stream_options": {"include_usage": True}} if asks else {}
        answer = chat(front, stream=True, **options)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [event.removeprefix("data: ") for event in answer.text.split("\n\n")]
        assert events[-2:] == ["[DONE]", ""]
        read = [json.loads(event) for event in events[:-2]]
        contents = [e["choices"][0]["delta"]["content"] for e in read if e["choices"]]
        assert contents == ["one", "two"]
        # The usage that was not asked for is not there.
        assert [e["usage"] for e in read if not e["choices"]] == [USAGE] * asks
        assert front.workers[asks].calls[0][1]["stream_options"] == {
            "include_usage": True
        }
    used = front.used("ann", num_calls=2)
    assert (used["input_tokens"], used["output_tokens"]) == (14, 6)
    assert used["cached_tokens"] == 4


@pytest.mark.slow
def test_a_client_that_leaves_ends_its_call(front: Front) -> None:
    with pytest.raises(httpx.ReadTimeout):
        front.http.post(
            CHAT, json={"hangs": True}, timeout=2.0,  # enough to reach a server
            headers={"Authorization": "Bearer key-ann"},
        )  # fmt: skip
    asked = next(worker for worker in front.workers if worker.calls)
    assert asked.left.wait(10)


def test_what_cannot_be_passed_on_says_why(front: Front) -> None:
    assert chat(front, key="key-of-nobody").status_code == 401
    headers = {"Authorization": "Bearer key-ann"}
    kept = front.http.get("/v1/responses/resp_1", headers=headers)
    assert kept.status_code == 501
    assert "'resp_1'" in kept.json()["error"]["message"]
    assert front.http.get("/v1/models", headers=headers).json()["data"]
    assert front.http.get("/ready").status_code == 200
    assert b"sglang_batch" not in front.http.get("/metrics").content


def test_calls_go_to_the_servers_that_are_left(front: Front) -> None:
    first, second = front.workers
    first.running.stop()
    # Before the fleet knows, the next server takes the call.
    assert {chat(front).json()["by"] for _ in range(3)} == {second.url}
    second.running.stop()
    while any(row["status"] == "running" for row in front.engines()):
        time.sleep(0.02)
    answer = chat(front)
    assert answer.status_code == 503
    assert "None of the servers" in error_of(answer)["message"]
    assert front.http.get("/ready").status_code == 503
    assert front.http.get("/health").status_code == 200
    states = front.engines()
    assert {row["status"] for row in states} <= {"lost", "starting"}
    assert all(row["reason"] and row["losses"] >= 1 for row in states)


def test_a_batch_runs_on_the_servers_and_the_page_shows_them(front: Front) -> None:
    headers = {"Authorization": "Bearer key-root"}
    data = "".join(f"{line}\n" for line in make_lines(40))
    file = front.http.post(
        "/v1/files", headers=headers, data={"purpose": "batch"},
        files={"file": ("in.jsonl", data)},
    ).json()  # fmt: skip
    body = {
        "input_file_id": file["id"],
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    batch = front.http.post("/v1/batches", headers=headers, json=body).json()
    while batch["status"] not in ENDED:
        path = f"/v1/batches/{batch['id']}"
        batch = front.http.get(path, headers=headers).json()
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    path = f"/v1/files/{batch['output_file_id']}/content"
    lines = parse_lines(front.http.get(path, headers=headers).content)
    assert [line["custom_id"] for line in lines] == [f"r{i}" for i in range(40)]
    rows = front.engines()
    assert [row["name"] for row in rows] == [worker.url for worker in front.workers]
    assert sum(row["answered"] for row in rows) == 40
    assert all(row["answered"] for row in rows)
    page = front.http.get("/batches/data", headers=headers).json()
    there_s = [row.pop("there_s") for row in rows]
    later_s = [row.pop("there_s") for row in page["engines"]]
    assert page["engines"] == rows
    assert all(0 < then <= now for then, now in zip(there_s, later_s, strict=True))


def test_the_engines_are_for_admins(front: Front) -> None:
    headers = {"Authorization": "Bearer key-ann"}
    answer = front.http.get("/offline_batch/engines", headers=headers)
    assert answer.status_code == 403
    page = front.http.get("/batches/data", headers=headers).json()
    assert page["engines"] == []
