"""The index of lines of a growing file, against reading the file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sglang_batch.store.result_log import EVERY, LineIndex


def check(index: LineIndex, path: Path, line: int) -> None:
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.splitlines(keepends=True)
    with open(path, "rb") as file:
        assert index.seek(file, line) == (len(lines), len(whole))
        assert file.tell() == len(b"".join(lines[:line]))


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


@pytest.mark.parametrize("seed", range(4))
def test_lines_are_found_while_the_file_grows(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "log"
    append(path, b"")
    index = LineIndex()
    check(index, path, 5)
    for _ in range(60):
        lines = (b"x" * chance.randrange(9) for _ in range(chance.randrange(20)))
        append(path, b"\n".join(lines))  # the last one may be torn or incomplete
        for line in (0, EVERY - 1, EVERY, chance.randrange(600), 10_000):
            check(index, path, line)


def test_a_file_that_is_another_one_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"a\nbb\nccc\n")
    index = LineIndex()
    check(index, path, 2)
    path.write_bytes(b"d\n")
    check(index, path, 1)
    other = tmp_path / "other"
    append(other, b"eeee\nffff\n" * 5)
    other.replace(path)
    check(index, path, 3)
