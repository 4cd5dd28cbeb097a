"""The settings of a run: SGLang's arguments, ours, and what loads the model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config import OfflineBatchConfig
from .options.backend_options import (
    StartEngine,
    chosen_backend,
    transformers_engine,
    transformers_options,
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """SGLang's arguments, our settings, and the model before SGLang resolves it.

    memory_note: the size of SGLang's KV cache where it is our default, else empty.
    start: loads the model in the chosen engine.
    model, served_model: its path or name, and its name in requests.
    note: which engine ``--backend auto`` chose and why, else empty.
    """

    server_args: Any
    memory_note: str
    start: StartEngine
    config: OfflineBatchConfig
    model: str
    served_model: str
    note: str = ""


def engine_settings(
    backend: str, argv: list[str], *, resolve: bool = True, **given: Any
) -> EngineSettings:
    """The settings that options name.

    Args:
        backend: one of :data:`.options.backend_options.BACKENDS`.
        argv: the engine's options.
        resolve: have SGLang read the model's configuration and look at this machine. False
            where the engine runs on another one.
        given: settings of :class:`OfflineBatchConfig` that override those in ``argv``,
            unless None.

    Raises:
        ConfigError: an option or the model cannot be used.
    """
    from ..srt.engine import in_process
    from ..srt.plugin import engine_death

    note = ""
    if backend == "auto":
        backend, reason = chosen_backend(argv)
        note = f"--backend {backend}: {reason}."
    if backend == "transformers":
        server_args, start = transformers_engine(argv)
    else:
        if not any(argument.split("=")[0] == "--log-level" for argument in argv):
            argv = [*argv, "--log-level=info"]
        server_args = in_process.parse_server_args(argv)
        start = partial(in_process.engine, server_args)
    # Resolving may replace the names by the path of a downloaded file.
    model, served_model = server_args.model_path, in_process.model_name(server_args)
    memory_note = ""
    if backend == "transformers":
        model = transformers_options(argv).model_path
    elif resolve:
        in_process.resolve(server_args, engine_death.tell)
        memory_note = in_process.memory_note(server_args)
    changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    config = dataclasses.replace(server_args.offline_config, **changes)
    return EngineSettings(
        server_args, memory_note, start, config, model, served_model, note
    )


@contextmanager
def started(
    backend: str, argv: list[str]
) -> Iterator[tuple[Any, asyncio.AbstractEventLoop]]:
    """Load the model that options name, in this process."""
    with engine_settings(backend, argv).start() as (engine, loop):
        yield engine, loop
