"""``sglang-batch serve``: an offline server, checked before SGLang is imported.

With ``--workers`` it is the front of other offline servers, and has no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import socket
import sys
import warnings
from pathlib import Path

import platformdirs

from ..config import OfflineBatchConfig
from ..errors import ConfigError, ExitStatus, StoreError
from ..store.files import check_directory
from .backend_options import (
    BACKENDS,
    OPTIONS_OF_WORKERS,
    SERVER_OPTIONS,
    BackendParser,
    chosen_backend,
    transformers_options,
    transformers_settings,
)
from .fleet_options import EngineOptions, WorkerOptions
from .model_place import check_model

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 30000


def serve(engine: EngineOptions) -> int:
    """Become ``python -m sglang.launch_server --offline-batch``, or serve with ours.

    The engine's options include those of the server.

    Raises:
        ConfigError: an option or the model cannot be used.
        StoreError: another server uses the port or the directory.
    """
    backend, argv = engine.backend, [*engine.argv]
    if isinstance(engine, WorkerOptions):
        return _serve_front(engine)
    from ..srt.compat.command_line import check_arguments

    if backend == "auto":
        backend, reason = chosen_backend(argv)
        print(f"--backend {backend}: {reason}.", file=sys.stderr)
    if backend == "transformers":
        check_server(transformers_options(argv, server=True))
        settings = transformers_settings(argv, server=True)
        from ..srt.dense.engine import serve as serve_dense

        serve_dense(*settings)
        return ExitStatus.OK
    if not {"-h", "--help"} & set(argv):
        check_server(check_arguments(argv))
    from ..srt.plugin.serve_help import exec_module

    # Python would warn that `sglang serve` is the recommended command.
    warnings.filterwarnings("ignore", "'python -m sglang.launch_server'", UserWarning)
    return exec_module("sglang.launch_server", ["--offline-batch", *argv])


def _serve_front(fleet: WorkerOptions) -> int:
    if fleet.backend != BACKENDS[0]:
        raise ConfigError(
            f"--backend {fleet.backend}: the servers of --workers have their engines already; "
            "leave it out."
        )
    known = _front_options([*fleet.argv])
    config = OfflineBatchConfig.from_json(known.offline_batch_config)
    _check_port(known.host, known.port)
    directory = _batch_directory(known)
    check_directory(directory)
    from ..fleet.http_fleet import served_model

    served_model(fleet.urls, fleet.api_key, may_be_away=True)
    from ..server.http import front_server

    serving = front_server.serve(fleet.urls, fleet.api_key, known, directory, config)
    asyncio.run(serving)
    return ExitStatus.OK


def _front_options(argv: list[str]) -> argparse.Namespace:
    """The options of a server without an engine. ConfigError: one is not, or its value."""
    from ..srt.compat.command_line import add_options

    parser = BackendParser()
    add_options(parser, *SERVER_OPTIONS, "offline_batch_config")
    parser.set_defaults(host=DEFAULT_HOST, port=DEFAULT_PORT, log_level="info")
    return parser.known(argv, OPTIONS_OF_WORKERS)


def check_server(known: argparse.Namespace) -> None:
    """Check a server's options as far as possible without SGLang.

    Raises:
        ConfigError: an option or the model cannot be used.
        StoreError: another server uses the port or the directory.
    """
    OfflineBatchConfig.from_json(getattr(known, "offline_batch_config", None))
    if not vars(known):  # the port and the directory may be in a file (--config)
        return
    from ..srt.compat.command_line import check_device

    check_device(known)
    check_model(known)
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        if (file := getattr(known, name, None)) and not Path(file).is_file():
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {file}: there is no such file.")
    host = getattr(known, "host", DEFAULT_HOST)
    _check_port(host, getattr(known, "port", DEFAULT_PORT))
    check_directory(_batch_directory(known))


def _batch_directory(known: argparse.Namespace) -> Path:
    given = getattr(known, "offline_batch_dir", None)
    return Path(given or platformdirs.user_data_path("sglang-batch"))


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise StoreError(
                    f"port {port} of {host} is in use; choose another with --port."
                ) from None
            raise ConfigError(f"cannot listen on {host}:{port}: {error}.") from None
