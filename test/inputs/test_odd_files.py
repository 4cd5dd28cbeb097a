"""Damaged and mislabelled files: each is refused with its reason, none is fatal."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import threading
from pathlib import Path

import pytest
from builders import make_body, make_file, make_line
from input_files import batch_lines, ids_of_lines, packed, staged

from sglang_batch.batch_api import jsonl, lines
from sglang_batch.batch_api.jsonl import BatchFile, validate
from sglang_batch.batch_api.lines import LineRules
from sglang_batch.errors import ConfigError, InputError, StoreWriteError
from sglang_batch.inputs import job_input as sources
from sglang_batch.inputs import local_input
from sglang_batch.inputs.job_input import JobInput, input_sources
from sglang_batch.inputs.local_input import LocalInput
from sglang_batch.inputs.template import Template
from sglang_batch.run.job_directory import JobDirectory
from sglang_batch.run.model_place import check_model_path
from sglang_batch.run.outputs import Outputs

LINES = batch_lines("a", "b")
ARRAY = [json.loads(line) for line in LINES.splitlines()]


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (LINES.decode().encode("utf-16"), "UTF-16"),
        (LINES.decode().encode("utf-16-le"), "UTF-16"),
        (LINES.replace(b'"b"', b'"\xe9"'), "not UTF-8"),
        (json.dumps(ARRAY).encode(), "one JSON array"),
        (json.dumps(ARRAY, indent=2).encode(), "one JSON array"),
        (json.dumps(ARRAY[0], indent=2).encode(), "objects over several lines"),
        (bz2.compress(LINES), "bzip2"),
        (lzma.compress(LINES), "xz"),
        (packed(gzip.compress(LINES), ".gz"), "compressed twice"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a workbook"),
        (LINES.replace(b"\n", b"\r"), "carriage return"),
    ],
)
def test_a_file_in_another_format_is_recognized(
    tmp_path: Path, content: bytes, hint: str
) -> None:
    found = staged(tmp_path, make_file(tmp_path, content, "in.jsonl"))
    with pytest.raises(InputError, match=hint):
        found.requests(LineRules())


def test_a_bad_line_in_a_good_file_gets_no_hint(tmp_path: Path) -> None:
    found = staged(tmp_path, make_file(tmp_path, b"nope\n" + LINES, "in.jsonl"))
    with pytest.raises(InputError) as error:
        found.requests(LineRules())
    assert "seems" not in str(error.value)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(
        target=lambda: (tmp_path / "pipe").write_bytes(packed(LINES, ".zst"))
    )
    writer.start()
    found = staged(tmp_path, tmp_path / "pipe")
    writer.join()
    assert ids_of_lines(found) == ["a", "b"]


def test_an_empty_name_is_no_file() -> None:
    with pytest.raises(ConfigError, match="empty name"):
        sources.input_sources([""])


def test_a_number_of_too_many_digits_is_described(tmp_path: Path) -> None:
    line = make_line(body=make_body(model="m", top_k="N")).replace('"N"', "1" * 5000)

    def parsed(_: str, body: bytes) -> list[tuple[str, str | None]]:
        try:
            lines.loads_lenient(body)
        except ValueError as error:
            return [(str(error), "body")]
        return []

    found = LocalInput(make_file(tmp_path, [line]), "in.jsonl")
    with pytest.raises(InputError, match=r"A number has more than 4,300 digits\."):
        found.requests(LineRules(check_body=parsed))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_that_is_too_long_is_never_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    long = make_line("long", text="x" * 5000).encode()
    just = make_line("just", text="x" * (2000 - len(make_line("just", text=""))))
    assert len(just) == 2000
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 2000)
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 2000)
    for module in (jsonl, sources, local_input):
        monkeypatch.setattr(
            module, "_BLOCK_BYTES" if module is jsonl else "_PIECE_BYTES", 64
        )
    content = b"\n".join([long, just.encode(), LINES.rstrip(), long])
    path = make_file(tmp_path, packed(content, suffix), f"in.jsonl{suffix}")
    found = staged(tmp_path, path)
    assert found.path.read_bytes().rstrip(b"\n") == content
    kept = validate(found.path, LineRules(), skip_invalid=True)
    assert isinstance(kept, BatchFile)
    with kept.closing():
        assert {i: error.line for i, error in kept.invalid.items()} == {0: 1, 4: 5}
        assert "more than 2,000 bytes" in kept.invalid[0].message
        assert [kept[i].custom_id for i in (1, 2, 3)] == ["just", "a", "b"]
        assert kept.custom_id(0) is None
    local_input.write_digests(tmp_path / "digests", found)
    changed = content.replace(b'"b"', b'"c"')
    path.write_bytes(packed(changed, suffix))
    now = staged(tmp_path, path)
    change = local_input.describe_change(tmp_path / "digests", now)
    assert change is not None
    assert change.endswith("line 4 changed")


def test_a_name_that_is_too_long_is_no_file(tmp_path: Path) -> None:
    long = "x" * 300
    with pytest.raises(InputError, match="x does not exist"):
        JobInput(input_sources([long])).check()
    with pytest.raises(ConfigError, match="the template uses no column"):
        Template.parse(f"{long} {{review}}")
    with pytest.raises(ConfigError, match="cannot be the name of a Hugging Face"):
        check_model_path(long, "--model-path")
    outputs = Outputs.of(str(tmp_path / long), None, None)
    outputs.output.check()  # the directory of its job says so
    with pytest.raises(StoreWriteError, match="name too long"), JobDirectory(outputs):
        pass
