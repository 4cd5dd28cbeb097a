"""The engine of a run: ``--backend``, its options, and the function that loads the model."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from ..errors import ConfigError, UnknownOption
from .model_place import model_config
from .option_types import count

BACKENDS = ("sglang", "transformers", "auto")
# Options that also tell SGLang's classes how to render requests and to parse answers.
_SHARED = (
    *("tokenizer_path", "served_model_name", "revision", "chat_template"),
    *("tool_call_parser", "reasoning_parser", "offline_batch_config"),
)
# Options that are looked at before the engine starts.
_KNOWN = (
    *("model_path", "tokenizer_path", "served_model_name", "revision", "nnodes"),
    *("offline_batch_config", "grammar_backend", "json_model_override_args"),
    *("context_length", "allow_auto_truncate", "lora_paths"),
)
# Why a fleet of servers takes no other options.
OPTIONS_OF_WORKERS = (
    ": the servers of --workers have their model and options already; leave it out"
)
# Options of SGLang's HTTP server that servers of ours have, too.
SERVER_OPTIONS = (
    *("host", "port", "log_level", "api_key", "admin_api_key", "offline_batch_dir"),
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password"),
    "enable_metrics",
)

StartEngine = Callable[[], AbstractContextManager[Any]]
"""Loads the model. The context is an engine and its event loop."""


class BackendParser(argparse.ArgumentParser):
    """Takes the options that it was given, and raises errors instead of ending the process."""

    def __init__(self, **others: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, **others)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `sglang-batch run --help`.")

    def known(self, argv: Sequence[str], why: str) -> argparse.Namespace:
        """The options in ``argv``.

        Raises ConfigError if a value cannot be used, or an option is unknown, which the
        message says ``why``.
        """
        known, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [action.option_strings[0] for action in self._actions]
            name = unknown[0].partition("=")[0]
            raise UnknownOption(
                f"{name}{why}. The options here are {', '.join(flags)}.", unknown, flags
            )
        return known


def known_arguments(backend: str, argv: list[str]) -> argparse.Namespace:
    """The options of an engine that are given, by SGLang's names for them.

    Only for options in a file (``--config``) is SGLang imported, which reads it.

    Raises ConfigError if an option is unknown, or its value cannot be used.
    """
    if backend == "transformers":
        return transformers_options(argv)
    from ..srt.compat.command_line import check_arguments

    known = check_arguments(argv)
    if "model_path" in known:
        return known
    from ..srt.engine import in_process

    server_args = in_process.parse_server_args(argv)
    values = {name: getattr(server_args, name, None) for name in _KNOWN}
    return argparse.Namespace(**{k: v for k, v in values.items() if v is not None})


def transformers_options(
    argv: list[str], *, server: bool = False
) -> argparse.Namespace:
    """The options of the transformers backend that are given, or of a server with it.

    Raises ConfigError if an option is not among them, or its value cannot be used.
    """
    from ..srt.compat.command_line import add_options

    parser = BackendParser(argument_default=argparse.SUPPRESS)
    if server:
        add_options(parser, *SERVER_OPTIONS)
    add_options(
        parser,
        "model_path",
        "device",
        "random_seed",
        "trust_remote_code",
        "is_embedding",
    )
    add_options(parser, "dtype", *_SHARED, choices=None)  # transformers has others
    for name in ("context_length", "max_running_requests", "max_total_tokens"):
        add_options(parser, name, type=count)
    parser.add_argument("--attn-implementation")
    why = " is an option of SGLang's, which --backend transformers does not know"
    known = parser.known(argv, why)
    if "model_path" not in known:
        raise ConfigError("--model-path MODEL is required.")
    return known


def check_remote_code(known: argparse.Namespace) -> None:
    """Check that a model which brings its own code is allowed to run it, if it is here.

    Raises ConfigError if it is not allowed.
    """
    config = model_config(known)
    if getattr(known, "trust_remote_code", False) or not config.get("auto_map"):
        return
    from transformers import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        raise ConfigError(
            f"--model-path {known.model_path} brings code of its own, in "
            f"{', '.join(sorted(set(map(str, config['auto_map'].values()))))}. Read it, "
            "and pass --trust-remote-code to run it."
        )


def chosen_backend(argv: list[str]) -> tuple[str, str]:
    """The engine for ``--backend auto``, and why, in a few words.

    Raises ConfigError if the model's configuration cannot be read.
    """
    from ..srt.dense.engine import why_not_sglang

    known = known_arguments("auto", argv)
    reason = why_not_sglang(
        known.model_path,
        revision=getattr(known, "revision", None),
        trust_remote_code=getattr(known, "trust_remote_code", False),
    )
    if reason is None:
        return "sglang", "SGLang runs this model"
    return "transformers", reason


def transformers_engine(argv: list[str]) -> tuple[Any, StartEngine]:
    """SGLang's arguments for rendering, and a function that starts the dense engine.

    Raises ConfigError if an option cannot be used.
    """
    settings = transformers_settings(argv)
    from ..srt.dense.engine import engine

    return settings[0], partial(engine, *settings)


def transformers_settings(
    argv: list[str], *, server: bool = False
) -> tuple[Any, Any, Any]:
    """SGLang's arguments for rendering, the model's options and the dense engine's.

    Raises ConfigError if an option cannot be used.
    """
    given = vars(transformers_options(argv, server=server))
    check_remote_code(argparse.Namespace(**given))
    from ..dense.model import ModelOptions
    from ..dense.row_request import DenseSettings
    from ..srt.engine import in_process

    # SGLang computes nothing. It must not read the model, which it may refuse.
    passed = ["--model-path=none", "--device=cpu", "--enable-cache-report"]
    given.setdefault("log_level", "info")
    given.setdefault("tokenizer_path", given["model_path"])
    given.setdefault("served_model_name", given["model_path"])
    passed += [
        f"--{name.replace('_', '-')}" + f"={given[name]}" * (given[name] is not True)
        for name in (*_SHARED, *SERVER_OPTIONS, "trust_remote_code")
        if name in given
    ]
    server_args = in_process.parse_server_args(passed)
    model = ModelOptions(
        path=given["model_path"],
        dtype=given.get("dtype", "auto"),
        device=given.get("device"),
        trust_remote_code=given.get("trust_remote_code", False),
        revision=given.get("revision"),
        attention=given.get("attn_implementation"),
        context_len=given.get("context_length"),
        is_embedding=given.get("is_embedding", False),
    )
    settings = DenseSettings(
        max_rows=given.get("max_running_requests", DenseSettings().max_rows),
        max_cells=given.get("max_total_tokens"),
        seed=given.get("random_seed", 0),
    )
    return server_args, model, settings


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """SGLang's view of an engine's options.

    server_args: SGLang's arguments. None: the engines have their own.
    memory_note: the size of SGLang's KV cache where it is our default, else empty.
    start: loads the model in the chosen engine.
    note: which engine ``--backend auto`` chose and why, else empty.
    is_dense: whether it is the engine on transformers.
    """

    server_args: Any
    memory_note: str
    start: StartEngine
    note: str = ""
    is_dense: bool = False


def engine_settings(
    backend: str, argv: list[str], *, resolve: bool = True
) -> EngineSettings:
    """The settings that options name.

    Args:
        resolve: have SGLang read the model's configuration and look at this machine. False
            where the engine runs on another one.

    Raises ConfigError if an option or the model cannot be used.
    """
    from ..srt.engine import in_process
    from ..srt.plugin import engine_death

    note = ""
    if backend == "auto":
        backend, reason = chosen_backend(argv)
        note = f"--backend {backend}: {reason}."
    if backend == "transformers":
        server_args, start = transformers_engine(argv)
        return EngineSettings(server_args, "", start, note, is_dense=True)
    if not any(argument.split("=")[0] == "--log-level" for argument in argv):
        argv = [*argv, "--log-level=info"]
    server_args = in_process.parse_server_args(argv)
    memory_note = ""
    if resolve:
        in_process.resolve(server_args, engine_death.tell)
        memory_note = in_process.memory_note(server_args)
    start = partial(in_process.engine, server_args)
    return EngineSettings(server_args, memory_note, start, note)


@contextmanager
def started(
    backend: str, argv: list[str]
) -> Iterator[tuple[Any, asyncio.AbstractEventLoop]]:
    """Load the model that options name, in this process."""
    with engine_settings(backend, argv).start() as (engine, loop):
        yield engine, loop
