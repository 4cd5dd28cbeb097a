"""``--offline-batch`` and its companions among SGLang's server arguments.

With the flag, SGLang's argument record is an :class:`OfflineServerArgs`. SGLang pickles it to
every process that it starts. Un-pickling marks a child process as part of an offline server,
before any plugin is loaded there.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import sglang.srt.server_args as stock
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins

from ...config import OfflineBatchConfig
from ...errors import ConfigError, SGLangBatchError, did_you_mean, refuse
from ...job import traces
from ..compat import support
from ..compat.offline_hooks import FLAG_HOOKS
from ..compat.support import ATTENTION_BACKEND, TRANSFER_BACKEND, as_flag
from .scheduler_process import enter_offline_child

logger = logging.getLogger(__name__)

FLAG = "offline_batch"
COMPANIONS = ("offline_batch_config", "offline_batch_dir")
# Arguments whose values are keys, and the text that is shown instead.
SECRETS = ("api_key", "admin_api_key")
REDACTED = "<redacted>"


class OfflineServerArgs(stock.ServerArgs):  # type: ignore[misc]
    """SGLang's server arguments and ours, in offline mode."""

    # SGLang groups fields by namespace: get_context().config_bag("offline").
    _NS_PATH = "offline"

    offline_batch: bool = False
    offline_batch_config: str | None = None
    offline_batch_dir: str | None = None

    def __reduce__(self) -> tuple[Callable[..., OfflineServerArgs], tuple[object, ...]]:
        _rebuild_stock, args = super().__reduce__()
        return rebuild, args

    def resolved_dict(self) -> dict[str, Any]:
        """The arguments, without keys, as SGLang logs them and shows them at /server_info."""
        shown: dict[str, Any] = super().resolved_dict()
        hidden = {name: REDACTED for name in SECRETS if shown.get(name)}
        return shown | hidden

    @property
    def launch_command(self) -> str | None:
        """The command line, without the keys that it contains."""
        command: str | None = super().launch_command
        for name in SECRETS:
            secret = getattr(self, name)
            if command is not None and secret:
                command = command.replace(secret, REDACTED)
        return command

    def __repr__(self) -> str:
        shown: str = super().__repr__()
        for name in SECRETS:
            if secret := getattr(self, name):
                shown = shown.replace(repr(secret), repr(REDACTED))
        return shown

    @property
    def offline_config(self) -> OfflineBatchConfig:
        backend = self.disaggregation_transfer_backend
        return _parsed(self.offline_batch_config, self.disaggregation_mode, backend)


@cache  # read for each request of the server
def _parsed(text: str | None, mode: object, backend: object) -> OfflineBatchConfig:
    return support.config_in_mode(OfflineBatchConfig.from_json(text), mode, backend)


def rebuild(
    cls: type, fields: dict[str, object], bookkeeping: dict[str, object]
) -> OfflineServerArgs:
    """Un-pickle a record, which marks this process as one of an offline server."""
    record: OfflineServerArgs = stock._rebuild_server_args(cls, fields, bookkeeping)
    if getattr(record, "_resolution_finished", False):
        enter_offline_child(record.offline_config.scheduler, record.disaggregation_mode)
    else:
        # A record that a program of the user passes on, for an engine in this process.
        from .main_process import enter_offline_main

        load_plugins()
        enter_offline_main()
    return record


def hook_flag() -> None:
    """Teach SGLang the flags, in the process that parses arguments."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    stock.add_attention_backend_choices([ATTENTION_BACKEND])
    stock.add_disagg_transfer_backend_choices([TRANSFER_BACKEND])
    cli_args_target, record_target = FLAG_HOOKS
    HookRegistry.register(cli_args_target, add_cli_args, HookType.AFTER)
    HookRegistry.register(record_target, from_cli_args, HookType.AROUND)
    # Set by hand: the registry would put our function in place of ServerArgs in
    # every module that imported the class.
    Engine.server_args_class = staticmethod(make_server_args)


def add_cli_args(result: object, parser: argparse.ArgumentParser) -> None:
    """AFTER hook on ``ServerArgs.add_cli_args``: adds the flags."""
    group = parser.add_argument_group("offline batch (sglang-batch)")
    group.add_argument(
        "--offline-batch",
        action="store_true",
        help="Serve the OpenAI batch API (/v1/files, /v1/batches) and run each batch in "
        "an order that reuses shared prompt prefixes.",
    )
    group.add_argument(
        "--offline-batch-config",
        metavar="JSON",
        help="Settings of offline batches (`sglang-batch serve --help` lists them) as a JSON "
        "object, for example "
        '\'{"policy": "auto", "max_batches": 2}\'. Needs --offline-batch.',
    )
    group.add_argument(
        "--offline-batch-dir",
        metavar="DIR",
        help="Directory for uploaded files, batch state and results (default: "
        "sglang-batch in the user's data directory). Needs --offline-batch.",
    )


def from_cli_args(
    original: Callable[..., stock.ServerArgs], cls: type, args: argparse.Namespace
) -> stock.ServerArgs:
    """AROUND hook on ``ServerArgs.from_cli_args``: picks the record's class."""
    if getattr(args, FLAG, False):
        try:
            _activate(vars(args))
        except SGLangBatchError as error:
            refuse(error)
        record = original(OfflineServerArgs, args)
        # Lets the checks of the model's configuration (``.defaults``) end the command
        # with an error message as well.
        record._offline_from_cli = True
        return record
    for name in COMPANIONS:
        if getattr(args, name, None) is not None:
            refuse(f"{as_flag(name)} needs --offline-batch.")
    for name, value in ours(vars(args)):
        refuse(f"{as_flag(name)} {value} needs --offline-batch.")
    return original(cls, args)


def make_server_args(**kwargs: Any) -> stock.ServerArgs:
    """The arguments of ``sglang.Engine(**kwargs)``."""
    if kwargs.get(FLAG, False):
        known = OfflineServerArgs.__struct_fields__
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"Engine has no argument {name!r}.{did_you_mean(name, known)}"
                )
        if isinstance(kwargs.get("offline_batch_config"), dict):
            kwargs["offline_batch_config"] = json.dumps(kwargs["offline_batch_config"])
        _activate(kwargs)
        if kwargs.get("sleep_on_idle") is False:
            # The command line has no such choice, so it is a setting.
            settings = json.loads(kwargs.get("offline_batch_config") or "{}")
            settings.setdefault("sleep_on_idle", False)
            kwargs["offline_batch_config"] = json.dumps(settings)
        return OfflineServerArgs(**kwargs)
    for name in (FLAG, *COMPANIONS):
        if kwargs.pop(name, None):
            raise ConfigError(f"{name} needs offline_batch=True.")
    for name, value in ours(kwargs):
        raise ConfigError(f"{name}={value!r} needs offline_batch=True.")
    return stock.ServerArgs(**kwargs)


def ours(values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """SGLang's arguments that have a value of ours, which only an offline engine knows."""
    for name in support.ATTENTION_ARGUMENTS:
        if values.get(name) == ATTENTION_BACKEND:
            yield name, ATTENTION_BACKEND
    name = "disaggregation_transfer_backend"
    if values.get(name) == TRANSFER_BACKEND:
        yield name, TRANSFER_BACKEND


def _activate(values: dict[str, Any]) -> None:
    from ...server.webhooks import read_endpoints
    from ..compat import private_api
    from ..engine.environment import set_default
    from .client_keys import check_client_keys
    from .main_process import enter_offline_main

    mode = values.get("disaggregation_mode")
    backend = values.get("disaggregation_transfer_backend")
    config = _parsed(values.get("offline_batch_config"), mode, backend)
    if envs.SGLANG_RUST_SERVER.get():
        raise ConfigError(
            "--offline-batch needs SGLang's Python server; unset SGLANG_RUST_SERVER."
        )
    support.check_flags(values, config)
    if not values.get("enable_trace") and (trial := traces.provider(logger.warning)):
        trial.shutdown()
        # The exporter reads the environment. SGLang's level 3 has a span for each token.
        values |= {"enable_trace": True, "otlp_traces_endpoint": ""}
        set_default("SGLANG_TRACE_LEVEL", "2")
        set_default(traces.PROTOCOL, traces.protocol())  # SGLang reads no other name
    check_client_keys(values, config)
    read_endpoints(config)
    if config.scheduler == "offline":
        # Evaluation harnesses ask for whole prompts. A plan fills every step, and answers do
        # not depend on the size.
        size = values.get("chunked_prefill_size")
        if isinstance(size, int) and size <= 0:
            logger.warning(
                "--chunked-prefill-size %d has no effect with the offline scheduler, which "
                "fills every step; SGLang's default size is used.",
                size,
            )
            values["chunked_prefill_size"] = None
    enter_offline_main()
    if config.scheduler == "offline":
        private_api.check_private_api()
        private_api.warn_of_changes()
