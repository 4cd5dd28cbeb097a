"""A server whose batches run on other offline servers. It has no engine and no SGLang.

It has the batch API, the store and the page, and passes online calls on: it checks the key
of a call, and sends its own key for the servers. Answers are passed on as they come, so
streams stay streams. A client that leaves ends its call there, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ...config import OfflineBatchConfig
from ...errors import ApiError, EngineError
from ...fleet.fleet_engine import FleetEngine
from ...fleet.head_state import CRASHES, CrashCounts
from ...fleet.http_fleet import HttpPlace, open_session
from ...job import traces
from ...job.engine import GENERATE_URL
from ...job.job_planner import compile_planner
from ...store.batch_store import BatchStore
from ...store.files import next_epoch
from ..access.keys import given_keys
from ..metrics import published
from ..service import BatchService
from ..webhooks import read_endpoints
from .all_routes import install
from .authorization import (
    METRICS,
    ONLINE,
    AccessControl,
    KeyMiddleware,
    access_of,
    caller_of,
)
from .calls import OurRoute

logger = logging.getLogger(__name__)

# How long the first of the servers may take to answer, and how long the last online
# calls may take when this one ends.
START_S = 60.0
END_S = 15


async def serve(
    urls: Sequence[str],
    workers_key: str | None,
    options: argparse.Namespace,
    directory: Path,
    config: OfflineBatchConfig,
) -> None:
    """Serve until a signal ends the process.

    ``urls`` and ``workers_key`` are of the servers that have engines, ``options`` those of
    SGLang's server that a front has, too. Raises ConfigError if the keys or the servers
    cannot be used, StoreError if another server uses the directory, EngineError if none of
    the servers answers or another front uses them.
    """
    logging.basicConfig(
        level=options.log_level.upper(), format="[%(asctime)s] %(message)s", force=True
    )
    keys = given_keys(config, options.api_key, options.admin_api_key)
    read_endpoints(config)
    store = BatchStore(directory)
    traces.start(logger.warning)
    engine = FleetEngine(
        [HttpPlace(url, workers_key) for url in urls],
        next_epoch(directory),
        gives_up=False,  # servers are restarted, and nobody would tell this one
        crashes=CrashCounts(directory / CRASHES),
    )
    calls = OnlineCalls(engine, workers_key)
    app = front_app(engine, calls, metrics=options.enable_metrics)
    server = _web_server(app, options)

    def end_if_failed() -> None:
        # A supervisor starts a new front, which continues with the batches.
        server.should_exit = server.should_exit or engine.failure is not None

    try:
        await _connect(engine)
        async with (
            _service(options, config, store, engine, server) as service,
            AccessControl(store, *keys) as access,
        ):
            app.state.offline_batch_service = service
            app.state.offline_batch_access = access
            engine.replica_changes.watch(end_if_failed)
            end_if_failed()
            await server.serve()
    finally:
        await calls.close()
        await engine.close()
        store.close()
    if engine.failure is not None:
        raise engine.failure


def _web_server(app: FastAPI, options: argparse.Namespace) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_config=None,
            access_log=options.log_level == "debug",
            timeout_graceful_shutdown=END_S,
            ssl_keyfile=options.ssl_keyfile,
            ssl_keyfile_password=options.ssl_keyfile_password,
            ssl_certfile=options.ssl_certfile,
            ssl_ca_certs=options.ssl_ca_certs,
        )
    )


def front_app(
    engine: FleetEngine, calls: OnlineCalls, *, metrics: bool = False
) -> FastAPI:
    """The routes of a front. Its service and its keys are set in ``app.state``."""
    app = FastAPI(title="sglang-batch", telemetry={"tracing": False})
    app.state.fleet = engine
    app.add_middleware(KeyMiddleware)
    install(app)
    app.include_router(calls.router())
    app.include_router(_probes(engine, metrics=metrics))
    return app


def _probes(engine: FleetEngine, *, metrics: bool) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/health")
    @router.get("/ping")
    async def health() -> Response:
        """This process works."""
        return Response()

    @router.get("/ready")
    @router.get("/health_generate")
    async def ready() -> Response:
        """Whether a server with an engine runs."""
        runs = any(row.is_running for row in engine.states())
        return Response(status_code=200 if runs else 503)

    if metrics:

        @router.get(METRICS)
        async def show_metrics() -> Response:
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return router


async def _connect(engine: FleetEngine) -> None:
    try:
        async with asyncio.timeout(START_S):
            await engine.connect()
    except TimeoutError:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in engine.states())
        raise EngineError(
            f"none of the servers of --workers could be attached in {START_S:g} s "
            f"({reasons})."
        ) from None


@asynccontextmanager
async def _service(
    options: argparse.Namespace,
    config: OfflineBatchConfig,
    store: BatchStore,
    engine: FleetEngine,
    server: uvicorn.Server,
) -> AsyncIterator[BatchService]:
    service = BatchService(store, config, server_name=f"pid {os.getpid()}")
    threading.Thread(target=compile_planner, args=(config,), daemon=True).start()
    await service.start(engine, closing=lambda: server.should_exit)
    logger.info(
        "Offline batches: /v1/files and /v1/batches of http://%s:%d, kept in %s, on %d "
        "servers",
        options.host,
        options.port,
        store.directory,
        len(engine.states()),
    )
    try:
        async with published(service, options.enable_metrics):
            yield service
    finally:
        await service.stop()


POSTED = (
    *sorted(ONLINE),
    "/v1/audio/transcriptions",
    "/v1/detokenize",
    "/v1/tokenize",
    GENERATE_URL,
)
ASKED = ("/get_model_info", "/model_info", "/v1/models", "/v1/models/{model:path}")
# About a response that one of the servers keeps.
KEPT = {
    "GET": "/v1/responses/{response_id}",
    "POST": "/v1/responses/{response_id}/cancel",
}

# Of one connection each, the client's key, and what aiohttp writes itself.
_OWN_HEADERS = frozenset(
    {
        *("accept-encoding", "authorization", "connection", "content-length", "cookie"),
        *("expect", "host", "keep-alive", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "x-api-key"),
        *("date", "server"),
    }
)
# Nobody reads it.
_CLIENT_LEFT = 499


class OnlineCalls:
    """Passes calls on to the servers of a fleet, with their admin's key."""

    def __init__(self, fleet: FleetEngine, api_key: str | None) -> None:
        self._fleet = fleet
        self._headers = {"Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._client: aiohttp.ClientSession | None = None
        self._turns = count()

    def router(self) -> APIRouter:
        router = APIRouter(route_class=OurRoute, include_in_schema=False)
        for path in POSTED:
            router.add_api_route(path, self._forward, methods=["POST"])
        for path in ASKED:
            router.add_api_route(path, self._forward, methods=["GET"])
        for method, path in KEPT.items():
            router.add_api_route(path, _refuse_kept, methods=[method])
        return router

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _forward(self, request: Request) -> Response:
        caller, body, usage = caller_of(request), await request.body(), None
        if caller.name and request.method == "POST":
            usage = ForwardedUsage(request.scope["route"].path, body)
            body = usage.body
        answer = await _unless_left(request, self._ask(request, body))
        if answer is None:
            return Response(status_code=_CLIENT_LEFT)
        pieces = answer.content.iter_any()
        if usage is None or answer.status != HTTPStatus.OK:
            return PassedAnswer(answer, pieces)
        is_stream = answer.content_type == "text/event-stream"
        access = access_of(request)
        return PassedAnswer(
            answer,
            usage.passed(pieces, is_stream=is_stream),
            lambda: access.count(caller.name, usage.counts),
        )

    async def _ask(self, request: Request, body: bytes) -> aiohttp.ClientResponse:
        """Ask the servers in turn.

        Raises 503 if none runs, 502 if the one that took it failed.
        """
        if self._client is None:
            self._client = open_session({})
        headers = [
            (name, value)
            for name, value in request.headers.items()
            if name not in _OWN_HEADERS
        ]
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        target = f"{path}?{request.url.query}" if request.url.query else path
        # The servers that run, beginning with the one whose turn it is.
        urls = [row.name for row in self._fleet.states() if row.is_running]
        first = next(self._turns) % max(1, len(urls))
        for url in [*urls[first:], *urls[:first]]:
            try:
                return await self._client.request(
                    request.method,
                    f"{url}{target}",
                    headers=[*headers, *self._headers.items()],
                    data=body or None,
                    allow_redirects=False,  # where to is for the client to see
                )
            except aiohttp.ClientConnectorError as error:
                logger.warning("%s does not take an online call: %s", url, error)
            except (aiohttp.ClientError, OSError) as error:
                raise ApiError(
                    502, f"The server that ran this call failed: {error}.", retry=True
                ) from None
        raise ApiError(
            503, "None of the servers behind this one runs now.", code="not_ready"
        )


class PassedAnswer(StreamingResponse):
    """An answer of another server. If it breaks off, so does this one."""

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        pieces: AsyncIterator[bytes],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(pieces, answer.status)
        self._answer = answer
        self._on_end = on_end
        self.raw_headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in answer.headers.items()
            if name.lower() not in _OWN_HEADERS
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()
            self._on_end()


async def _unless_left(
    request: Request, work: Coroutine[Any, Any, aiohttp.ClientResponse]
) -> aiohttp.ClientResponse | None:
    """The result of ``work``, which ends without one, None, when the client leaves."""
    asking = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await asking if asking.done() else None
    finally:
        for task in (asking, leaving):
            task.cancel()
        await asyncio.wait({asking, leaving})


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse_kept(response_id: str) -> Response:
    message = (
        "Each server keeps the responses that it made, and this one does not know which "
        f"has {response_id!r:.100}; send such calls to one of the servers behind it."
    )
    raise ApiError(501, message, code="not_supported", retry=False)


# Streams of these calls have no usage unless it is asked for.
_ASKED_FOR = frozenset({"/v1/chat/completions", "/v1/completions"})
# Ours for the names of both APIs.
_NAMES = {
    "prompt_tokens": "input_tokens",
    "input_tokens": "input_tokens",
    "completion_tokens": "output_tokens",
    "output_tokens": "output_tokens",
    "cache_read_input_tokens": "cached_tokens",
}


class ForwardedUsage:
    """Counts one call and its usage, which is in its answer or in an event of its stream.

    OpenAI's streams have it only if the call asks for it: then it is asked for in
    the ``body`` that is sent on, and the event that has nothing else is kept from a
    client that did not ask.
    """

    def __init__(self, template: str, body: bytes) -> None:
        self.body = body
        self._found: dict[str, int] = {}
        self._hides = False
        if template in _ASKED_FOR:
            self._ask()

    def _ask(self) -> None:
        try:
            fields = json.loads(self.body)
            options = fields.get("stream_options") or {}
            if fields.get("stream") and not options.get("include_usage"):
                fields["stream_options"] = {**options, "include_usage": True}
                self.body = json.dumps(fields).encode()
                self._hides = True
        except (ValueError, AttributeError, TypeError):
            pass  # the server that answers says what is wrong

    @property
    def counts(self) -> Counter[str]:
        """The call and its tokens, as far as the answer has told."""
        return Counter({"calls": 1, **self._found})

    async def passed(
        self, pieces: AsyncIterator[bytes], *, is_stream: bool
    ) -> AsyncIterator[bytes]:
        """Pass an answer on, a stream by events and any other at its end."""
        rest = b""
        async for piece in pieces:
            rest += piece
            while is_stream and (end := rest.find(b"\n\n") + 2) > 1:
                event, rest = rest[:end], rest[end:]
                if self._shows(event):
                    yield event
        if not is_stream:
            self._read(rest)
        yield rest

    def _shows(self, event: bytes) -> bool:
        """Read an event. Returns whether the client gets it."""
        if b'"usage"' not in event:
            return True
        found = self._read(event[event.find(b"{") :])
        return not (self._hides and found.get("choices") == [])

    def _read(self, text: bytes) -> Mapping[str, Any]:
        """The usage in an object: its own, or that of the answer in it."""
        try:
            found = json.loads(text)
        except ValueError:
            return {}
        if not isinstance(found, dict):
            return {}
        for holder in (found, found.get("response"), found.get("message")):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict):
                self._add(usage)
        return found

    def _add(self, usage: Mapping[str, Any]) -> None:
        counts = {
            ours: usage[name]
            for name, ours in _NAMES.items()
            if isinstance(usage.get(name), int)
        }
        for name in ("prompt_tokens_details", "input_tokens_details"):
            details = usage.get(name)
            if isinstance(details, dict) and details.get("cached_tokens"):
                counts["cached_tokens"] = details["cached_tokens"]
        if "cache_read_input_tokens" in usage and "input_tokens" in counts:
            # Anthropic's input tokens are those that were not cached.
            counts["input_tokens"] += counts.get("cached_tokens", 0)
        # A stream says it again and again, with more tokens at its end.
        for name, value in counts.items():
            self._found[name] = max(self._found.get(name, 0), value)
