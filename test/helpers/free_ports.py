"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket

# Below those that systems give to clients, so that none takes a port before its server does.
_PORTS = range(12_000, 30_000)
_draw = random.SystemRandom()


def free_port() -> int:
    while True:
        port = _draw.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
