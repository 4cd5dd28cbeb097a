"""Starts the dense engine in this process, as ``srt.engine.in_process`` starts SGLang."""

from __future__ import annotations

import asyncio
import logging
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
from sglang.srt.utils import configure_logger

from ...dense.embedding.embedding_loading import (
    embedding_reason,
    load_embedding_model,
)
from ...dense.embedding.embedding_model import EmbeddingModel
from ...dense.embedding.embedding_worker import EmbeddingWorker
from ...dense.loading.model_probe import rows_for
from ...dense.model import LoadedModel, load_model
from ...dense.row_request import OnAnswer
from ...dense.settings import DenseSettings
from ...dense.worker import DenseWorker
from ...errors import ConfigError
from ..compat.server_types import OfflineArgs
from .dense_engine import DenseEngine, MakeWorker, Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How the model is loaded; see :func:`sglang_batch.dense.model.load_model`.

    is_embedding: it makes embeddings, even if it could generate.
    """

    path: str
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    attention: str | None = None
    context_len: int | None = None
    is_embedding: bool = False

    def load(self) -> LoadedModel:
        """The model, which is an :class:`EmbeddingModel` if it makes embeddings.

        Raises:
            ConfigError: it cannot be loaded.
        """
        trusted, revision = self.trust_remote_code, self.revision
        reason = embedding_reason(
            self.path,
            asked=self.is_embedding,
            trust_remote_code=trusted,
            revision=revision,
        )
        if reason is not None:
            logger.info("An embedding model: %s.", reason)
        load = load_model if reason is None else load_embedding_model
        return load(
            self.path,
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=trusted,
            revision=revision,
            attention_kind=self.attention,
            context_len=self.context_len,
        )


def dense_worker(
    loaded: LoadedModel, settings: DenseSettings, on_answer: OnAnswer, tokenizer: Any
) -> Worker:
    """The worker of a model, with the kind of rows that it can have."""
    if isinstance(loaded, EmbeddingModel):
        return EmbeddingWorker(loaded, settings, on_answer)
    rows, _ = rows_for(loaded, settings)  # which has logged a reason against sharing
    return DenseWorker(loaded, rows, settings, on_answer, tokenizer)


@contextmanager
def loaded_engine(
    server_args: OfflineArgs,
    model: ModelOptions,
    settings: DenseSettings,
    make_worker: MakeWorker = dense_worker,
) -> Iterator[DenseEngine]:
    """Load the model, and yield the engine, for the event loop that connects it.

    Args:
        server_args: SGLang's, which name the tokenizer, the template and the parsers.

    Raises:
        ConfigError: the model, its tokenizer or its template cannot be loaded.
    """
    # While the options were parsed, SGLang's log went to what they print.
    configure_logger(server_args)
    loaded = model.load()
    before = snapshot_context()
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
    make_worker: MakeWorker = dense_worker,
) -> Iterator[tuple[DenseEngine, asyncio.AbstractEventLoop]]:
    """As :func:`loaded_engine`, with an event loop for calls to the engine."""
    loop = asyncio.new_event_loop()
    try:
        with loaded_engine(server_args, model, settings, make_worker) as found:
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
