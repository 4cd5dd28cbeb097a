"""Lines that engines died of, kept for the next head."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_batch.errors import StoreError
from sglang_batch.fleet.head_state import MOST_DEATHS, SUSPECT_AFTER, CrashCounts

A, B = "job-00000001", "job-00000002"


def test_a_line_in_two_crashes_is_a_suspect_and_in_two_more_the_reason() -> None:
    crashes = CrashCounts()
    for deaths in range(1, MOST_DEATHS + 1):
        crashes.add([A])
        assert crashes.is_suspect(A) is (deaths >= SUSPECT_AFTER)
        assert crashes.is_reason(A) is (deaths >= MOST_DEATHS)
    assert not crashes.is_suspect(B)


def test_all_attempts_at_a_line_count() -> None:
    crashes = CrashCounts()
    crashes.add([A])
    crashes.add([f"{A}.try000001"])
    assert crashes.is_suspect(A)


def test_only_a_suspect_that_was_alone_explains_a_crash() -> None:
    crashes = CrashCounts()
    assert not crashes.explain([A])
    crashes.add([A, B])
    crashes.add([A, B])
    assert crashes.explain([A])
    assert not crashes.explain([A, B])
    assert not crashes.explain([])


def test_the_next_head_knows_them(tmp_path: Path) -> None:
    path = tmp_path / "crashes.json"
    CrashCounts(path).add([A, B])
    CrashCounts(path).add([A])
    found = CrashCounts(path)
    assert (found[A], found[B]) == (2, 1)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "crashes.json"
    path.write_text("{")
    with pytest.raises(StoreError, match=r"crashes\.json cannot be read"):
        CrashCounts(path)
