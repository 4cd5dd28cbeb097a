"""Real SGLang: one offline server for all tests that do not hurt it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prompts import Case, reference
from servers import Server, server

NUM_CASES = 60


@pytest.fixture(scope="session")
def cases(demo_model: Path) -> list[Case]:
    """Prompts with the answers that ``transformers`` gives."""
    return reference(demo_model, NUM_CASES)


@pytest.fixture(scope="session")
def offline_server(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with ``--offline-batch``, shared: leave it alive."""
    directory = tmp_path_factory.mktemp("offline-server")
    with server(
        demo_model,
        "--offline-batch",
        f"--offline-batch-dir={directory / 'batches'}",
        log_dir=directory,
    ) as running:
        yield running
