"""Fixtures for tests of jobs: a compiled planner, and early samples and plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dispatcher_jobs import DUAL, planner_of, two_kinds

from sglang_batch.job import answer_feedback, job_planner, live_plan, retrying_engine


@pytest.fixture(scope="session")
def compiled() -> None:
    """Compile the planner before anything waits for it."""
    for policy in ("auto", DUAL):
        for shards in (1, 2):
            planner_of(two_kinds(8), policy, shards).plans()


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying_engine, "BACK_OFF_S", 0.001)


@pytest.fixture
def one_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan has all requests."""
    monkeypatch.setattr(live_plan, "FIRST_REQUESTS", 1 << 20)
    monkeypatch.setattr(live_plan, "FIRST_TOKENS", 1 << 40)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small jobs have samples and new plans too."""
    monkeypatch.setattr(job_planner, "MIN_SAMPLED", 4)
    monkeypatch.setattr(answer_feedback, "_MIN_ANSWERS", 2)
    yield
