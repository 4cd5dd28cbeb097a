"""The HTTP API in this process: a new server for each test, and a shared one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from keyed_server import KEYS
from route_server import Server, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """An empty server for this test only."""
    with serving(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests whose calls are refused. It stays empty."""
    with serving(tmp_path_factory.mktemp("bare")) as server:
        yield server
        for path in ("/v1/files", "/v1/batches"):
            assert server.http.get(path).json()["data"] == []


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Server]:
    """A server with the key of an admin, ``key-root``, and of a client, ``key-ann``."""
    with serving(tmp_path, KEYS, api_key="key-root") as server:
        yield server
