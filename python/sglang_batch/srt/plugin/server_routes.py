"""Our routes and the batch runner on SGLang's HTTP server."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import platformdirs
from fastapi import FastAPI
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.multi_tokenizer_mixin import get_main_process_id

from ...errors import SGLangBatchError
from ...job.answer_cache import ModelAnswers
from ...job.job_planner import compile_planner
from ...server.http.all_routes import install
from ...server.http.authorization import KeyMiddleware
from ...server.metrics import published
from ...server.service import BatchService
from ...store.batch_store import BatchStore
from ..calls.call_items import engine_of
from ..compat.server_types import OfflineArgs
from ..disaggregation.pairing import stop_pairing
from ..disaggregation.prefill_routes import add_routes
from ..engine.strict_serving import make_strict
from . import engine_death, quiet_log
from .client_keys import ServerKeys, count_online_usage

logger = logging.getLogger(__name__)


# What tokenizer workers, which inherit it, import as their app.
APP_PATH = ("SGLANG_HTTP_SERVER_APP_PATH", "sglang_batch.srt.plugin.app:app")
# Seconds after which SGLang kills a tokenizer worker that does not answer, unless the user
# gives others. On a busy machine their imports take longer than SGLang's 10 s.
WORKER_PATIENCE = ("SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT", "60")


def run_server(
    original: Callable[..., None], server_args: OfflineArgs, *args: Any, **kwargs: Any
) -> None:
    """AROUND hook on SGLang's ``_setup_and_run_http_server``, with the engine's processes running.

    With several tokenizer workers the app runs in processes of its own, see :mod:`.app`.
    """
    keys = ServerKeys(server_args.offline_config)
    workers = server_args.tokenizer_worker_num
    if workers == 1:
        attach(http_server.app, keys)
        # Only now that every call is refused until our keys are in use.
        keys.replace_sglangs()
        quiet_log.hide_polls()
        try:
            original(server_args, *args, **kwargs)
        finally:
            quiet_log.show_polls()
        return
    logger.warning(
        "--tokenizer-worker-num %d: if only the worker that runs the batches dies, the "
        "engine keeps the lines that it had sent, and its batches may stop; restart the "
        "server then.",
        workers,
    )
    keys.replace_sglangs()
    with engine_death.telling_workers(), _worker_environment():
        original(server_args, *args, **kwargs)


@contextmanager
def _worker_environment() -> Iterator[None]:
    """In this block, processes that are started may become our tokenizer workers."""
    before = {name: os.environ.get(name) for name, _ in (APP_PATH, WORKER_PATIENCE)}
    os.environ.update([APP_PATH])
    os.environ.setdefault(*WORKER_PATIENCE)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def attach(app: FastAPI, keys: ServerKeys | None = None) -> None:
    """Add the routes, and start and stop the batch service with the app.

    keys: None in a tokenizer worker, which reads SGLang's arguments later.
    """
    app.add_middleware(KeyMiddleware)
    install(app)
    add_routes(app)
    stock_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        if keys is not None:
            keys.open_for_sglang()
        async with stock_lifespan(app) as state:
            # SGLang's serving objects, which answer online calls.
            for name, handler in list(app.state._state.items()):
                setattr(app.state, name, make_strict(handler))
            try:
                service = await _start_service()
                access = (keys or ServerKeys(service.config)).access(service.store)
            except SGLangBatchError as error:
                logger.error("error: %s", error)
                raise
            app.state.offline_batch_service = service
            try:
                manager = http_server.get_global_state().tokenizer_manager
                metrics = bool(manager.server_args.enable_metrics)
                async with published(service, metrics), access:
                    count_online_usage(manager, access)
                    app.state.offline_batch_access = access
                    yield state
            finally:
                await service.stop()
                service.store.close()
                await stop_pairing(manager)

    app.router.lifespan_context = lifespan


async def _start_service() -> BatchService:
    state = http_server.get_global_state()
    manager, server_args = state.tokenizer_manager, state.tokenizer_manager.server_args
    engine = await engine_of(manager, state.template_manager)
    directory = Path(
        server_args.offline_batch_dir or platformdirs.user_data_path("sglang-batch")
    )
    config, workers = server_args.offline_config, server_args.tokenizer_worker_num
    service = BatchService(
        BatchStore(directory),
        config,
        server_name=f"pid {get_main_process_id() if workers > 1 else os.getpid()}",
        answers=ModelAnswers(config, server_args.model_path, vars(server_args)),
    )
    if workers == 1:  # else one of several makes the plans
        threading.Thread(target=compile_planner, args=(config,), daemon=True).start()
    await service.start(engine, closing=lambda: engine.closing)
    assert service.runner is not None
    runner = service.runner
    # The online requests of other workers are unknown here, so assume that there is one.
    others = ("",) if workers > 1 else ()
    engine_death.listen(lambda: runner.engine_died([*manager.rid_to_state, *others]))
    logger.info("Offline batches: /v1/files and /v1/batches, kept in %s", directory)
    return service
