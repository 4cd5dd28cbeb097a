"""``sglang-batch run`` from its arguments to its files, on an engine that only echoes."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import zstandard
from builders import MODEL, make_file
from fake_engine import FakeEngine
from input_files import batch_lines, packed
from web_server import WebFiles

import sglang_batch.srt
from sglang_batch.cli import main
from sglang_batch.config import OfflineBatchConfig

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_LINES_FAILED = 1, 2, 3


class Echo(FakeEngine):
    """The engine of a run; ``started`` counts how often a model was loaded."""

    started = 0

    async def connect(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Echo:
    """What ``run`` starts instead of SGLang."""
    echo = Echo(rejected=["bad"])

    @contextmanager
    def started(_: Any) -> Iterator[tuple[Echo, asyncio.AbstractEventLoop]]:
        echo.started += 1
        with asyncio.Runner() as runner:
            yield echo, runner.get_loop()

    launch: Any = ModuleType("launch")
    launch.parse_server_args = lambda argv: SimpleNamespace(
        model_path=argv[1], offline_config=OfflineBatchConfig(policy="fcfs")
    )
    launch.model_name = lambda server_args: MODEL
    launch.check_body = None
    launch.engine = started
    monkeypatch.setitem(sys.modules, "sglang_batch.srt.launch", launch)
    monkeypatch.setattr(sglang_batch.srt, "launch", launch, raising=False)
    return echo


def run(*arguments: object, model: str = "m") -> int:
    return main(["run", *map(str, arguments), "--model-path", model])


def ids_in(data: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in data.splitlines()]


def test_inputs_of_many_kinds_and_packed_outputs(tmp_path: Path, engine: Echo) -> None:
    first = make_file(tmp_path, batch_lines("a", "bad"), "1.jsonl")
    second = make_file(tmp_path, packed(batch_lines("c"), ".gz"), "2.jsonl.gz")
    out, errors = tmp_path / "out.jsonl.gz", tmp_path / "errors.jsonl.zst"
    command = ["-i", first, "-i", second, "-o", out, "--error-file", errors]
    assert run(*command) == EXIT_LINES_FAILED
    assert ids_in(gzip.decompress(out.read_bytes())) == ["a", "c"]
    reader = zstandard.ZstdDecompressor().stream_reader(errors.read_bytes())
    assert ids_in(reader.read()) == ["bad"]
    assert not (tmp_path / "out.jsonl.gz.job" / "input.jsonl").exists()

    assert run(*command) == EXIT_LINES_FAILED  # as before, and nothing runs again
    assert engine.started == 1
    assert run(*command, model="other") == EXIT_BAD_INPUT
    assert run(*command, "--overwrite") == EXIT_LINES_FAILED
    assert engine.started == 2
    out.unlink()
    assert run(*command) == EXIT_LINES_FAILED  # nothing is left of it: once more
    assert engine.started == 3
    assert ids_in(gzip.decompress(out.read_bytes())) == ["a", "c"]


def test_a_table_is_answered_row_by_row(tmp_path: Path, engine: Echo) -> None:
    table = make_file(tmp_path, b"id,question\nx,How?\ny,Why?\n", "t.csv")
    body = '{"messages": [{"role": "user", "content": "Say: {{question}}"}]}'
    out = tmp_path / "out"
    chosen = ["--id-column", "id", "--max-requests", "1"]
    assert run("-i", table, "-o", out, "--template", body, *chosen) == 0
    [line] = map(json.loads, out.read_text().splitlines())
    assert line["custom_id"] == "x"
    message = line["response"]["body"]["choices"][0]["message"]
    assert message["content"] == "Say: How?"


def test_standard_input_is_continued_only_if_it_is_the_same(
    tmp_path: Path, engine: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def piped(*ids: str) -> int:
        stdin = SimpleNamespace(buffer=io.BytesIO(batch_lines(*ids)))
        monkeypatch.setattr(sys, "stdin", stdin)
        return run("-i", "-", "-o", tmp_path / "out")

    engine.raising["b"] = OSError("it broke")
    with pytest.raises(OSError, match="it broke"):
        piped("a", "b")
    engine.raising.clear()
    assert piped("a", "c") == EXIT_BAD_INPUT
    assert piped("a", "b") == 0
    assert engine.answered == ["a", "b"]


def test_urls_are_fetched_once_and_uploaded_at_the_end(
    tmp_path: Path, web: WebFiles, memory: Any, engine: Echo
) -> None:
    web.files["/in.jsonl"] = batch_lines("a", "b", "bad")
    command = [
        *("-i", web.url("/in.jsonl?sig=1"), "-o", web.url("/out.jsonl.gz?sig=1")),
        *("--error-file", "memory://bucket/errors.jsonl"),
        *("--output-tmp-dir", tmp_path),
    ]
    engine.raising["b"] = OSError("it broke")
    with pytest.raises(OSError, match="it broke"):
        run(*command)
    del web.files["/in.jsonl"]
    engine.raising.clear()
    web.failing = [403]
    assert run(*command) == EXIT_FAILED  # all is answered, nothing uploaded
    assert run(*command) == EXIT_LINES_FAILED
    assert engine.answered == ["a", "b"]
    assert ids_in(gzip.decompress(web.files["/out.jsonl.gz"])) == ["a", "b"]
    assert ids_in(memory.cat("/bucket/errors.jsonl")) == ["bad"]
    methods = [method for method, _ in web.log]
    assert methods == ["GET", "PUT", "PUT"]

    again = [str(each).replace("sig=1", "sig=2") for each in command]
    assert run(*again) == EXIT_LINES_FAILED
    assert [method for method, _ in web.log] == methods
    # Only what says that it is done is kept.
    kept = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(kept) == ["input.json", "job.json", "lock"]


def test_what_was_fetched_is_dropped_if_it_is_bad(
    tmp_path: Path,
    web: WebFiles,
    memory: Any,
    engine: Echo,
    capsys: pytest.CaptureFixture[str],
) -> None:
    web.files["/in.jsonl"] = b"nope\n"
    command = ["-i", web.url("/in.jsonl"), "-o", "memory://out"]
    command += ["--output-tmp-dir", str(tmp_path)]
    assert run(*command) == EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert f"{web.url('/in.jsonl')}, line 1: This line is not parseable" in said
    assert list(tmp_path.iterdir()) == []
    web.files["/in.jsonl"] = batch_lines("a")
    assert run(*command) == 0


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("-", "results cannot go to standard output"),
        ("in.jsonl", "is both input and output"),
        ("foo://bucket/out", "foo://bucket/out cannot be used"),
        ("taken", "taken exists and no job of ours wrote it"),
    ],
)
def test_outputs_that_cannot_be_used_are_refused_before_anything_is_read(
    tmp_path: Path,
    engine: Echo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_file(tmp_path, b"bad line", "in.jsonl")
    make_file(tmp_path, b"thesis", "taken")
    assert run("-i", "in.jsonl", "-o", output) in (EXIT_FAILED, EXIT_BAD_INPUT)
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "taken"]
    assert (tmp_path / "taken").read_bytes() == b"thesis"
