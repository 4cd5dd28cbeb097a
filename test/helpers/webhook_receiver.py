"""A receiver of webhooks, and services that send to it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
from aiohttp import web
from batch_service import running_service, submit, until_over
from builders import PATIENCE_S, make_lines
from fake_engine import FakeEngine
from standardwebhooks import Webhook

from sglang_batch.server.service import BatchService

SECRET = "whsec_C2FtcGxlIHNlY3JldCBvZiAzMiBieXRlcyEhISEhIQ=="
OTHER_SECRET = "whsec_b3RoZXIgc2VjcmV0IG9mIDMyIGJ5dGVzICEhISEhISE="
LOOPBACK = ("127.0.0.0/8",)


class Receiver:
    """A real server for webhooks, which answers with these statuses, then with 204."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.calls: list[tuple[dict[str, str], bytes]] = []
        self.paths: list[str] = []
        self.num_open = self.most_open = 0
        self.headers = {"Location": "/elsewhere"}
        self.hold: asyncio.Event | None = None
        self.port = 0

    def url(self, host: str = "127.0.0.1", path: str = "/hook") -> str:
        return f"http://{host}:{self.port}{path}"

    async def answer(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        body = await request.read()
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            # As a client's program would check it.
            self.calls.append((dict(request.headers), body))
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.num_open -= 1
        status = self.statuses.pop(0) if self.statuses else 204
        return web.Response(status=status, headers=self.headers)

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.calls]

    def events(self) -> list[Any]:
        """The bodies, each checked with its signature by both libraries."""
        client = openai.Client(api_key="none", webhook_secret=SECRET)
        found = []
        for headers, body in self.calls:
            event = client.webhooks.unwrap(body, headers)
            assert Webhook(SECRET).verify(body, headers) == json.loads(body)
            found.append(event)
        return found


@asynccontextmanager
async def receiving(
    *statuses: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    receiver = Receiver(*statuses)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    receiver.port = runner.addresses[0][1]
    try:
        yield receiver
    finally:
        await runner.cleanup()


def hooks_file(directory: Path, *lines: str) -> str:
    path = directory.parent / f"{directory.name}.webhooks"
    path.write_text("# who, where, secret\n\n" + "".join(f"{line}\n" for line in lines))
    return str(path)


@asynccontextmanager
async def hooked(
    directory: Path,
    *lines: str,
    engine: FakeEngine | None = None,
    networks: tuple[str, ...] = LOOPBACK,
) -> AsyncIterator[BatchService]:
    """A service that sends webhooks as these lines of its file say."""
    path = hooks_file(directory, *lines)
    async with running_service(
        directory, engine, webhooks=path, webhook_networks=networks
    ) as service:
        yield service


def pending(service: BatchService) -> list[dict[str, Any]]:
    return service.store.rows("SELECT * FROM webhooks ORDER BY created_at")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def ended(service: BatchService, **fields: Any) -> str:
    """The id of a batch that was run to its end."""
    batch_id = submit(service, make_lines(2), **fields)
    await until_over(service, batch_id)
    return batch_id
