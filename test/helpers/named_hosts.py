"""Names of hosts that a test resolves."""

from __future__ import annotations

import socket
from typing import Any

import pytest


def named(monkeypatch: pytest.MonkeyPatch, **hosts: list[str]) -> list[str]:
    """Resolve these names, each time to the next of their addresses."""
    real, asked = socket.getaddrinfo, []

    def resolve(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        key = host.partition(".")[0]
        if key in hosts:
            asked.append(host)
            host = hosts[key].pop(0)
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked
