"""The log of finished requests, and its crash safety."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from result_logs import USAGE, lines_of, make_log, ordered, put

from sglang_batch.errors import StoreWriteError
from sglang_batch.request import Usage
from sglang_batch.store.result_log import ResultLog


def test_a_new_log_has_everything_to_do(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log", 3)
    assert len(log) == 3
    assert log.num_done == 0
    assert log.unfinished().tolist() == [0, 1, 2]
    assert ordered(log) == (b"", b"", (0, 0))
    log.close()


def test_results_are_counted_as_they_are_put(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log", 5)
    put(log, 3)
    put(log, 0, ok=False, usage=Usage(input_tokens=10))
    put(log, 4)
    assert (log.num_completed, log.num_failed, log.num_done) == (2, 1, 3)
    assert log.usage == Usage(18, 6, 4, 2)
    assert log.unfinished().tolist() == [1, 2]
    log.close()


def test_a_reopened_log_is_the_log_that_was_closed(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log", 5)
    put(log, 3)
    put(log, 0, ok=False)
    before = (log.num_completed, log.num_failed, log.usage, ordered(log))
    log.close()
    again = ResultLog(tmp_path / "log", 5)
    assert (
        again.num_completed,
        again.num_failed,
        again.usage,
        ordered(again),
    ) == before
    assert again.unfinished().tolist() == [1, 2, 4]
    put(again, 1)
    again.close()
    once_more = ResultLog(tmp_path / "log", 5)
    assert once_more.unfinished().tolist() == [2, 4]
    once_more.close()


def test_a_result_survives_a_process_that_never_closes_its_log(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log", 5)
    put(log, 2)
    again = ResultLog(tmp_path / "log", 5)
    assert again.unfinished().tolist() == [0, 1, 3, 4]
    again.close()
    log.close()


def test_the_first_result_of_a_request_is_the_one_that_counts(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log", 2)
    put(log, 1)
    log.put(1, b'"second"', ok=False, usage=USAGE)
    again = ResultLog(tmp_path / "log", 2)
    for opened in (log, again):
        assert (opened.num_completed, opened.num_failed) == (1, 0)
        assert opened.usage == USAGE
        assert ordered(opened) == (lines_of(1), b"", (1, 0))
        opened.close()


# Crashes ------------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_costs_that_record_alone(tmp_path: Path) -> None:
    whole = make_log(tmp_path / "whole", [4, 0, 2]).read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    assert start < len(whole) - 1
    path = tmp_path / "torn"
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        log = ResultLog(path, 5)
        assert log.unfinished().tolist() == [1, 2, 3], end
        assert log.usage == USAGE + USAGE, end
        assert path.stat().st_size == start, end
        put(log, 2)
        log.close()
        assert path.read_bytes() == whole, end


@pytest.mark.parametrize("tail", [b"\0" * 50, b"\0" * 50 + b"\n", b"garbage\n", b"["])
def test_a_last_record_of_something_else_is_dropped(
    tmp_path: Path, tail: bytes
) -> None:
    path = make_log(tmp_path / "log", [0, 1])
    good = path.read_bytes()
    path.write_bytes(good + tail)
    log = ResultLog(path, 5)
    assert log.num_done == 2
    log.close()
    assert path.read_bytes() == good


def test_a_full_disk_loses_no_earlier_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ResultLog(tmp_path / "log", 5)
    put(log, 0)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:9], at))
    with pytest.raises(StoreWriteError, match=r"/log: wrote 9 of"):
        put(log, 1)

    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreWriteError, match=r"/log: No space left"):
        put(log, 1)
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert log.unfinished().tolist() == [1, 2, 3, 4]
    put(log, 2)
    log.close()
    again = ResultLog(tmp_path / "log", 5)
    assert ordered(again) == (lines_of(0, 2), b"", (2, 0))
    again.close()


def test_a_log_is_closed_though_its_last_commit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fds = os.listdir("/proc/self/fd")
    log = ResultLog(tmp_path / "log", 5)
    put(log, 0)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(StoreWriteError, match="/log: No space left"):
        log.close()
    assert os.listdir("/proc/self/fd") == fds
    log.close()


# Writing out --------------------------------------------------------------------


def test_results_are_written_in_the_order_of_the_input(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log", 6)
    for index in (5, 1, 3, 0, 4, 2):
        put(log, index, ok=index % 3 != 0)
    assert ordered(log) == (lines_of(1, 2, 4, 5), lines_of(0, 3), (4, 2))
    log.close()


def test_one_file_for_both_has_all_results_in_order(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log", 3)
    for index in (2, 0, 1):
        put(log, index, ok=index != 1)
    both = io.BytesIO()
    assert log.write_ordered(both, both) == (2, 1)
    assert both.getvalue() == lines_of(0, 1, 2)
    log.close()


def test_requests_without_a_result_become_error_lines_in_their_place(
    tmp_path: Path,
) -> None:
    log = ResultLog(tmp_path / "log", 5)
    put(log, 3)
    put(log, 1, ok=False)

    def unrun(index: int) -> bytes:
        return b"unrun %d" % index

    outputs, errors, counts = ordered(log, unrun_line=unrun)
    assert outputs == lines_of(3)
    assert errors == b"unrun 0\n" + lines_of(1) + b"unrun 2\nunrun 4\n"
    assert counts == (1, 4)
    log.close()


def test_closing_twice_and_committing_twice_do_nothing_more(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log", 1)
    put(log, 0)
    log.commit()
    log.commit()
    log.close()
    log.close()
    log.commit()
