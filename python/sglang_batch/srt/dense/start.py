"""Starts the dense engine in this process, as ``srt.engine.in_process`` starts SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.runtime_context import (
    get_serving,
    publish,
    restore_context,
    snapshot_context,
)

from ...dense.model import LoadedModel, load_model
from ...dense.model_probe import rows_for
from ...dense.row_request import OnAnswer
from ...dense.settings import DenseSettings
from ...dense.worker import DenseWorker
from ...errors import ConfigError
from ..compat.server_types import OfflineArgs
from .dense_engine import DenseEngine, MakeWorker


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How the model is loaded; see :func:`sglang_batch.dense.model.load_model`."""

    path: str
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    attention: str | None = None
    context_len: int | None = None


def dense_worker(
    loaded: LoadedModel, settings: DenseSettings, on_answer: OnAnswer, tokenizer: Any
) -> DenseWorker:
    """The worker of a model, with the kind of rows that it can have."""
    rows, _ = rows_for(loaded, settings)  # which has logged a reason against sharing
    return DenseWorker(loaded, rows, settings, on_answer, tokenizer)


@contextmanager
def engine(
    server_args: OfflineArgs,
    model: ModelOptions,
    settings: DenseSettings,
    make_worker: MakeWorker = dense_worker,
) -> Iterator[tuple[DenseEngine, asyncio.AbstractEventLoop]]:
    """Load the model, and yield the engine and the event loop for calls to it.

    Args:
        server_args: SGLang's, which name the tokenizer, the template and the parsers.

    Raises:
        ConfigError: the model, its tokenizer or its template cannot be loaded.
    """
    loaded = load_model(
        model.path,
        dtype=model.dtype,
        device=model.device,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        attention_kind=model.attention,
        context_len=model.context_len,
    )
    before = snapshot_context()
    loop = asyncio.new_event_loop()
    try:
        try:
            publish(server_args, role="tokenizer")
            templates = TemplateManager()
            found = DenseEngine(server_args, loaded, settings, make_worker, templates)
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
            yield found, loop
        finally:
            found.stop()
    finally:
        loop.run_until_complete(_cancel_tasks())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        restore_context(before)


async def _cancel_tasks() -> None:
    """End what still runs on this event loop, such as the manager's own loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
