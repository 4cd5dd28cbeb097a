"""Prompts of these tests are tiny: requests wait for prefixes of any length."""

from __future__ import annotations

import pytest

from sglang_batch.scheduling import prefix_uses


@pytest.fixture(autouse=True)
def _every_token_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_uses, "SHORTEST_AWAITED", 1)
