"""Which lines of an input changed since its job began."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_file
from input_files import batch_lines, packed, staged

from sglang_batch.inputs.local_input import LocalInput, describe_change, write_digests


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        ("abcde", "abxde", "line 3 changed"),
        ("abcde", "xbxdx", "line 1 and 2 more changed"),
        ("abcde", "abcdefg", "2 lines added after line 5"),
        ("abcde", "xabcde", "1 line added at the beginning"),
        ("abcde", "abe", "2 lines gone after line 2"),
        ("abcde", "", "5 lines gone at the beginning"),
        ("abcde", "abxyze", "2 lines after line 2 replaced by 3 lines"),
        ("aaaa", "aaa", "1 line gone after line 3"),
        ("abc", "abc", None),
    ],
)
def test_a_change_is_described_by_its_lines(
    tmp_path: Path, before: str, now: str, change: str | None
) -> None:
    path = make_file(tmp_path, "\n".join(before).encode(), "in.jsonl")
    local = LocalInput(path, "in.jsonl")
    write_digests(tmp_path / "digests", local)
    path.write_bytes("".join(f"{letter}\n" for letter in now).encode())
    assert describe_change(tmp_path / "digests", local) == change


def test_a_line_is_named_by_its_source(tmp_path: Path) -> None:
    first = make_file(tmp_path, batch_lines("a", "b"), "1.jsonl")
    second = make_file(tmp_path, packed(batch_lines("c", "d"), ".gz"), "2.jsonl.gz")
    write_digests(tmp_path / "digests", staged(tmp_path, first, second))
    second.write_bytes(packed(batch_lines("c", "e"), ".gz"))
    now = staged(tmp_path, first, second)
    change = describe_change(tmp_path / "digests", now)
    assert change == f"{second}, line 2 changed"


def test_without_digests_nothing_is_said(tmp_path: Path) -> None:
    local = LocalInput(make_file(tmp_path, b"a\n", "in.jsonl"), "in.jsonl")
    assert describe_change(tmp_path / "digests", local) is None
