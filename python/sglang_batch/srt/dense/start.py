"""Which models the dense engine runs, and its start with or without an HTTP server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.runtime_context import (
    get_serving,
    publish,
    restore_context,
    snapshot_context,
)
from sglang.srt.utils import configure_logger
from sglang.srt.utils.hf_transformers_utils import get_config

from ...dense.embedding import embedding_reason, load_embedding_model
from ...dense.model import LoadedModel, ModelOptions, load_model
from ...dense.row_request import DenseSettings
from ...errors import ConfigError, ExitStatus
from ..compat.server_types import OfflineArgs
from .engine import DenseEngine

logger = logging.getLogger(__name__)


def _load(options: ModelOptions) -> LoadedModel:
    """The model, which is an :class:`EmbeddingModel` if it makes embeddings.

    Raises:
        ConfigError: it cannot be loaded.
    """
    reason = embedding_reason(options)
    if reason is None:
        return load_model(options)
    logger.info("An embedding model: %s.", reason)
    return load_embedding_model(options)


@contextmanager
def loaded_engine(
    server_args: OfflineArgs,
    model: ModelOptions,
    settings: DenseSettings,
) -> Iterator[DenseEngine]:
    """Load the model, and yield the engine, for the event loop that connects it.

    Args:
        server_args: SGLang's, which name the tokenizer, the template and the parsers.

    Raises:
        ConfigError: the model, its tokenizer or its template cannot be loaded.
    """
    # While the options were parsed, SGLang's log went to a buffer.
    configure_logger(server_args)
    loaded = _load(model)
    before = snapshot_context()
    try:
        try:
            publish(server_args, role="tokenizer")
            templates = TemplateManager()
            found = DenseEngine(server_args, loaded, settings, templates)
            templates.initialize_templates(
                found.manager,
                model_path=model.path,
                chat_template=get_serving().chat_template,
                completion_template=get_serving().completion_template,
            )
        except ConfigError:  # of the model itself
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"--model-path {model.path} has a tokenizer or template that cannot be "
                f"loaded: {error}; --tokenizer-path and --chat-template name others."
            ) from error
        try:
            yield found
        finally:
            found.stop()
    finally:
        restore_context(before)


@contextmanager
def engine(
    server_args: OfflineArgs,
    model: ModelOptions,
    settings: DenseSettings,
) -> Iterator[tuple[DenseEngine, asyncio.AbstractEventLoop]]:
    """As :func:`loaded_engine`, with an event loop for calls to the engine."""
    loop = asyncio.new_event_loop()
    try:
        with loaded_engine(server_args, model, settings) as found:
            yield found, loop
    finally:
        loop.run_until_complete(_cancel_tasks())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _cancel_tasks() -> None:
    """End what still runs on this event loop, such as the manager's own loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def serve(
    server_args: OfflineArgs, model: ModelOptions, settings: DenseSettings
) -> None:
    """Load the model and serve it until a signal ends the server.

    Raises:
        ConfigError: the model, its tokenizer or its template cannot be loaded.
    """
    from sglang.srt.entrypoints import http_server

    from ..plugin.main_process import enter_offline_main

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
    """The limits of a scheduler that SGLang's routes show."""
    return {
        "max_req_input_len": engine.manager.context_len - 1,
        "max_total_num_tokens": engine.max_cells,
    }


def _end_process() -> None:
    """End as SGLang does when its scheduler dies: a supervisor starts a new server."""
    from ..plugin import engine_death

    logger.error("The dense engine has failed; the server ends.")
    engine_death.tell()
    logging.shutdown()
    os._exit(ExitStatus.FAILED)


def why_not_sglang(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> str | None:
    """Why SGLang cannot run a model, or None if it can.

    It runs models that it has a class for, and those of transformers whose attention it
    can replace.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    try:
        config: Any = get_config(
            path, trust_remote_code=trust_remote_code, revision=revision
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model-path {path}: {error}") from error
    names = config.architectures or []
    if not names:
        return f"the configuration of {path} names no architecture"
    if any(ModelRegistry.is_arch_supported(name) for name in names):
        return None
    options = ModelOptions(path, revision=revision, trust_remote_code=trust_remote_code)
    embeds = embedding_reason(options)
    if embeds is not None:  # SGLang pools those of transformers in its own way
        return f"SGLang has no {names[0]}, and {embeds}"
    remote = "AutoModel" in (getattr(config, "auto_map", None) or {})
    for name in names:
        kind = getattr(transformers, name, None)
        if kind is None and remote:
            continue  # SGLang decides when it has loaded the code
        if kind is None or not kind.is_backend_compatible():
            return f"SGLang has no {name}, and cannot run that of transformers"
    return None
