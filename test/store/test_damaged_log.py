"""Damaged records of a result log: only their own results are lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from result_logs import lines_of, make_log, ordered, put

from sglang_batch.errors import StoreWriteError
from sglang_batch.store.result_log import ResultLog, finished_lines


def damage(path: Path, at: int, record: bytes) -> bytes:
    """Replace a record by other bytes; returns the records that follow it."""
    records = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*records[:at], record, *records[at + 1 :]]))
    return b"".join(records[at + 1 :])


def check_kept(path: Path, damaged: bytes, rest: bytes) -> None:
    """The log after it was opened: a blank line for the record, the rest untouched."""
    assert path.with_name(f"{path.name}.damaged").read_bytes() == damaged
    blank = b" " * (len(damaged) - 1) + b"\n"
    assert path.read_bytes().endswith(blank + rest)


@pytest.mark.parametrize(
    "record",
    [
        b"garbage\n",
        b"\0" * 70 + b"\n",
        b"[0,true,[1,1,1,1]\n",
        b"[9,true,[1,1,1,1],{}]\n",  # a request the job does not have
        b"[-1,true,[1,1,1,1],{}]\n",
        b"[0,true,[1,1,1],{}]\n",
        b'{"index":0}\n',
        b"\xff\n",
    ],
)
def test_a_damaged_record_is_kept_elsewhere_and_its_request_runs_again(
    tmp_path: Path, record: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_log(tmp_path / "log", [0, 1, 2])
    offset = len(path.read_bytes().splitlines(keepends=True)[0])
    rest = damage(path, 1, record)
    log = ResultLog(path, 5)
    assert log.unfinished().tolist() == [1, 3, 4]
    check_kept(path, record, rest)
    assert f"{path}: the record at byte {offset} ({len(record)} bytes)" in caplog.text
    put(log, 1)
    assert ordered(log) == (lines_of(0, 1, 2), b"", (3, 0))
    log.close()
    again = ResultLog(path, 5)
    assert again.unfinished().tolist() == [3, 4]
    check_kept(path, record, path.read_bytes()[offset + len(record) :])
    with open(path, "rb") as file:
        lines = b"".join(finished_lines(file, path.stat().st_size))
    assert lines == lines_of(0, 2, 1)
    again.close()


@pytest.mark.parametrize("num_zeros", [1, 8, 30])
def test_damage_over_the_end_of_a_record_costs_the_next_one_too(
    tmp_path: Path, num_zeros: int
) -> None:
    path = make_log(tmp_path / "log", [0, 1, 2, 3])
    records = path.read_bytes().splitlines(keepends=True)
    both = bytearray(records[1] + records[2])
    at = len(records[1]) - 1
    both[at : at + num_zeros] = b"\0" * num_zeros
    path.write_bytes(records[0] + both + records[3])
    log = ResultLog(path, 5)
    assert log.unfinished().tolist() == [1, 2, 4]
    check_kept(path, bytes(both), records[3])
    log.close()


def test_an_empty_line_is_nothing(tmp_path: Path) -> None:
    path = make_log(tmp_path / "log", [0, 1, 2])
    damage(path, 1, b"\n")
    log = ResultLog(path, 5)
    assert log.unfinished().tolist() == [1, 3, 4]
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_damaged_record_stays_in_place_until_there_is_space_to_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_log(tmp_path / "log", [0, 1, 2])
    rest = damage(path, 1, b"garbage\n")
    before = path.read_bytes()
    fds = os.listdir("/proc/self/fd")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreWriteError, match=r"log.damaged: No space left"):
            ResultLog(path, 5)
    assert path.read_bytes() == before
    assert os.listdir("/proc/self/fd") == fds
    path.with_name("log.damaged").unlink()
    ResultLog(path, 5).close()
    check_kept(path, b"garbage\n", rest)
