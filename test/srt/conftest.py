"""Real SGLang: one offline server for all tests that do not hurt it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompts import Case, reference
from servers import Server, server

# Importing SGLang warns of what it cannot do without an accelerator, and its
# dependencies of one another: import it all once, before warnings become errors.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.entrypoints.engine
    import sglang.srt.entrypoints.http_server  # noqa: F401

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
