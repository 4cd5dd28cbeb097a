"""Web files and remote files in memory."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest
from web_server import WebFiles, web_files

from sglang_batch.inputs import urls


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebFiles]:
    """A web server. Failed calls are repeated without a pause."""
    monkeypatch.setattr(urls, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with web_files() as server:
        yield server


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """The file system of ``memory://``, empty."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()
