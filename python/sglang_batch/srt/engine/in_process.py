"""SGLang in this process: its argument parser, and an engine without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil  # type: ignore[import-untyped]

from ...errors import ConfigError, SGLangBatchError
from ..compat.server_types import OfflineArgs
from .sglang_engine import SGLangEngine


def parse_server_args(argv: list[str]) -> OfflineArgs:
    """Parse ``argv`` with SGLang's own argument parser, in offline mode.

    Raises:
        ConfigError: SGLang refuses an argument. Its usage message is on standard error.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    if not any(arg.split("=")[0] == "--log-level" for arg in argv):
        argv = [*argv, "--log-level", "warning"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed: OfflineArgs = prepare_server_args([*argv, "--offline-batch"])
    except SystemExit as end:
        if not end.code:  # --help
            raise
        lines = said.getvalue().strip().splitlines() or [str(end.code)]
        raise ConfigError(lines[-1].rpartition("error: ")[2]) from None
    except SGLangBatchError:
        raise
    except Exception as error:  # such as those of the file of --config
        traceback.print_exc()
        raise ConfigError(f"SGLang refuses an option: {_one_line(error)}") from None
    finally:
        sys.stderr.write(said.getvalue())
    return parsed


def resolve(server_args: OfflineArgs, on_death: Callable[..., None]) -> None:
    """Have SGLang read the model's configuration, and set what is not given.

    Args:
        on_death: SGLang's children signal this process when they fail, and it calls
            this. A function of a module, since SGLang pickles its arguments.

    Raises:
        ConfigError: SGLang refuses the model or an argument. Its traceback is on
            standard error.
    """
    server_args.custom_sigquit_handler = on_death
    server_args._offline_from_cli = False  # raise our errors
    try:
        server_args.resolve_once()
    except SGLangBatchError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise ConfigError(
            f"SGLang refuses the model or an option: {_one_line(error)}"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def memory_note(server_args: OfflineArgs) -> str:
    """The size of the KV cache, if it is our default for a CPU, else empty."""
    from .cpu_memory import NOTE

    return str(getattr(server_args, NOTE, ""))


def model_name(server_args: OfflineArgs) -> str:
    """The model's name in requests."""
    return str(server_args.served_model_name or server_args.model_path)


@contextmanager
def engine(
    server_args: OfflineArgs,
) -> Iterator[tuple[SGLangEngine, asyncio.AbstractEventLoop]]:
    """Load the model, and yield the engine and the event loop for calls to it."""
    import sglang

    try:
        stock = sglang.Engine(server_args=server_args)
    except BaseException:
        kill_children()
        raise
    try:
        yield SGLangEngine(stock.tokenizer_manager, stock.template_manager), stock.loop
    finally:
        # SGLang's processor for LLaVA and Mistral 3 wraps another and cannot be shut down.
        manager: Any = stock.tokenizer_manager
        processor = getattr(manager, "mm_processor", None)
        manager.mm_processor = getattr(processor, "inner", processor)
        try:
            stock.shutdown()
        except KeyboardInterrupt:
            kill_children()
            raise


def kill_children() -> None:
    """End the processes of an engine that failed."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=10)
