"""The flag: ``--offline-batch`` and its companions on SGLang's server arguments.

With the flag, SGLang's argument record is an :class:`OfflineServerArgs`; without
it, it stays the stock class. The record is pickled to every process SGLang
starts, and un-pickling one is how a child process learns that it belongs to an
offline server, before any plugin is loaded there.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import sglang.srt.server_args as stock
from sglang.srt.environ import envs

from ..config import OfflineBatchConfig
from ..errors import ConfigError, SGLangBatchError
from .support import ATTENTION_ARGUMENTS, ATTENTION_BACKEND

FLAG = "offline_batch"
COMPANIONS = ("offline_batch_config", "offline_batch_dir")
# Ways to run SGLang in which its HTTP server or its processes are not the usual ones.
UNSUPPORTED = ("grpc_mode", "smg_grpc_mode", "encoder_only", "use_ray")


class OfflineServerArgs(stock.ServerArgs):  # type: ignore[misc]
    """SGLang's server arguments plus ours; exists only in offline mode."""

    # SGLang groups fields by namespace: get_context().config_bag("offline").
    _NS_PATH = "offline"

    offline_batch: bool = False
    offline_batch_config: str | None = None
    offline_batch_dir: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        _rebuild_stock, args = super().__reduce__()
        return rebuild, args

    @property
    def offline_config(self) -> OfflineBatchConfig:
        return OfflineBatchConfig.from_json(self.offline_batch_config)


def rebuild(
    cls: type, fields: dict[str, Any], bookkeeping: dict[str, Any]
) -> OfflineServerArgs:
    """Un-pickle a record in a child process, and make that process an offline one."""
    from . import plugin

    record: OfflineServerArgs = stock._rebuild_server_args(cls, fields, bookkeeping)
    plugin.enter_offline_child(record.offline_config.scheduler)
    return record


def add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    """AFTER hook on ``ServerArgs.add_cli_args``: the flags, for parser and --help."""
    group = parser.add_argument_group("offline batch (sglang-batch)")
    group.add_argument(
        "--offline-batch",
        action="store_true",
        help="Serve batch jobs: adds /v1/files and /v1/batches, and runs each batch "
        "in the order that shares most prefixes.",
    )
    group.add_argument(
        "--offline-batch-config",
        metavar="JSON",
        help="Settings of offline batches as a JSON object, for example "
        '\'{"policy": "dfs", "max_inflight": 2048}\'.',
    )
    group.add_argument(
        "--offline-batch-dir",
        metavar="DIR",
        help="Directory for uploaded files, batch state and results. "
        "Default: sglang-batch in the user's data directory.",
    )


def from_cli_args(original: Any, cls: type, args: argparse.Namespace) -> Any:
    """AROUND hook on ``ServerArgs.from_cli_args``: pick the record's class."""
    if getattr(args, FLAG, False):
        try:
            _activate(vars(args))
        except SGLangBatchError as error:
            raise SystemExit(f"error: {error}") from error
        record = original(OfflineServerArgs, args)
        # What is found out later, once the model's configuration is read, can then
        # also end the command with one sentence (srt/defaults.py).
        record._offline_from_cli = True
        return record
    for name in COMPANIONS:
        if getattr(args, name, None) is not None:
            flag = "--" + name.replace("_", "-")
            raise SystemExit(f"error: {flag} needs --offline-batch.")
    for name in ATTENTION_ARGUMENTS:
        if getattr(args, name, None) == ATTENTION_BACKEND:
            flag = f"--{name.replace('_', '-')} {ATTENTION_BACKEND}"
            raise SystemExit(f"error: {flag} needs --offline-batch.")
    return original(cls, args)


def make_server_args(**kwargs: Any) -> Any:
    """What ``sglang.Engine(**kwargs)`` builds its arguments with."""
    if kwargs.get(FLAG, False):
        if isinstance(kwargs.get("offline_batch_config"), dict):
            kwargs["offline_batch_config"] = json.dumps(kwargs["offline_batch_config"])
        _activate(kwargs)
        return OfflineServerArgs(**kwargs)
    for name in (FLAG, *COMPANIONS):
        if kwargs.pop(name, None):
            raise ConfigError(f"{name} needs offline_batch=True.")
    return stock.ServerArgs(**kwargs)


def _activate(values: dict[str, Any]) -> None:
    from . import client_keys, plugin, seams, support

    config = OfflineBatchConfig.from_json(values.get("offline_batch_config"))
    for name in UNSUPPORTED:
        if values.get(name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"--offline-batch does not work with {flag}; drop one.")
    if envs.SGLANG_RUST_SERVER.get():
        raise ConfigError(
            "--offline-batch needs SGLang's Python server; unset SGLANG_RUST_SERVER."
        )
    named = [values.get(name) for name in ATTENTION_ARGUMENTS]
    if config.attention == "stock" and ATTENTION_BACKEND in named:
        raise ConfigError(
            f'attention="stock" contradicts --attention-backend {ATTENTION_BACKEND}; '
            "drop one."
        )
    client_keys.check_client_keys(values, config)
    if config.scheduler == "offline":
        support.check_supported(values)
    plugin.enter_offline_main()
    if config.scheduler == "offline":
        seams.check_seams()
