"""What all tests share: one thread per process, and the demo model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# The demo model's layers are so small that a second OpenMP thread only spins.
# Servers started by tests inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo model, written once for all tests."""
    from sglang_batch.demo_model import write_demo_model

    path = tmp_path_factory.mktemp("model") / "demo"
    write_demo_model(path)
    return path
