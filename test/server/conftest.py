"""Quick polls, for all tests of batches at a server."""

from __future__ import annotations

import pytest

from sglang_batch.job import retrying_engine
from sglang_batch.server import result_saver, runner
from sglang_batch.server import runner as runner_module


@pytest.fixture
def quick_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.002)
    monkeypatch.setattr(runner, "CHECK_EVERY_S", 0.0002)
    monkeypatch.setattr(runner_module, "LOCK_PATIENCE_S", 0.05)
    monkeypatch.setattr(runner_module, "RETRY_AFTER_S", 0.01)
    monkeypatch.setattr(retrying_engine, "BACK_OFF_S", 0.001)
    monkeypatch.setattr(result_saver, "RETRY_S", 0.002)
