"""An application with the HTTP API, and ways to call it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_service import running_service
from builders import CHAT, make_line
from fake_engine import FakeEngine
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openai import OpenAI
from openai.types import Batch
from starlette.datastructures import State

from sglang_batch.server import runner as runner_module
from sglang_batch.server.access.keys import ANYBODY, FixedKeys, Role, caller_of, digest
from sglang_batch.server.http.all_routes import install
from sglang_batch.server.http.authorization import AccessControl, KeyMiddleware
from sglang_batch.server.service import BatchService

ENDED = ("completed", "failed", "cancelled", "expired")


class AppTransport(httpx.BaseTransport):
    """Carries the official client's requests to an application in this process."""

    def __init__(self, client: TestClient) -> None:
        self._client = client

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._client.request(
            request.method,
            str(request.url),
            content=request.read(),
            headers=list(request.headers.multi_items()),
        )
        return httpx.Response(
            answer.status_code,
            headers=list(answer.headers.multi_items()),
            content=answer.content,
        )


class Server:
    """An application with our routes, and two ways to call it.

    http: plain HTTP requests.
    client: the official client, without retries.
    """

    def __init__(
        self, http: TestClient, app: FastAPI, engine: FakeEngine, api_key: str = "none"
    ) -> None:
        self.http = http
        self.engine = engine
        self.service: BatchService = app.state.offline_batch_service
        self.access: AccessControl = app.state.offline_batch_access
        self.client = self.client_of(api_key)

    def client_of(self, api_key: str) -> OpenAI:
        """The official client with this key."""
        return OpenAI(
            api_key=api_key,
            base_url="http://testserver/v1",
            max_retries=0,
            http_client=httpx.Client(transport=AppTransport(self.http)),
        )

    def upload(self, *lines: str, purpose: Any = "batch") -> str:
        data = "".join(f"{line}\n" for line in lines or [make_line()]).encode()
        return self.client.files.create(file=("in.jsonl", data), purpose=purpose).id

    def start(self, *lines: str, **fields: Any) -> Batch:
        return self.client.batches.create(
            **{
                "input_file_id": self.upload(*lines),
                "endpoint": CHAT,
                "completion_window": "24h",
                **fields,
            }
        )

    def ended(self, batch: Batch) -> Batch:
        """The batch after its end, waited for by polling."""
        while batch.status not in ENDED:
            batch = self.client.batches.retrieve(batch.id)
        return batch

    def call(self, function: Any, *args: Any) -> Any:
        """Call something on the server's event loop."""
        assert self.http.portal is not None
        return self.http.portal.call(function, *args)


@contextmanager
def serving(
    directory: Path,
    keys: Mapping[bytes, str] | None = None,
    *,
    api_key: str = "none",
    **config: Any,
) -> Iterator[Server]:
    """A running server.

    Args:
        keys: names by key. Calls need one of them, and ``root`` is an admin.
        api_key: what the server's clients send.
    """
    engine = FakeEngine(failing={"fails": 400})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings = {"policy": "fcfs", **config}
        async with running_service(directory, engine, **settings) as service:
            app.state.offline_batch_service = service
            without_key = ANYBODY if keys is None else None
            fixed = fixed_keys(keys or {})
            async with AccessControl(service.store, fixed, without_key) as access:
                app.state.offline_batch_access = access
                yield

    with _an_app(lifespan) as app, pytest.MonkeyPatch.context() as monkeypatch:
        # Before the start, so that the first pause between two polls is short, too.
        monkeypatch.setattr(runner_module, "POLL_S", 0.002)
        with TestClient(app, raise_server_exceptions=False) as http:
            if api_key != "none":
                http.headers["authorization"] = f"Bearer {api_key}"
            yield Server(http, app, engine, api_key)


@contextmanager
def _an_app(lifespan: Any) -> Iterator[FastAPI]:
    """An application of which only the routes were used before: FastAPI takes a third of
    a second to make them."""
    app = _FREE_APPS.pop() if _FREE_APPS else None
    if app is None:
        app = FastAPI(lifespan=lambda app: app.state.lifespan(app))
        app.add_middleware(KeyMiddleware)
        install(app)
    app.state, app.middleware_stack, app.openapi_schema = State(), None, None
    app.state.lifespan = lifespan
    yield app
    _FREE_APPS.append(app)


_FREE_APPS: list[FastAPI] = []


def fixed_keys(keys: Mapping[bytes, str]) -> FixedKeys:
    """The callers of a server that is started with these names by key."""
    return {
        digest(key): caller_of(name, Role.ADMIN if name == "root" else Role.CLIENT)
        for key, name in keys.items()
    }


def error_of(answer: Any) -> dict[str, Any]:
    """The error of an answer, which must have OpenAI's nested body."""
    body: dict[str, Any] = answer.json()
    assert list(body) == ["error"], body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    kind = "invalid_request_error" if answer.status_code < 500 else "server_error"
    assert body["error"]["type"] == kind
    error: dict[str, Any] = body["error"]
    return error
