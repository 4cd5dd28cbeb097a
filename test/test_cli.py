"""The command line: help, and errors that end it before SGLang is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_batch.cli import main
from sglang_batch.errors import StoreError
from sglang_batch.request import Usage
from sglang_batch.run_outputs import Outputs
from sglang_batch.run_state import JobRecord, JobState


def run(tmp_path: Path, content: bytes, *options: str, output: str = "out") -> int:
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    paths = ["-i", str(source), "-o", str(tmp_path / output)]
    return main(["run", *paths, "--model-path", "m", *options])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "The input file is empty."),
        (b"{}\nnope\n", "line 2: This line is not parseable as valid JSON."),
        (
            json.dumps(
                {"custom_id": "a", "method": "POST", "url": "/v1/other", "body": {}}
            ).encode(),
            "line 1: The URL provided for this request does not match",
        ),
    ],
)
def test_a_bad_file_ends_with_line_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    assert run(tmp_path, content) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_missing_input_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "no.jsonl"
    assert main(["run", "-i", str(missing), "-o", str(tmp_path / "out")]) == 2
    assert f"input file {missing} does not exist." in capsys.readouterr().err


def test_input_and_output_must_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, b"{}\n", output="in.jsonl") == 2
    assert "is both input and output." in capsys.readouterr().err


def test_an_output_without_a_directory_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, b"{}\n", output="none/out.jsonl") == 1
    assert "it has no directory to be in." in capsys.readouterr().err


def test_overwriting_spares_a_run_that_is_at_work(tmp_path: Path) -> None:
    outputs = Outputs.of(str(tmp_path / "out"), None, None)
    job = JobRecord(input_sha256="1", model="m", num_requests=1)
    with JobState(outputs) as at_work:
        at_work.begin(job, overwrite=False)
        at_work.open_log()
        at_work.log.put(0, b"{}", ok=True, usage=Usage())
        with (
            pytest.raises(StoreError, match="is in use by another sglang-batch run"),
            JobState(outputs),
        ):
            pass
        assert at_work.log.path.exists()
    with JobState(outputs) as afresh:
        afresh.begin(job, overwrite=True)
        afresh.open_log()
        assert list(afresh.log.unfinished()) == [0]


@pytest.mark.parametrize("command", [[], ["run"], ["demo-model"]])
def test_every_command_has_help(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: sglang-batch" in capsys.readouterr().out


def test_a_folder_with_other_things_is_not_overwritten_by_the_demo_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["demo-model", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
