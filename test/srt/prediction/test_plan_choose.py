"""``sglang-batch plan --choose`` on a file, and whether SGLang takes what it prints."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from plan_command import MAX_TOKENS_IS_USED, chat, plan, write

from sglang_batch.srt.engine import in_process

pytestmark = MAX_TOKENS_IS_USED


@pytest.fixture
def job(tmp_path: Path) -> Path:
    lines = [chat(f"q{i}", f"Question {i}?", max_tokens=16) for i in range(40)]
    return write(tmp_path, lines)


def test_a_file_is_planned_for_several_devices(
    job: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(job, demo_model, "--choose", "--hardware", "2xh100") == 0
    said = capsys.readouterr().out
    assert "in.jsonl, 40 requests; output lengths: assumed" in said
    assert "2x h100-sxm, simulated:" in said
    command = shlex.split(said.splitlines()[-1])
    assert command[:4] == ["sglang-batch", "run", "-i", str(job)]
    assert command[4:6] == ["-o", "answers.jsonl"]
    assert command[6:8] == ["--model-path", str(demo_model)]


def test_sglang_takes_the_options(
    job: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--choose", "--json", "--hardware", "4xh200")
    options = (*options, "--allow-kv-cache-dtype", "fp8_e4m3")
    assert plan(job, demo_model, *options) == 0
    found = json.loads(capsys.readouterr().out)
    for way in found["boxes"][0]["simulated"]:
        args = in_process.parse_server_args(
            ["--model-path", str(demo_model), *way["arguments"]]
        )
        assert args.tp_size * args.pp_size * args.dp_size == 4
        assert args.chunked_prefill_size == way["step_tokens"]
        assert args.max_running_requests == way["rows"]


def test_quantisation_of_the_command_line_is_no_change(
    job: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--choose",
        "--json",
        "--hardware",
        "h100",
        "--kv-cache-dtype",
        "fp8_e4m3",
    )
    assert plan(job, demo_model, *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["chosen"]["changes_answers"]
