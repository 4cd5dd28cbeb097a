"""Each head's epoch is higher than those before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sglang_batch.store.files import next_epoch


def test_each_is_higher_than_the_last_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for now in (1000.0, 1000.2, 900.0, 2000.0):
        monkeypatch.setattr(time, "time_ns", lambda now=now: int(now * 1e9))
        found.append(next_epoch(tmp_path))
    assert found == [1_000_000, 1_000_200, 1_000_201, 2_000_000]


def test_that_of_a_new_directory_is_later_than_those_of_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000_000)
    first = next_epoch(tmp_path / "a")
    monkeypatch.setattr(time, "time_ns", lambda: 1_005_000_000_000)
    assert next_epoch(tmp_path / "b") > first
