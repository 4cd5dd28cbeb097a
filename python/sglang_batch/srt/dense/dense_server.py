"""SGLang's HTTP server with the batch service, over the dense engine in this process."""

from __future__ import annotations

import logging
import os

from sglang.srt.entrypoints import http_server

from ...dense.settings import DenseSettings
from ...errors import ExitStatus
from ..compat.server_types import OfflineArgs
from ..plugin import engine_death
from ..plugin.main_process import enter_offline_main
from .dense_engine import DenseEngine
from .start import ModelOptions, loaded_engine

logger = logging.getLogger(__name__)


def serve(
    server_args: OfflineArgs, model: ModelOptions, settings: DenseSettings
) -> None:
    """Load the model and serve it until a signal ends the server.

    Raises:
        ConfigError: the model, its tokenizer or its template cannot be loaded.
    """
    enter_offline_main()
    with loaded_engine(server_args, model, settings) as engine:
        manager = engine.manager
        manager.on_failure = _end_process
        # Batches and calls with lists use this engine, connected once the app starts.
        manager.offline_engine = engine
        http_server._setup_and_run_http_server(
            server_args,
            manager,
            engine.templates,
            None,  # ports of other processes
            [_limits(engine)],
            None,
        )


def _limits(engine: DenseEngine) -> dict[str, object]:
    """What SGLang's routes show of a scheduler."""
    return {
        "max_req_input_len": engine.manager.context_len - 1,
        "max_total_num_tokens": engine.max_cells,
    }


def _end_process() -> None:
    """End as SGLang does when its scheduler dies: a supervisor starts a new server."""
    logger.error("The dense engine has failed; the server ends.")
    engine_death.tell()
    logging.shutdown()
    os._exit(ExitStatus.FAILED)
