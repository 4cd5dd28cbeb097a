"""The append-only file below every log of results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_batch.errors import StoreWriteError
from sglang_batch.store.files import AppendLog


class Records(dict[int, bytes]):
    """Lines that begin with ``r`` are records, by their offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: list[tuple[int, bytes]] = []

    def open(self, path: Path) -> AppendLog:
        return AppendLog(path, self._read, self._note)

    def _read(self, offset: int, data: bytes) -> bool:
        if data.startswith(b"r"):
            self[offset] = data
        return data.startswith(b"r")

    def _note(self, log: AppendLog, offset: int, data: bytes) -> None:
        self.damaged.append((offset, data))


def test_records_are_read_back_with_their_offsets(tmp_path: Path) -> None:
    log = Records().open(tmp_path / "log")
    assert [log.append(data) for data in (b"r1\n", b"r22\n", b"r3\n")] == [0, 3, 7]
    assert log.read(3, 4) == b"r22\n"
    log.close()
    again = Records()
    again.open(tmp_path / "log").close()
    assert again == {0: b"r1\n", 3: b"r22\n", 7: b"r3\n"}
    assert again.damaged == []


@pytest.mark.parametrize("tail", [b"r4", b"x\n", b"\0" * 9, b"\n"])
def test_only_a_damaged_last_record_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"r1\nx\nr3\n" + tail)
    found = Records()
    log = found.open(path)
    assert found == {0: b"r1\n", 5: b"r3\n"}
    assert found.damaged == [(3, b"x\n")]
    assert path.read_bytes() == b"r1\nx\nr3\n"
    assert log.append(b"r4\n") == 8
    log.close()


def test_a_commit_covers_what_was_appended_before_it_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    log = Records().open(tmp_path / "log")
    log.commit()
    assert len(synced) == 0
    log.append(b"r1\n")
    log.commit()
    log.commit()
    assert len(synced) == 1
    log.close()
    log.close()
    assert log.closed
    assert len(synced) == 1


def test_a_file_that_cannot_be_read_back_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x\nr1\n")
    fds = os.listdir("/proc/self/fd")

    def refuse(log: AppendLog, offset: int, data: bytes) -> None:
        raise StoreWriteError(f"{log.path}: byte {offset}")

    with pytest.raises(StoreWriteError, match="/log: byte 0"):
        AppendLog(path, lambda offset, data: data.startswith(b"r"), refuse)
    assert os.listdir("/proc/self/fd") == fds
    assert path.read_bytes() == b"x\nr1\n"
