"""SGLang in process: arguments parsed as its server does, an engine without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from ..batch_api.lines import loads_lenient
from .endpoints import REQUEST_CLASSES, describe_validation_error
from .engine import SGLangEngine


def parse_server_args(argv: list[str]) -> Any:
    """SGLang's own argument parser over ``argv``, in offline mode.

    A wrong argument ends the process with SGLang's usage message, as it would when
    launching the server.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    if not any(arg.split("=")[0] == "--log-level" for arg in argv):
        argv = [*argv, "--log-level", "warning"]
    return prepare_server_args([*argv, "--offline-batch"])


def model_name(server_args: Any) -> str:
    """The name under which requests ask for the model."""
    return str(server_args.served_model_name or server_args.model_path)


def check_body(url: str, body: bytes) -> tuple[str, str | None] | None:
    """What SGLang's request class says of a body: (message, param), None if fine."""
    try:
        REQUEST_CLASSES[url].model_validate(loads_lenient(body))
    except ValidationError as error:
        return describe_validation_error(error)
    except ValueError as error:
        return str(error), "body"
    return None


@contextmanager
def engine(
    server_args: Any,
) -> Iterator[tuple[SGLangEngine, asyncio.AbstractEventLoop]]:
    """Load the model; yields the engine and the event loop its calls belong on."""
    import sglang

    stock = sglang.Engine(server_args=server_args)
    try:
        yield SGLangEngine(stock.tokenizer_manager, stock.template_manager), stock.loop
    finally:
        stock.shutdown()
