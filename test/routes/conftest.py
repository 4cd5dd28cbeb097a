"""The HTTP API in this process: a server of a test's own, and a shared one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from route_server import Server, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, with nothing in it."""
    with serving(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all the tests that are refused everything: nothing gets into it."""
    with serving(tmp_path_factory.mktemp("bare")) as server:
        yield server
        for path in ("/v1/files", "/v1/batches"):
            assert server.http.get(path).json()["data"] == []
