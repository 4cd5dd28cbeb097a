"""``service_tier: "flex"``: which calls wait for a gap, for how long, and for which gap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from sglang_batch.server.http import flex
from sglang_batch.server.http.flex import FlexCalls

CHAT = "/v1/chat/completions"


class Calls:
    """An application whose calls end when they are told to, behind the layer."""

    def __init__(self, most: int, in_batches: int = 0) -> None:
        self.lines = ["line"] * in_batches

        async def running_s() -> dict[str, float]:
            return {f"{number}": 1.0 for number, _ in enumerate(self.lines)}

        engine = SimpleNamespace(max_running_requests=most, running_s=running_s)
        self.runner = SimpleNamespace(engine=engine, num_in_engine=in_batches)
        app = FastAPI()
        app.state.offline_batch_service = SimpleNamespace(runner=self.runner)
        self._app, self.layer = app, FlexCalls(self._answer)
        self.running: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[Any]] = {}

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        name = json.loads(body)["name"]
        self.running.append(name)
        await self.ends[name].wait()
        self.running.remove(name)

    async def start(self, name: str, path: str = CHAT, **fields: Any) -> None:
        body = json.dumps({"name": name, **fields}).encode()
        pieces = [body[:5], body[5:]]
        sent: list[Any] = []

        async def receive() -> Any:
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "app": self._app}
        self.ends[name] = asyncio.Event()

        async def call() -> Any:
            await self.layer(scope | {"headers": []}, receive, send)
            return sent

        self.tasks[name] = asyncio.create_task(call())
        await self.settle()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.settle()

    async def settle(self) -> None:
        await asyncio.sleep(0.05)


def in_loop(scenario: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_LOOK_S", 0.001)
    asyncio.run(scenario())


@pytest.mark.parametrize("in_batches", [0, 40, 100])
def test_next_to_others_they_take_a_small_share(
    monkeypatch: pytest.MonkeyPatch, in_batches: int
) -> None:
    async def scenario() -> None:
        calls = Calls(most=40, in_batches=in_batches)
        if not in_batches:
            await calls.start("online", service_tier="default")
        for name in "abcd":
            await calls.start(name, service_tier="flex")
        await calls.start("late")  # never waits
        assert calls.running[-3:] == ["a", "b", "late"]
        await calls.end("a")
        assert calls.running[-3:] == ["b", "late", "c"]
        for name in ("late", *["online"] * (not in_batches)):
            await calls.end(name)
        calls.runner.num_in_engine = 0
        await calls.settle()
        assert calls.running == ["b", "c", "d"]
        for name in "bcd":
            await calls.end(name)
        await asyncio.gather(*calls.tasks.values())

    in_loop(scenario, monkeypatch)


def test_next_to_batches_it_is_a_share_of_the_lines_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KV has room for 50 lines, while 2,000 requests could run and as many wait."""
    monkeypatch.setattr(flex, "_COUNT_S", 0.0)

    async def scenario() -> None:
        calls = Calls(most=2000, in_batches=2050)
        calls.lines = calls.lines[:50]
        for name in "abcd":
            await calls.start(name, service_tier="flex")
        assert calls.running == ["a", "b"]
        calls.lines *= 2
        await calls.settle()
        assert calls.running == ["a", "b", "c", "d"]
        for name in "abcd":
            await calls.end(name)

    in_loop(scenario, monkeypatch)


def test_alone_they_have_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        calls = Calls(most=3)
        for name in "abcd":
            await calls.start(name, service_tier="flex")
        assert calls.running == ["a", "b", "c"]
        await calls.start("online")
        await calls.end("a")
        await calls.end("b")
        assert calls.running == ["c", "online"]
        await calls.end("c")
        assert calls.running == ["online", "d"]
        await calls.end("online")
        await calls.end("d")

    in_loop(scenario, monkeypatch)


def test_without_a_gap_they_are_refused_as_at_openai(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex, "PATIENCE_S", 0.05)

    async def scenario() -> None:
        calls = Calls(most=1)
        await calls.start("first", service_tier="flex")
        await calls.start("flex", service_tier="flex")
        start, end = await calls.tasks["flex"]
        assert start["status"] == 429
        error = json.loads(end["body"])["error"]
        assert error["code"] == "resource_unavailable"
        assert '"service_tier": "default"' in error["message"]
        await calls.end("first")
        await calls.start("again", service_tier="flex")
        assert calls.running == ["again"]
        await calls.end("again")

    in_loop(scenario, monkeypatch)


def test_a_client_that_leaves_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        calls = Calls(most=1)
        for name in ("a", "b", "c"):
            await calls.start(name, service_tier="flex")
        calls.tasks["b"].cancel()
        calls.tasks["a"].cancel()
        await calls.settle()
        assert calls.running[1:] == ["c"]  # "a" was told nothing
        await calls.end("c")

    in_loop(scenario, monkeypatch)


@pytest.mark.parametrize(
    "body",
    [
        {"service_tier": "auto"},
        {"messages": [{"content": '"flex"'}]},
        {"metadata": {"service_tier": "flex"}},
        {"service_tier": ["flex"]},
    ],
)
def test_other_calls_never_wait(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        calls = Calls(most=0)
        await calls.start("a", **body)
        await calls.start("b", path="/v1/embeddings", service_tier="flex")
        assert calls.running == ["a", "b"]
        for name in "ab":
            await calls.end(name)

    in_loop(scenario, monkeypatch)
