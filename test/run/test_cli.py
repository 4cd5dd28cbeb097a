"""The command line: help, and errors that end it before SGLang is imported."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from importlib import resources
from pathlib import Path

import pytest

import sglang_batch
from sglang_batch.__main__ import _parser, main
from sglang_batch.errors import ConfigError, InputError, StoreError
from sglang_batch.request import Usage
from sglang_batch.run.job_directory import JobDirectory, JobRecord
from sglang_batch.run.outputs import Outputs
from sglang_batch.run.prepare import RunOptions
from sglang_batch.run.run_options import command_line, plan_options
from sglang_batch.srt.compat.command_line import sglang_flags


def run(tmp_path: Path, content: bytes, *options: str, output: str = "out") -> int:
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    paths = ["-i", str(source), "-o", str(tmp_path / output)]
    return main(["run", *paths, f"--model-path={model(tmp_path)}", *options])


def model(tmp_path: Path) -> Path:
    """The directory of a model, next to ``tmp_path``."""
    directory = tmp_path.with_name(f"{tmp_path.name}-model")
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    return directory


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


def test_files_of_others_in_the_job_directory_are_kept(tmp_path: Path) -> None:
    foreign = tmp_path / "out.job" / "data.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    assert run(tmp_path, b"nope\n") == 2
    assert [path.name for path in foreign.parent.iterdir()] == ["data.txt"]


def test_the_model_is_looked_for_before_inputs_are_copied(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("1.jsonl", "2.jsonl", "out")]
    for name in names[:2]:
        Path(name).write_bytes(b"{}\n")
    command = ["run", "-i", *names[:2], "-o", names[2], "--model-path", "./none"]
    assert main(command) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.jsonl", "2.jsonl"]


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
    assert run(tmp_path, b"{}\n", output="none/out.jsonl") == 2
    assert "its directory does not exist." in capsys.readouterr().err


def test_overwriting_spares_a_run_in_progress(tmp_path: Path) -> None:
    outputs = Outputs.of(str(tmp_path / "out"), None, None)
    job = JobRecord(input_sha256="1", model="m", num_requests=1)
    with JobDirectory(outputs) as running:
        running.begin(job, overwrite=False)
        log = running.open_log()
        log.put(0, b"{}", ok=True, usage=Usage())
        with (
            pytest.raises(StoreError, match="is in use by another sglang-batch run"),
            JobDirectory(outputs),
        ):
            pass
        assert log.path.exists()
    with JobDirectory(outputs) as afresh:
        afresh.begin(job, overwrite=True)
        assert list(afresh.open_log().unfinished()) == [0]


def test_a_model_without_results_can_be_changed(tmp_path: Path) -> None:
    outputs = Outputs.of(str(tmp_path / "out"), None, None)

    def begun(model: str, results: int = 0) -> str:
        job = JobRecord(
            input_sha256="1", model=model, num_requests=1, served_model=model
        )
        with JobDirectory(outputs) as running:
            if (earlier := running.restore()) is not None:
                running.check_model(earlier, Namespace(model_path=model))
            running.begin(job, overwrite=False)
            log = running.open_log()
            for index in range(results):
                log.put(index, b"{}", ok=True, usage=Usage())
            return running.record.model

    assert begun("does-not-load") == "does-not-load"
    assert begun("good", results=1) == "good"
    for same in ("good/", "./good", str(Path("good").resolve())):
        assert begun(same) == same
    with pytest.raises(InputError, match=r"another --model-path: it was /.*, now"):
        begun("other")
    with JobDirectory(outputs) as running:
        earlier, named = running.restore(), Namespace(model_path="good")
        assert earlier is not None
        named.served_model_name = "better"
        with pytest.raises(InputError, match=r"--served-model-name: .* now it is bett"):
            running.check_model(earlier, named)


def test_the_main_options_of_run_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    options = capsys.readouterr().out.partition("Every other option")[0]
    main_ones, _, advanced = options.partition("\nadvanced:\n")
    assert len(re.findall(r"^  .*--[a-z]", main_ones, re.M)) <= 24
    assert "--max-inflight" in advanced and "--workers-key" in advanced


def test_the_command_of_a_run_is_what_was_typed() -> None:
    typed = [
        *("run", "-i", "a b.csv", "c.csv", "--template", "Say: {{q}}"),
        *("--url", "/v1/completions", "--skip-invalid", "-o", "out", "--enough", "0.5"),
    ]
    options = _parser().parse_args([*typed, "--dry-run"])
    assert command_line(options) == ["sglang-batch", *typed]
    planned, _ = plan_options(_parser(), options, ["--model-path", "m", "--choose"])
    assert command_line(planned) == ["sglang-batch", *typed]
    alone = _parser().parse_args(["plan", "-i", "a", "--dedupe", "off", "--choose"])
    assert command_line(alone) == [
        *("sglang-batch", "run", "-i", "a", "-o", "answers.jsonl", "--dedupe", "off")
    ]


def test_a_dry_run_takes_the_settings_and_the_price_of_the_run() -> None:
    run = ["run", "-i", "a", "-o", "out", "--dollars-per-hour"]
    options = _parser().parse_args([*run, "6"])
    planned, _ = plan_options(_parser(), options, ["--model-path", "m", "--tp", "2"])
    assert planned.price_per_gpu_hour == 3
    options.stop_rules = '{"jsn": true}'
    with pytest.raises(ConfigError, match="stop_rules"):
        RunOptions.of(options, ["--model-path", "m"])


@pytest.mark.parametrize("command", [[], ["run"], ["demo-model"]])
def test_every_command_has_help(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: sglang-batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("run --inputfile in -o out", "-i/--input-file. Did you mean '--input-file'?"),
        ("submit -i in --folow", "arguments: --folow. Did you mean '--follow'?"),
        ("keys add me --lines-per-dy 3", "Did you mean '--lines-per-day'?"),
        (
            f"plan -i {__file__} --model-path m --comparre dfs",
            "Did you mean '--compare'?",
        ),
        ("calibrate --model-path m --tokns 3", "Did you mean '--tokens'?"),
        ("simulat --trace 1", "Did you mean 'simulate'?"),
        ("keys limt me", "Did you mean 'limit'?"),
    ],
)
def test_a_misspelt_option_or_command_has_a_suggestion(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(command.split())
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("run -i in --max-running-requests 4", "are required: -o/--output-file\n"),
        ("run -i in -o out --max-inflight 0 --max-request 4", "of 1 or more\n"),
    ],
)
def test_a_mistake_without_a_misspelt_option_has_no_suggestion(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    assert capsys.readouterr().err.endswith(said)


def test_a_demo_model_is_replaced_only_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "model.safetensors"

    def written(*options: str) -> tuple[int, str]:
        status = main(["demo-model", str(tmp_path), *options])
        out, err = capsys.readouterr()
        return status, out + err

    assert written() == (0, f"wrote a demo model to {tmp_path}\n")
    first = weights.stat()
    assert written() == (0, f"the same demo model is already in {tmp_path}\n")
    assert weights.stat().st_mtime_ns == first.st_mtime_ns
    status, said = written("--seed", "1")
    assert status == 2
    assert "another demo model (seed 0); --overwrite replaces it" in said
    assert weights.stat().st_mtime_ns == first.st_mtime_ns
    data = weights.read_bytes()
    assert written("--seed", "1", "--overwrite")[0] == 0
    assert weights.read_bytes() != data
    weights.unlink()  # as if the command had been killed
    assert written("--seed", "1")[0] == 0
    assert weights.exists()


def test_a_folder_with_other_things_is_not_overwritten_by_the_demo_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["demo-model", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


# Options that mean something else than SGLang's, and those that we add to SGLang's, by the
# section of help/options.txt or the module that has them.
OWN_MEANING = {
    ("demo-model", "--context-length"),
    ("backup", "--offline-batch-dir"),
    ("server", "--api-key"),
    ("limits", "--model"),
    ("simulate", "--model"),
    ("simulate", "--model-path"),
    ("offline_server_args.py", "--offline-batch"),
    ("offline_server_args.py", "--offline-batch-config"),
    ("offline_server_args.py", "--offline-batch-dir"),
}


def test_options_of_sglang_are_not_declared_again() -> None:
    flags = set(sglang_flags())
    declared = {
        (path.name, flag)
        for path in Path(sglang_batch.__path__[0]).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith(("add_argument", "add_arguments"))
        for argument in call.args
        for text in ast.walk(argument)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        for flag in re.findall(r"^(?:-\S+ )*(--[\w-]+)", text.value, re.MULTILINE)
        if flag in flags
    }
    texts = resources.files("sglang_batch.run").joinpath("help", "options.txt")
    section = ""
    for line in texts.read_text("utf-8").splitlines():
        if found := re.match(r"\[(.+)\]$|(?:-\S+ )*(--[\w-]+)", line):
            section = found[1] or section
            if found[2] in flags:
                declared.add((section, found[2]))
    assert declared == OWN_MEANING


def test_ctrl_c_during_the_imports_is_one_line() -> None:
    program = """
import sys

class Interrupted:
    def find_spec(name, *args):
        if name == "sglang_batch.config":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted)
from sglang_batch.__main__ import command
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")


def test_ctrl_c_while_options_are_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_batch.__main__._parser", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_output_that_nobody_reads_is_no_traceback(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "sglang_batch", "demo-model", str(tmp_path / "m")]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_an_output_that_is_closed_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m sglang_batch demo-model {tmp_path / 'm'} <&- >&-"
    ended = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
