"""Timed steps on disk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sglang_batch.errors import StoreWriteError
from sglang_batch.store.measured_costs import (
    MOST_ENTRIES,
    STEPS_FILE,
    TimedSteps,
    TimedStepsKey,
    keep_steps,
    kept_steps,
    timed_steps_path,
)

KEY = TimedStepsKey(
    device="cpu, 1 threads", model="0" * 16, attention_backend="torch_native",
    parallelism="TP1", mixed=True,
)  # fmt: skip
ENTRY = TimedSteps(key=KEY, samples=[[0.5, 1, 1, 0, 1, 0]], measured_at="2026-01-01")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / STEPS_FILE


def test_steps_of_each_engine_are_kept(path: Path) -> None:
    assert kept_steps(KEY, path) is None
    assert keep_steps(ENTRY, path) == path
    other = msgspec.structs.replace(
        ENTRY, key=msgspec.structs.replace(KEY, mixed=False)
    )
    keep_steps(other, path)
    newer = msgspec.structs.replace(ENTRY, samples=[], measured_at="2026-02-02")
    keep_steps(newer, path)
    assert kept_steps(KEY, path) == newer
    assert kept_steps(other.key, path) == other


def test_the_oldest_engines_are_forgotten(path: Path) -> None:
    for number in range(MOST_ENTRIES + 3):
        key = msgspec.structs.replace(KEY, model=str(number))
        keep_steps(msgspec.structs.replace(ENTRY, key=key), path)
    assert kept_steps(msgspec.structs.replace(KEY, model="2"), path) is None
    assert kept_steps(msgspec.structs.replace(KEY, model="3"), path) is not None


@pytest.mark.parametrize("text", ["", "{}", '{"version": 9, "engines": []}', "[1]"])
def test_an_unusable_file_means_that_nothing_is_known(
    path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_text(text)
    assert kept_steps(KEY, path) is None
    assert "cannot be used" in caplog.text
    assert "sglang-batch calibrate" in caplog.text
    keep_steps(ENTRY, path)
    assert kept_steps(KEY, path) == ENTRY
    assert path.with_name(f"{STEPS_FILE}.unusable").read_text() == text


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreWriteError, match="cannot write"):
        keep_steps(ENTRY, tmp_path / "file" / STEPS_FILE)


def test_the_file_is_in_the_users_data_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert timed_steps_path() == tmp_path / "sglang-batch" / STEPS_FILE
