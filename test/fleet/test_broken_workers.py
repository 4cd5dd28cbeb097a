"""A worker whose messages make no sense is left out, and the others do the job."""

from __future__ import annotations

import asyncio
import gzip
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from builders import make_body, make_machine
from fake_engine import FakeEngine
from local_workers import LocalPlace

from sglang_batch import __version__
from sglang_batch.errors import ConfigError
from sglang_batch.fleet import http_fleet, messages, plan_bytes
from sglang_batch.fleet.fleet_engine import FleetEngine
from sglang_batch.fleet.http_fleet import HttpPlace
from sglang_batch.fleet.messages import About, Exchange, RenderCall, Session
from sglang_batch.job.engine import WORKER_PATH
from sglang_batch.request import BatchRequestInput, RequestOutput

Answer = Callable[[str, bytes], web.Response | bytes]
MODEL = tuple(FakeEngine().model_names)


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """A server that answers the calls of a head so. Yields its URL."""

    async def handle(request: web.Request) -> web.Response:
        route = request.path.removeprefix(f"{WORKER_PATH}/")
        found = answer(route, await request.read())
        return found if isinstance(found, web.Response) else web.Response(body=found)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def about(**changes: Any) -> bytes:
    good = About(
        "worker",
        __version__,
        MODEL,
        1,
        8,
        8,
        plan_bytes.to_bytes(make_machine()),
        8.0,
    )
    return messages.encode(msgspec.to_builtins(good, builtin_types=(bytes,)) | changes)


def attaching(data: bytes | web.Response) -> Answer:
    return lambda route, body: data


def after(exchange: bytes | None = None, render: bytes | None = None) -> Answer:
    """A worker that attaches, and then answers these calls so."""

    def answer(route: str, body: bytes) -> bytes:
        if route == "attach":
            return about()
        if route == "exchange" and exchange is None:
            call = msgspec.msgpack.decode(body, type=Exchange)
            end = call.first + len(call.commands) - 1
            return messages.encode(messages.Reply(call.session, end, 1, []))
        found = exchange if route == "exchange" else render
        assert found is not None or route == "render"
        return found or messages.encode([])

    return answer


def rendering(**changes: Any) -> Answer:
    """A worker whose rendered lines have these values."""
    usual = after()

    def answer(route: str, body: bytes) -> web.Response | bytes:
        if route != "render":
            return usual(route, body)
        fields: dict[str, Any] = {
            "type": "rendered",
            "input_ids": b"\1\0\0\0",
            "shareable_len": 1,
            "has_media": False,
            "adapter": "",
            "namespace": "",
            "max_new_tokens": 4,
            "ignore_eos": False,
            "stored": None,
        }
        rids = msgspec.msgpack.decode(body, type=RenderCall).rids
        return messages.encode([{"rid": rid} | fields | changes for rid in rids])

    return answer


def gzipped() -> web.Response:
    return web.Response(
        body=gzip.compress(bytes(1 << 26)), headers={"Content-Encoding": "gzip"}
    )


_OTHER_VERSION = messages.encode({"type": "about", "version": "9.9", "name": 7})
_BROKEN = {
    "no route": lambda route, body: web.Response(status=404),
    "another key": lambda route, body: web.Response(status=401, body=b"\xff"),
    "other bytes": attaching(b"\xc1\xff other"),
    "nothing": attaching(b""),
    "nested": attaching(b"\x91" * 100_000),
    "compressed": lambda route, body: gzipped(),
    "another message": attaching(messages.encode(Session(1, 1))),
    "no machine": attaching(about(machine=b"none")),
    "pickled machine": attaching(about(machine=b"\x80\x04K\x01.")),
    "plan in place of a machine": attaching(about(machine=b"\0\x80")),
    "another version": attaching(_OTHER_VERSION),
    "another version and junk": attaching(about(version="9.9", machine=3)),
    "no models": attaching(about(model_names=[])),
    "countless replicas": attaching(about(num_replicas=1 << 60)),
    "no replicas": attaching(about(num_replicas=0)),
    "lease that is no number": attaching(about(lease_s=float("nan"))),
    "endless lease": attaching(about(lease_s=float("inf"))),
    "broken events": after(exchange=b"\xc1"),
    "nested events": after(exchange=b"\x91" * 100_000),
    "broken renderings": after(render=b"\xc1"),
    "renderings of others": after(render=messages.encode([])),
    "ids that are none": rendering(input_ids=b"123"),
    "negative ids": rendering(input_ids=b"\xff\xff\xff\xff"),
    "negative lengths": rendering(shareable_len=-5),
}


async def _render(engine: FleetEngine, numbers: range) -> None:
    """Render lines: each is rendered, whoever fails."""
    lines = [
        BatchRequestInput(
            number,
            f"r{number}",
            "/v1/chat/completions",
            msgspec.json.encode(make_body(f"prompt {number}")),
        )
        for number in numbers
    ]
    rendering = (
        engine.prepare(line, f"job-{line.index:08d}", tokenize=True) for line in lines
    )
    found = await asyncio.gather(*rendering)
    assert not any(isinstance(each, RequestOutput) for each in found)


async def _left_out(answer: Answer, *, good_first: bool) -> str:
    async with server(answer) as url:
        places: list[Any] = [HttpPlace(url), LocalPlace("good", FakeEngine())]
        engine = FleetEngine(places[::-1] if good_first else places, epoch=1)
        try:
            async with asyncio.timeout(30):
                await engine.connect()
                for number in itertools.count():
                    await _render(engine, range(20 * number, 20 * number + 20))
                    states = {row.name: row for row in engine.states()}
                    if states[url].status == "left out":
                        break
                    await asyncio.sleep(0.01)
            assert engine.failure is None
            assert states["good"].is_running
            return states[url].reason
        finally:
            await engine.close()


@pytest.mark.parametrize("good_first", [True, False], ids=["last", "first"])
@pytest.mark.parametrize("answer", _BROKEN.values(), ids=_BROKEN.keys())
def test_a_broken_worker_is_left_out(answer: Answer, good_first: bool) -> None:
    reason = asyncio.run(_left_out(answer, good_first=good_first))
    assert reason
    if answer in (_BROKEN["another version"], _BROKEN["another version and junk"]):
        assert "sglang-batch 9.9" in reason and __version__ in reason


def test_an_answer_without_an_end_is_not_read_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(http_fleet._MOST_BYTES, "attach", 1 << 16)
    reason = asyncio.run(_left_out(attaching(bytes(1 << 20)), good_first=True))
    assert "more than 65536 bytes" in reason


def test_a_head_follows_no_worker_elsewhere() -> None:
    elsewhere: list[str] = []

    def other(route: str, body: bytes) -> bytes:
        elsewhere.append(route)
        return about()

    async def scenario() -> str:
        async with server(other) as target:
            moved = web.Response(status=307, headers={"Location": f"{target}/attach"})
            return await _left_out(attaching(moved), good_first=True)

    assert "307" in asyncio.run(scenario())
    assert not elsewhere


def test_without_another_worker_the_job_ends_with_the_reason() -> None:
    async def scenario() -> None:
        async with server(_BROKEN["another version"]) as url:
            engine = FleetEngine([HttpPlace(url)], epoch=1)
            with pytest.raises(ConfigError, match=r"sglang-batch 9\.9"):
                await engine.connect()

    asyncio.run(scenario())
