"""Several inputs as one, from files, pipes and standard input."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import make_file, make_line
from input_files import QUESTION, batch_lines, ids_of_lines, packed, staged

from sglang_batch.batch_api.lines import LineRules
from sglang_batch.errors import ConfigError, InputError
from sglang_batch.inputs import staging
from sglang_batch.inputs.job_input import (
    DatasetSource,
    InputSource,
    JobInput,
    LocalFileSource,
    StreamSource,
    UrlSource,
    input_sources,
)
from sglang_batch.inputs.staging import Staging


def test_a_single_file_of_lines_is_used_in_place(tmp_path: Path) -> None:
    path = make_file(tmp_path, batch_lines("a"))
    found = staged(tmp_path, path)
    assert found.path == path
    assert found.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert list((tmp_path / "job").iterdir()) == []


@pytest.mark.parametrize("suffix", [".gz", ".zst", ""])
def test_inputs_are_joined_in_their_order_and_lines_keep_their_names(
    tmp_path: Path, suffix: str
) -> None:
    first = make_file(
        tmp_path, b"\xef\xbb\xbf\n" + batch_lines("a", "b").rstrip(b"\n"), "1.jsonl"
    )
    # Two members or frames, like two files joined by `cat`.
    parts = [packed(batch_lines(each), suffix) for each in ("c", "d")]
    second = make_file(tmp_path, b"".join(parts), f"2.jsonl{suffix}")
    third = make_file(tmp_path, packed(batch_lines("e"), suffix), "3.jsonl")
    found = staged(tmp_path, first, second, third)
    lines = found.path.read_bytes().splitlines()
    assert lines == (b"\n" + batch_lines("a", "b", "c", "d", "e")).splitlines()
    assert [found.line_name(i) for i in range(1, 7)] == [
        *(f"{first}, line {i}" for i in (1, 2, 3)),
        *(f"{second}, line {i}" for i in (1, 2)),
        f"{third}, line 1",
    ]
    assert found.sha256() == hashlib.sha256(found.path.read_bytes()).hexdigest()


def test_an_error_names_the_file_and_its_line(tmp_path: Path) -> None:
    first = make_file(tmp_path, batch_lines("a", "b"), "1.jsonl")
    bad = b"nope\n\n" + batch_lines("b")
    second = make_file(tmp_path, packed(bad, ".gz"), "2.jsonl.gz")
    found = staged(tmp_path, first, second)
    with pytest.raises(InputError) as error:
        found.requests(LineRules())
    head, *said = str(error.value).splitlines()
    assert head == ("1.jsonl and 1 more cannot be run: 2 of 4 lines cannot be used.")
    assert said[0].startswith(f"  {second}, line 1: This line is not parseable")
    assert said[1].startswith(
        f"  {second}, line 3: The custom_id of this request is that of {first}, line 2 "
        "too;"
    )


def test_an_error_of_many_lines_is_told_once(tmp_path: Path) -> None:
    lines = [make_line(str(n), url="/v2") for n in range(300)]
    path = make_file(tmp_path, [*lines, "nope", make_line("good")], "1.jsonl")
    with pytest.raises(InputError) as error:
        staged(tmp_path, path).requests(LineRules())
    head, often, once = str(error.value).splitlines()
    assert head.endswith("301 of 302 lines cannot be used.")
    assert often.startswith("  line 1 (and 299 more): The URL provided")
    assert once.startswith("  line 301: This line is not parseable")


@pytest.mark.parametrize(("most", "ids"), [(1, "a"), (3, "abc"), (9, "abcd")])
def test_only_the_first_requests_are_taken(tmp_path: Path, most: int, ids: str) -> None:
    first = make_file(tmp_path, b"\n" + batch_lines("a", "b"), "1.jsonl")
    second = make_file(tmp_path, batch_lines("c", "d"), "2.jsonl")
    found = staged(tmp_path, first, second, max_requests=most)
    lines = found.path.read_bytes()
    assert lines == b"\n" + batch_lines(*ids)
    assert found.path != first


# Staged by an earlier run -----------------------------------------------------------


def test_a_staged_input_is_not_read_again_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_file(tmp_path, packed(batch_lines("a"), ".gz"), "1.jsonl.gz")
    made = []
    make = Staging._make

    def counted(self: Staging, job_input: JobInput) -> staging.Manifest:
        made.append(job_input)
        return make(self, job_input)

    monkeypatch.setattr(Staging, "_make", counted)
    first = staged(tmp_path, path)
    assert staged(tmp_path, path) == first
    assert len(made) == 1
    (tmp_path / "job" / "input.jsonl").write_bytes(b"half")  # truncated
    assert staged(tmp_path, path) == first
    path.write_bytes(packed(batch_lines("b", "c"), ".gz"))
    assert ids_of_lines(staged(tmp_path, path)) == ["b", "c"]
    assert ids_of_lines(staged(tmp_path, path, max_requests=1)) == ["b"]
    assert len(made) == 4
    (tmp_path / "job" / "input.json").write_bytes(b"{")
    (tmp_path / "job" / ".input.jsonl.1.tmp").write_bytes(b"of a run that was killed")
    assert ids_of_lines(staged(tmp_path, path, max_requests=1)) == ["b"]
    assert len(made) == 5
    names = [path.name for path in (tmp_path / "job").iterdir()]
    assert sorted(names) == ["input.json", "input.jsonl"]


# Standard input and pipes -----------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_standard_input_is_read_to_its_end_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    sums = []
    for ids in ("ab", "ab", "abc"):
        data = packed(batch_lines(*ids), suffix)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        found = staged(tmp_path, "-")
        assert ids_of_lines(found) == [*ids]
        assert found.line_name(1) == "standard input, line 1"
        sums.append(found.sha256())
    assert sums[0] == sums[1] != sums[2]


def test_a_pipe_is_read_like_standard_input(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = batch_lines("a", "b")
    writer = threading.Thread(target=lambda: pipe.write_bytes(data))
    writer.start()
    try:
        JobInput(input_sources((str(pipe),))).check()
        assert ids_of_lines(staged(tmp_path, pipe)) == ["a", "b"]
    finally:
        writer.join()


# Kinds of inputs -------------------------------------------------------------------


def test_each_name_is_resolved_to_one_kind(tmp_path: Path) -> None:
    pipe, saved = tmp_path / "pipe", tmp_path / "saved"
    os.mkfifo(pipe)
    saved.mkdir()
    (saved / "state.json").touch()
    names: dict[str, tuple[type[InputSource], str]] = {
        "-": (StreamSource, "standard input"),
        str(pipe): (StreamSource, "pipe"),
        "s3://bucket/a.jsonl?versionId=1": (UrlSource, "a.jsonl"),
        "hf-dataset:org/name": (DatasetSource, "hf-dataset:org/name"),
        str(saved): (DatasetSource, str(saved)),
        str(tmp_path / "none.jsonl"): (LocalFileSource, "none.jsonl"),
    }
    found = input_sources(names)
    assert [(type(each), each.short_title) for each in found] == [*names.values()]
    assert [each.repeatable for each in found] == [False, False, *[True] * 4]


def test_a_changed_file_is_noticed_by_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "of:today.jsonl"
    path.write_bytes(b"1")
    [source] = input_sources([str(path)])
    before = source.identity()
    path.write_bytes(b"12")
    assert source.identity() != before


# Refused inputs ----------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["cut", "flipped", "other"])
def test_damaged_files_are_named(tmp_path: Path, suffix: str, kind: str) -> None:
    whole = zstd_with_checksum(
        suffix, b"".join(make_line(str(i)).encode() for i in range(99))
    )
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    data = {"cut": whole[:-3], "flipped": flipped, "other": b"{}\n"}[kind]
    path = make_file(tmp_path, data, f"1.jsonl{suffix}")
    with pytest.raises(InputError, match=f"1.jsonl{suffix} is damaged: "):
        staged(tmp_path, path)
    assert list((tmp_path / "job").iterdir()) == []


def zstd_with_checksum(suffix: str, data: bytes) -> bytes:
    import zstandard

    if suffix == ".zst":
        return zstandard.ZstdCompressor(write_checksum=True).compress(data)
    return packed(data, suffix)


def test_names_that_cannot_be_used_are_refused_at_once(tmp_path: Path) -> None:
    here = str(make_file(tmp_path, batch_lines("a")))
    missing = str(tmp_path / "none.jsonl")
    for names, said in {
        (here, missing): f"input file {missing} does not exist.",
        (here, here): "is named twice",
        (here, str(tmp_path)): "is a directory, but not a saved dataset",
    }.items():
        with pytest.raises(InputError, match=said):
            JobInput(input_sources(names)).check()
    for names, said in {
        ("-", here, "-"): "only once",
        ("hf-dataset:name",): "--template",
        ("foo://bucket/key",): "foo://bucket/key cannot be used: Protocol not known",
    }.items():
        with pytest.raises(ConfigError, match=said):
            JobInput(input_sources(names)).check()
    for name in ("hf-dataset:", "hf-dataset:a:b:c:d"):
        with pytest.raises(ConfigError, match="must be hf-dataset:NAME"):
            JobInput(input_sources((name,)), QUESTION).check()
    with pytest.raises(ConfigError, match="--id-column can be used only"):
        JobInput(input_sources((here,)), id_column="id").check()
