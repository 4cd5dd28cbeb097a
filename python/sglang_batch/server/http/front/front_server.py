"""A server whose batches run on other offline servers. It has no engine and no SGLang.

It has the batch API, the store and the page, and passes online calls on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import APIRouter, FastAPI, Response

from ....config import OfflineBatchConfig
from ....errors import EngineError
from ....fleet.fleet_engine import FleetEngine
from ....fleet.head_state import CRASHES, CrashCounts, HeadState
from ....fleet.http_fleet import HttpPlace
from ....job.job_planner import compile_planner
from ....store.batch_store import BatchStore
from ....store.files import next_epoch
from ...access.access_control import AccessControl
from ...access.keys import Caller, FixedKeys, given_keys
from ...metrics import published
from ...service import BatchService
from ..all_routes import install
from ..authorization import METRICS, KeyMiddleware
from .online_calls import OnlineCalls

logger = logging.getLogger(__name__)

# How long the first of the servers may take to answer, and how long the last online
# calls may take when this one ends.
START_S = 60.0
END_S = 15


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """The options of a front.

    ``urls`` and ``workers_key`` are of the servers that have engines, ``ssl`` has
    uvicorn's ``ssl_keyfile`` and the like.
    """

    urls: tuple[str, ...]
    workers_key: str | None
    host: str
    port: int
    directory: Path
    config: OfflineBatchConfig
    log_level: str = "info"
    api_key: str | None = None
    admin_key: str | None = None
    metrics: bool = False
    ssl: Mapping[str, str] = field(default_factory=dict)


def serve(options: FrontOptions) -> None:
    """Serve until a signal ends the process.

    Raises ConfigError if the keys or the servers cannot be used, StoreError if
    another server uses the directory, EngineError if none of the servers answers or
    another front uses them.
    """
    logging.basicConfig(
        level=options.log_level.upper(), format="[%(asctime)s] %(message)s", force=True
    )
    keys = given_keys(options.config, options.api_key, options.admin_key)
    asyncio.run(_serve(options, keys))


async def _serve(options: FrontOptions, keys: tuple[FixedKeys, Caller | None]) -> None:
    store = BatchStore(options.directory)
    head = HeadState(
        "front",
        next_epoch(options.directory),
        CrashCounts(options.directory / CRASHES),
    )
    engine = FleetEngine(
        [HttpPlace(url, options.workers_key) for url in options.urls],
        head.epoch,
        min_workers=1,
        gives_up=False,  # servers are restarted, and nobody would tell this one
        crashes=head.crashes,
    )
    calls = OnlineCalls(engine, options.workers_key)
    app = front_app(engine, calls, metrics=options.metrics)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_config=None,
            access_log=options.log_level == "debug",
            timeout_graceful_shutdown=END_S,
            **options.ssl,  # type: ignore[arg-type]
        )
    )

    def end_if_failed() -> None:
        # A supervisor starts a new front, which continues with the batches.
        server.should_exit = server.should_exit or engine.failure is not None

    try:
        await _connect(engine)
        async with _service(options, store, engine, server) as service:
            access = AccessControl(store, *keys)
            app.state.offline_batch_service = service
            app.state.offline_batch_access = access
            access.start()
            engine.replica_changes.watch(end_if_failed)
            end_if_failed()
            try:
                await server.serve()
            finally:
                await access.stop()
                access.close()
    finally:
        await calls.close()
        await engine.close()
        store.close()
    if engine.failure is not None:
        raise engine.failure


def front_app(
    engine: FleetEngine, calls: OnlineCalls, *, metrics: bool = False
) -> FastAPI:
    """The routes of a front. Its service and its keys are set in ``app.state``."""
    app = FastAPI(title="sglang-batch")
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
    options: FrontOptions,
    store: BatchStore,
    engine: FleetEngine,
    server: uvicorn.Server,
) -> AsyncIterator[BatchService]:
    config = options.config
    service = BatchService(store, config, server_name=f"pid {os.getpid()}")
    threading.Thread(target=compile_planner, args=(config,), daemon=True).start()
    await service.start(engine, closing=lambda: server.should_exit)
    logger.info(
        "Offline batches: /v1/files and /v1/batches of http://%s:%d, kept in %s, on %d "
        "servers",
        options.host,
        options.port,
        options.directory,
        len(options.urls),
    )
    try:
        async with published(service, options.metrics):
            yield service
    finally:
        await service.stop()
