"""What tests of jobs and batches share: a compiled planner, early plans, quick polls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from feed_jobs import DUAL, planner_of, two_kinds

from sglang_batch import job_planning, learning, line_tries, saving
from sglang_batch import runner as runner_module


@pytest.fixture(scope="session")
def compiled() -> None:
    """Compile the planner before anything waits for it."""
    for policy in ("auto", DUAL):
        for shards in (1, 2):
            planner_of(two_kinds(8), policy, shards).plans()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small jobs have samples and new plans too."""
    monkeypatch.setattr(job_planning, "MIN_SAMPLED", 4)
    monkeypatch.setattr(learning, "_MIN_ANSWERS", 2)
    yield


@pytest.fixture
def quick_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.002)
    monkeypatch.setattr(runner_module, "LOCK_PATIENCE_S", 0.05)
    monkeypatch.setattr(runner_module, "RETRY_AFTER_S", 0.01)
    monkeypatch.setattr(line_tries, "BACK_OFF_S", 0.001)
    monkeypatch.setattr(saving, "RETRY_S", 0.002)
