"""What all tests share: one thread per process, and the demo model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Where a check of a helper fails, it shows what it compared, as in a test.
pytest.register_assert_rewrite(
    "attention_cases", "batch_service", "builders", "jsonl_files", "route_server"
)

# The same commit passes or fails the same way every time.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

# The demo model's layers are so small that a second OpenMP thread only spins.
# Servers started by tests inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


_EXIT_STATUS = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo model, written once for all tests."""
    from sglang_batch.demo_model import write_demo_model

    path = tmp_path_factory.mktemp("model") / "demo"
    write_demo_model(path)
    return path


@pytest.fixture(autouse=True)
def _warnings_are_logged() -> None:
    """SGLang sets the level of all logs of its process; another test may have run it."""
    logging.getLogger().setLevel(logging.WARNING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start SGLang come first, so that two processes end together."""
    items.sort(key=lambda item: item.path.parent.name != "srt")


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    session.config.stash[_EXIT_STATUS] = int(session.exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave without tearing the interpreter down, once SGLang was imported.

    sentencepiece, which SGLang brings, warns while the interpreter ends; under filters
    that make warnings errors it crashes there, after the summary, and would turn the
    exit status of a green run into that of a crash.
    """
    status = config.stash.get(_EXIT_STATUS, None)
    if status is not None and "sglang.srt" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@pytest.fixture
def accelerator() -> None:
    """Skip where there is no device."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
