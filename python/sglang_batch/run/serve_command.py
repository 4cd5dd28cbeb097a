"""``sglang-batch serve``: an offline server, checked before SGLang is imported."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
from pathlib import Path

import platformdirs

from ..config import OfflineBatchConfig
from ..errors import ConfigError, ExitStatus, StoreError
from ..store.lock import FileLock
from .backend_options import chosen_backend, transformers_options, transformers_settings
from .model_place import check_model

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 30000


def serve(backend: str, argv: list[str]) -> int:
    """Become ``python -m sglang.launch_server --offline-batch``, or serve with ours.

    Args:
        backend: one of :data:`.backend_options.BACKENDS`.
        argv: the engine's options.

    Raises:
        ConfigError: an option or the model cannot be used.
        StoreError: another server uses the port or the directory.
    """
    from ..srt.compat.command_line import check_arguments

    if backend == "auto":
        backend, reason = chosen_backend(argv)
        print(f"--backend {backend}: {reason}.", file=sys.stderr)
    if backend == "transformers":
        return _serve_transformers(argv)
    if not {"-h", "--help"} & set(argv):
        check_server(check_arguments(argv))
    module = ["-m", "sglang.launch_server", "--offline-batch", *argv]
    sys.stdout.flush()
    # Python would warn that `sglang serve` is the recommended command.
    quiet = ["-W", "ignore:'python -m sglang.launch_server':UserWarning"]
    os.execv(sys.executable, [sys.executable, *quiet, *module])


def _serve_transformers(argv: list[str]) -> int:
    check_server(transformers_options(argv, server=True))
    settings = transformers_settings(argv, server=True)
    from ..srt.dense import dense_server

    dense_server.serve(*settings)
    return ExitStatus.OK


def check_server(known: argparse.Namespace) -> None:
    """Check what is known of a server's options without SGLang.

    Raises:
        ConfigError: an option or the model cannot be used.
        StoreError: another server uses the port or the directory.
    """
    OfflineBatchConfig.from_json(getattr(known, "offline_batch_config", None))
    if not vars(known):  # the port and the directory may be in a file (--config)
        return
    check_model(known)
    host = getattr(known, "host", DEFAULT_HOST)
    _check_port(host, getattr(known, "port", DEFAULT_PORT))
    directory = getattr(known, "offline_batch_dir", None)
    _check_directory(Path(directory or platformdirs.user_data_path("sglang-batch")))


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


def _check_directory(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise ConfigError(
            f"--offline-batch-dir {directory} is not a directory that can be written."
        )
    path = directory / "lock"
    if not path.exists():
        return
    lock = FileLock(path)
    try:
        holder = lock.acquire("sglang-batch serve")
    finally:
        lock.release()
    if holder is not None:
        raise StoreError(
            f"{directory} is in use by another server ({holder}); choose another "
            "--offline-batch-dir."
        )
