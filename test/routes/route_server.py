"""An application with the HTTP API, and ways to call it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
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

from sglang_batch import runner as runner_module
from sglang_batch.http_api import make_router
from sglang_batch.http_api.api_keys import ApiKeyMiddleware, ApiKeys
from sglang_batch.service import BatchService

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

    http: requests as they are.
    client: the official client; it does not repeat what fails.
    """

    def __init__(self, http: TestClient, app: FastAPI, engine: FakeEngine) -> None:
        self.http = http
        self.engine = engine
        self.service: BatchService = app.state.offline_batch_service
        self.client = self.client_of("none")

    def client_of(self, api_key: str) -> OpenAI:
        """The official client of somebody with this key."""
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
        """The batch at its end, which clients wait for by asking again."""
        while batch.status not in ENDED:
            batch = self.client.batches.retrieve(batch.id)
        return batch

    def call(self, function: Any, *args: Any) -> Any:
        """Call something on the server's event loop."""
        assert self.http.portal is not None
        return self.http.portal.call(function, *args)


@contextmanager
def serving(
    directory: Path, keys: ApiKeys | None = None, **config: Any
) -> Iterator[Server]:
    """A server at work; with ``keys``, calls need one of them."""
    engine = FakeEngine(failing={"fails": 400})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings = {"policy": "fcfs", **config}
        async with running_service(directory, engine, **settings) as service:
            app.state.offline_batch_service = service
            app.state.offline_batch_keys = keys
            yield

    app = FastAPI(lifespan=lifespan)
    app.include_router(make_router())
    app.add_middleware(ApiKeyMiddleware)
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Before the start: the first pause between two looks is as short as the others.
        monkeypatch.setattr(runner_module, "POLL_S", 0.002)
        with TestClient(app, raise_server_exceptions=False) as http:
            yield Server(http, app, engine)


def error_of(answer: Any) -> dict[str, Any]:
    """The error of an answer, whose body must be OpenAI's nested one."""
    body: dict[str, Any] = answer.json()
    assert list(body) == ["error"], body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    kind = "invalid_request_error" if answer.status_code < 500 else "server_error"
    assert body["error"]["type"] == kind
    error: dict[str, Any] = body["error"]
    return error
