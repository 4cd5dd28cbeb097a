"""Our routes and the batch runner on SGLang's HTTP server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import platformdirs
from fastapi import FastAPI
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.multi_tokenizer_mixin import get_main_process_id

from ..config import OfflineBatchConfig
from ..errors import SGLangBatchError
from ..http_api import make_router
from ..http_api.api_keys import ApiKeyMiddleware
from ..service import BatchService
from ..service_metrics import published
from ..store.batch_store import BatchStore
from . import engine_death
from .client_keys import install_client_keys
from .engine import SGLangEngine

logger = logging.getLogger(__name__)


def attach_to_server(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook on SGLang's ``_setup_and_run_http_server``.

    The engine's processes are up and the app has not been started yet. With several
    tokenizer workers the app runs in processes of its own, see :mod:`.app`.
    """
    if getattr(server_args, "offline_batch", False):
        attach(http_server.app)
        if server_args.tokenizer_worker_num > 1:
            engine_death.tell_workers()
            logger.warning(
                "--tokenizer-worker-num %d: if the worker that runs the batches dies "
                "alone, the engine keeps the lines that it had sent and its batches may "
                "stand still; start the server again then.",
                server_args.tokenizer_worker_num,
            )


def attach(app: FastAPI) -> None:
    """Add the routes, and the batch service to the app's start and end."""
    app.include_router(make_router())
    app.add_middleware(ApiKeyMiddleware)
    stock_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        # With several tokenizer workers there are no such arguments here, nor keys.
        if (server_args := getattr(app, "server_args", None)) is not None:
            install_client_keys(app, server_args.offline_config)
        async with stock_lifespan(app) as state:
            try:
                service = await _start_service()
            except SGLangBatchError as error:
                logger.error("error: %s", error)
                raise
            app.state.offline_batch_service = service
            try:
                async with published(service, _has_metrics()):
                    yield state
            finally:
                await service.stop()
                service.store.close()

    app.router.lifespan_context = lifespan


def _has_metrics() -> bool:
    server_args = http_server.get_global_state().tokenizer_manager.server_args
    return bool(server_args.enable_metrics)


async def _start_service() -> BatchService:
    state = http_server.get_global_state()
    server_args = state.tokenizer_manager.server_args
    engine = SGLangEngine(state.tokenizer_manager, state.template_manager)
    await engine.connect()
    directory = Path(
        server_args.offline_batch_dir or platformdirs.user_data_path("sglang-batch")
    )
    service = BatchService(
        BatchStore(directory),
        OfflineBatchConfig.from_json(server_args.offline_batch_config),
        server_name=f"pid {get_main_process_id()}",
    )
    await service.start(engine, closing=lambda: engine.closing)
    assert service.runner is not None
    runner, manager = service.runner, state.tokenizer_manager
    # What online requests other workers had is not known here: there may be one.
    others = ("",) if server_args.tokenizer_worker_num > 1 else ()
    engine_death.listen(lambda: runner.engine_died([*manager.rid_to_state, *others]))
    logger.info("Offline batches: /v1/files and /v1/batches, kept in %s", directory)
    return service
