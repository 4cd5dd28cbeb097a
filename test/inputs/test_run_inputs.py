"""``sglang-batch run`` from its arguments to its files, with an engine that echoes."""

from __future__ import annotations

import asyncio
import errno
import gzip
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import zstandard
from builders import MODEL, make_body, make_file, make_line
from fake_engine import FakeEngine
from input_files import batch_lines, packed
from web_server import WebFiles

import sglang_batch.srt.engine
from sglang_batch.__main__ import main
from sglang_batch.run import running_job

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_LINES_FAILED = 1, 2, 3


class Echo(FakeEngine):
    """The engine of a run. ``started`` counts how often a model was loaded."""

    started = 0

    async def connect(self) -> None:
        pass


@pytest.fixture
def engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Echo:
    """The engine that ``run`` starts instead of SGLang, and two models."""
    models = tmp_path_factory.mktemp("models")
    for name in ("m", "other"):
        (models / name).mkdir()
        make_file(models / name, b"{}", "config.json")
    monkeypatch.chdir(models)
    echo = Echo(rejected=["bad"])

    @contextmanager
    def started(_: Any) -> Iterator[tuple[Echo, asyncio.AbstractEventLoop]]:
        echo.started += 1
        with asyncio.Runner() as runner:
            yield echo, runner.get_loop()

    launch: Any = ModuleType("launch")
    launch.parse_server_args = lambda argv: SimpleNamespace(
        model_path=argv[1],
        served_model_name=argv[3],
    )
    launch.model_name = lambda server_args: server_args.served_model_name
    launch.engine = started
    launch.resolve = launch.kill_children = lambda *_: None
    launch.memory_note = lambda _: ""
    monkeypatch.setitem(sys.modules, "sglang_batch.srt.engine.in_process", launch)
    monkeypatch.setattr(sglang_batch.srt.engine, "in_process", launch, raising=False)
    return echo


def run(*arguments: object, model: str = "m", served: str = MODEL) -> int:
    named = ["--policy", "fcfs", "--model-path", model, "--served-model-name", served]
    return main(["run", *map(str, arguments), *named])


def ids_in(data: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in data.splitlines()]


def test_inputs_of_several_kinds_and_compressed_outputs(
    tmp_path: Path, engine: Echo
) -> None:
    first = make_file(tmp_path, batch_lines("a", "bad"), "1.jsonl")
    second = make_file(tmp_path, packed(batch_lines("c"), ".gz"), "2.jsonl.gz")
    out, errors = tmp_path / "out.jsonl.gz", tmp_path / "errors.jsonl.zst"
    command = ["-i", first, "-i", second, "-o", out, "--error-file", errors]
    assert run(*command) == EXIT_LINES_FAILED
    assert ids_in(gzip.decompress(out.read_bytes())) == ["a", "c"]
    reader = zstandard.ZstdDecompressor().stream_reader(errors.read_bytes())
    assert ids_in(reader.read()) == ["bad"]
    assert not (tmp_path / "out.jsonl.gz.job" / "input.jsonl").exists()

    assert run(*command) == EXIT_LINES_FAILED  # complete: nothing runs again
    assert engine.started == 1
    assert run(*command, model="other") == EXIT_BAD_INPUT
    assert run(*command, "--overwrite") == EXIT_LINES_FAILED
    assert engine.started == 2
    out.unlink()
    assert run(*command) == EXIT_LINES_FAILED  # the output is gone: it runs again
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


def test_files_may_have_names_that_are_no_utf8(
    tmp_path: Path, engine: Echo, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    table, out = (tmp_path / os.fsdecode(b"caf\xe9" + end) for end in (b".csv", b".o"))
    table.write_text("q\nHow?\n")
    assert run("-i", table, "-o", out, "--template", "{{q}}") == 0
    assert ids_in(out.read_bytes()) == ["0"]
    assert rb"caf\udce9.o" in capfdbinary.readouterr().out


def test_another_template_starts_again_only_where_nothing_was_answered(
    tmp_path: Path, engine: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    table = make_file(tmp_path, b"id,q\nbad,How?\n", "t.csv")
    out = tmp_path / "out"
    command = ["-i", table, "-o", out, "--template"]
    assert run(*command, "Say: {{q}}", "--id-column", "id") == EXIT_LINES_FAILED
    assert run(*command, "Tell: {{q}}", "--id-column", "q") == 0
    said = capsys.readouterr().err
    assert "Starting again with another --id-column and --template: no line" in said
    [line] = map(json.loads, out.read_text().splitlines())
    message = line["response"]["body"]["choices"][0]["message"]
    assert message["content"] == "Tell: How?"
    for _ in range(2):
        assert run(*command, "Say: {{q}}", "--id-column", "q") == EXIT_BAD_INPUT
        assert f"{out} was begun with another --template." in capsys.readouterr().err
    assert run(*command, "Say: {{q}}", "--id-column", "q", "--overwrite") == 0


def test_another_template_starts_an_interrupted_run_again(
    tmp_path: Path, engine: Echo
) -> None:
    table = make_file(tmp_path, b"id,q\nbad,How?\nb,Why?\n", "t.csv")
    command = ["-i", table, "-o", tmp_path / "out", "--id-column", "id", "--template"]
    engine.raising["b"] = OSError("it broke")
    assert run(*command, "Say: {{q}}") == EXIT_FAILED
    engine.raising.clear()
    assert run(*command, "Tell: {{q}}") == EXIT_LINES_FAILED
    assert "Tell: Why?" in (tmp_path / "out").read_text()


def test_settings_are_checked_before_sglang_is_imported(
    tmp_path: Path, engine: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    launch: Any = sys.modules["sglang_batch.srt.engine.in_process"]
    launch.parse_server_args = lambda _: pytest.fail("SGLang was imported")
    table = make_file(tmp_path, batch_lines("a"))
    assert run("-i", table, "-o", tmp_path / "out", "--stop-rules", "[") == 2
    assert "stop_rules" in capsys.readouterr().err
    assert not (tmp_path / "out.job").exists()


def test_options_in_a_file_are_read_by_sglang(
    tmp_path: Path, engine: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_file(tmp_path, b"model-path: m", "options.yaml")
    lines = make_file(tmp_path, [make_line("a", body=make_body(model=MODEL))])
    files = ["-i", str(lines), "-o", str(tmp_path / "out"), "--policy", "fcfs"]

    def with_file(served: str) -> int:
        named = ["--model-path", "m", "--served-model-name", served]
        return main(["run", *files, *named, "--config", str(config)])

    assert with_file("other") == EXIT_BAD_INPUT
    assert "Name the model of these lines" in capsys.readouterr().err
    assert with_file(MODEL) == 0


def test_standard_input_is_resumed_only_if_it_is_the_same(
    tmp_path: Path,
    engine: Echo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def piped(*ids: str) -> int:
        stdin = SimpleNamespace(buffer=io.BytesIO(batch_lines(*ids)))
        monkeypatch.setattr(sys, "stdin", stdin)
        return run("-i", "-", "-o", tmp_path / "out")

    engine.raising["b"] = OSError("it broke")
    assert piped("a", "b") == EXIT_FAILED
    engine.raising.clear()
    assert piped("a", "c") == EXIT_BAD_INPUT
    assert "standard input, line 2 changed" in capsys.readouterr().err
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
    assert run(*command) == EXIT_FAILED
    del web.files["/in.jsonl"]
    engine.raising.clear()
    web.failing = [403]
    assert run(*command) == EXIT_FAILED  # all answered, but not uploaded
    assert run(*command) == EXIT_LINES_FAILED
    assert engine.answered == ["a", "b"]
    assert ids_in(gzip.decompress(web.files["/out.jsonl.gz"])) == ["a", "b"]
    assert ids_in(memory.cat("/bucket/errors.jsonl")) == ["bad"]
    methods = [method for method, _ in web.log]
    assert methods == ["GET", "PUT", "PUT"]

    again = [str(each).replace("sig=1", "sig=2") for each in command]
    assert run(*again) == EXIT_LINES_FAILED
    assert [method for method, _ in web.log] == methods
    # Only the records of the finished job are kept.
    kept = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(kept) == [
        "engine.log",
        "input.digests",
        "input.json",
        "job.json",
        "lock",
    ]


def test_a_url_of_a_local_file_is_its_path(tmp_path: Path, engine: Echo) -> None:
    make_file(tmp_path, batch_lines("a", "b"), "in 1%.jsonl")
    here = f"file://localhost{tmp_path}"
    command = ["-i", f"{here}/in%201%25.jsonl", "-o", f"file://{tmp_path}/o%75t"]
    engine.raising["b"] = OSError("it broke")
    assert run(*command) == EXIT_FAILED
    engine.raising.clear()
    # Resumed, by its other name.
    assert run("-i", tmp_path / "in 1%.jsonl", "-o", tmp_path / "out") == 0
    assert engine.answered == ["a", "b"]
    assert ids_in((tmp_path / "out").read_bytes()) == ["a", "b"]


def test_a_complete_job_has_no_error_file_that_it_did_not_write(
    tmp_path: Path, engine: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    make_file(tmp_path, batch_lines("a", "bad"), "in.jsonl")
    command = ["-i", tmp_path / "in.jsonl", "-o", tmp_path / "out"]
    assert run(*command) == EXIT_LINES_FAILED
    errors = ["--error-file", tmp_path / "errors"]
    assert run(*command, *errors) == EXIT_BAD_INPUT
    assert (
        f"output is not here: there is no {tmp_path / 'errors'}"
        in capsys.readouterr().err
    )
    assert run(*command, *errors, "--overwrite") == EXIT_LINES_FAILED
    assert ids_in((tmp_path / "errors").read_bytes()) == ["bad"]
    assert run(*command, *errors) == EXIT_LINES_FAILED
    assert engine.started == 2


def test_a_full_disk_is_one_sentence_although_no_traceback_can_be_written(
    tmp_path: Path,
    engine: Echo,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make_file(tmp_path, batch_lines("a"), "in.jsonl")
    (tmp_path / "out.job").mkdir()
    (tmp_path / "out.job/engine.log").symlink_to("/dev/full")
    command = ["-i", tmp_path / "in.jsonl", "-o", tmp_path / "out"]
    with monkeypatch.context() as patch:
        patch.setattr(running_job, "write_digests", full)
        assert run(*command) == EXIT_FAILED
    said = capfd.readouterr().err
    assert f"error: cannot write {tmp_path}/out.job: [Errno 28] No space left" in said
    assert "Traceback" not in said
    (tmp_path / "out.job/engine.log").unlink()
    assert run(*command) == 0


def test_a_bad_download_is_discarded(
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
        ("file://", "its name is empty"),
        ("in.jsonl", "is both input and output"),
        ("file://{here}/in.jsonl", "is both input and output"),
        ("FILE://{here}/taken", "taken exists and was not written by this command"),
        ("foo://bucket/out", "foo://bucket/out cannot be used"),
        ("taken", "taken exists and was not written by this command"),
        ("out --error-file taken", "taken exists and was not written by this command"),
        ("/dev/null", "cannot write /dev/null: it is not a file"),
        ("/dev/null --overwrite", "cannot write /dev/null: it is not a file"),
        ("out --error-file /dev/null", "cannot write /dev/null: it is not a file"),
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
    output = output.format(here=tmp_path)
    outputs = output.split()
    assert run("-i", "in.jsonl", "-o", *outputs) in (EXIT_FAILED, EXIT_BAD_INPUT)
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "taken"]
    assert (tmp_path / "taken").read_bytes() == b"thesis"


# Bad lines --------------------------------------------------------------------------

# One line for each reason, and the error's code.
BAD_LINES = {
    "json": ('{"custom_id": "json", ', "invalid_json_line"),
    "url": (make_line("url", url="/v1/other"), "invalid_url"),
    "method": (make_line("method", method="GET"), "invalid_method"),
    "model": (make_line("model", body=make_body(model="other")), "model_not_found"),
    "text": (make_line("text", body=make_body(messages="hi")), "invalid_request"),
    "count": (make_line("count", body=make_body(n="many")), "invalid_request"),
    "stream": (
        make_line("stream", body=make_body(stream="True")),
        "streaming_unsupported",
    ),
    "twice": (make_line("good"), "duplicate_custom_id"),
}


def bad_file(directory: Path) -> Path:
    lines = [line for line, _ in BAD_LINES.values()]
    return make_file(directory, [make_line("good"), *lines, make_line("last")])


def test_every_kind_of_error_is_found_in_one_pass_before_sglang_is_imported(
    tmp_path: Path, engine: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    def imported(_: list[str]) -> None:
        pytest.fail("SGLang was imported")

    launch: Any = sys.modules["sglang_batch.srt.engine.in_process"]
    launch.parse_server_args = imported
    assert run("-i", bad_file(tmp_path), "-o", tmp_path / "out") == EXIT_BAD_INPUT
    head, *said = capsys.readouterr().err.splitlines()
    assert head.endswith("8 of 10 lines cannot be used.")
    for number, (_, code) in enumerate(BAD_LINES.values(), start=2):
        assert said[number - 2].startswith(f"  line {number}: ")
        assert said[number - 2].endswith(f"[{code}]")
    assert "--skip-invalid" in said[-1]
    assert not (tmp_path / "out.job").exists()


def test_with_skip_invalid_bad_lines_are_answered_with_an_error_each(
    tmp_path: Path, engine: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["-i", bad_file(tmp_path), "-o", out, "--skip-invalid"]
    # A line without an id is not answered by name: someone has to look.
    assert run(*command) == EXIT_LINES_FAILED
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    ids = ["good", None, *list(BAD_LINES)[1:-1], "good", "last"]
    assert [line["custom_id"] for line in lines] == ids
    assert engine.answered == ["good", "last"]
    for number, ((_, code), line) in enumerate(
        zip(BAD_LINES.values(), lines[1:-1], strict=True), start=2
    ):
        assert line["response"]["status_code"] == 400
        assert (
            line["error"]["code"] == line["response"]["body"]["error"]["code"] == code
        )
        assert line["error"]["message"].startswith(f"line {number}: ")
    assert len({line["id"] for line in lines}) == len(lines)
    assert "8 (7 of them invalid)" in capsys.readouterr().out
    assert run(*command) == EXIT_LINES_FAILED  # complete, with the same status
    assert engine.started == 1


def test_the_first_rows_may_be_skipped_too(tmp_path: Path, engine: Echo) -> None:
    table = make_file(tmp_path, b"q,end\na,\nb,\nc,\nd,x\n", "t.csv")
    body = {"messages": [{"role": "user", "content": "{{q}}"}], "stop": "{{end}}"}
    command = ["-i", table, "-o", tmp_path / "out", "--template", json.dumps(body)]
    assert run(*command) == EXIT_BAD_INPUT
    assert run(*command, "--skip-invalid") == 0
    assert engine.answered == ["3"]


def test_lines_that_were_skipped_are_no_failures(tmp_path: Path, engine: Echo) -> None:
    """What the engine refuses as invalid counts as skipped, other errors do not."""
    skipped = [make_line("a"), BAD_LINES["url"][0], make_line("bad")]
    command = [
        *("-i", make_file(tmp_path, skipped), "-o", tmp_path / "out"),
        "--skip-invalid",
    ]
    assert run(*command) == 0
    assert run(*command) == 0
    assert run(*command[:-1]) == EXIT_LINES_FAILED


def test_the_name_of_the_model_stays(
    tmp_path: Path, engine: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines that were refused for their model keep their errors."""
    named = make_line("a", body=make_body(model="gpt"))
    out = tmp_path / "out"
    command = [
        *("-i", make_file(tmp_path, [named, make_line("b")]), "-o", out),
        "--skip-invalid",
    ]
    engine.raising["b"] = OSError("it broke")
    assert run(*command) == EXIT_FAILED
    assert run(*command, served="gpt") == EXIT_BAD_INPUT
    assert f"another --served-model-name: it was {MODEL}" in capsys.readouterr().err
    record = tmp_path / "out.job" / "job.json"
    earlier = json.loads(record.read_bytes())
    assert earlier.pop("served_model") == MODEL
    engine.raising.clear()
    record.write_text(json.dumps(earlier))  # as earlier versions wrote it
    assert run(*command) == 0
    assert run(*command, served="gpt") == EXIT_BAD_INPUT


def test_an_input_without_a_valid_line_is_refused(
    tmp_path: Path, engine: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [make_line(i, body=make_body(model="gpt")) for i in "ab"]
    command = ["-i", make_file(tmp_path, lines), "-o", tmp_path / "out"]
    assert run(*command, "--skip-invalid") == EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert "2 of 2 lines cannot be used" in said and "--skip-invalid" not in said
    assert not (tmp_path / "out.job").exists()
    assert run(*command, "--skip-invalid", served="gpt") == 0


def test_an_empty_input_is_an_empty_output_with_skip_invalid(
    tmp_path: Path, engine: Echo
) -> None:
    empty, out = make_file(tmp_path, b"\n\n"), tmp_path / "out"
    assert run("-i", empty, "-o", out) == EXIT_BAD_INPUT
    assert run("-i", empty, "-o", out, "--skip-invalid") == 0
    assert out.read_bytes() == b""
    assert engine.started == 0


def test_a_skipped_line_stays_skipped_when_the_job_is_resumed(
    tmp_path: Path, engine: Echo
) -> None:
    lines = [BAD_LINES["url"][0], make_line("a"), make_line("b")]
    command = ["-i", make_file(tmp_path, lines), "-o", tmp_path / "out"]
    engine.raising["b"] = OSError("it broke")
    assert run(*command, "--skip-invalid") == EXIT_FAILED
    engine.raising.clear()
    assert run(*command, "--skip-invalid") == 0
    assert ids_in((tmp_path / "out").read_bytes()) == ["url", "a", "b"]
    assert engine.answered == ["a", "b"]
