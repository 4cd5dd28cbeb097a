"""Which Ray cluster a fleet is on, and whether it answers. Imports nothing of Ray."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

from ...errors import ConfigError

CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class RayFleet:
    """The cluster and the engines of a fleet.

    address: ``auto`` for the cluster that this machine is in, or ``host:port``.
    min_engines: the job waits for so many.
    needed_engines: so many must have room now.
    max_engines: it uses up to so many.
    resources: of each engine, by Ray's names, such as ``GPU`` and ``CPU``.
    """

    address: str
    min_engines: int
    needed_engines: int
    max_engines: int
    resources: Mapping[str, float] = field(default_factory=dict)


def check_ray(address: str) -> None:
    """Raise ConfigError unless Ray is installed and its cluster answers."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--ray needs Ray, which is not installed: pip install 'sglang-batch[ray]'."
        ) from None
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError(
            f"--ray {address} is not an address; write auto, or host:port of the "
            "cluster's head node, such as 10.0.0.1:6379."
        )
    try:
        with closing(socket.create_connection((host, int(port)), CONNECT_S)):
            pass
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--ray {address} does not answer ({error}); start a cluster there with "
            "`ray start --head`."
        ) from None
