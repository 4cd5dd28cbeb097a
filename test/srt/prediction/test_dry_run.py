"""``sglang-batch run --dry-run``, and ``plan`` on inputs of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import MODEL, make_file
from input_files import batch_lines, packed
from plan_command import MAX_TOKENS_IS_USED

from sglang_batch.__main__ import main

pytestmark = MAX_TOKENS_IS_USED
BODY = '{"messages": [{"role": "user", "content": "{{question}}"}], "max_tokens": 8}'


def inputs(directory: Path) -> list[str]:
    first = make_file(directory, batch_lines("a", "b"), "1.jsonl")
    second = make_file(directory, packed(batch_lines("c", "d"), ".zst"), "2.jsonl.zst")
    return ["-i", str(first), str(second), "--max-requests", "3"]


def test_a_dry_run_prints_the_plan_and_leaves_no_files(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model-path", str(demo_model), "--served-model-name", MODEL]
    options = [*inputs(tmp_path), *model, "--hardware", "cpu", "--json"]
    before = sorted(tmp_path.iterdir())

    def said(*command: str) -> dict[str, Any]:
        assert main([*command, *options]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    planned = said("plan", "--policy", "fcfs")
    assert planned["job"]["lines"] == 3
    assert said("run", "-o", str(tmp_path / "o"), "--dry-run", "--policy", "fcfs") == (
        planned
    )
    assert sorted(tmp_path.iterdir()) == before


def test_a_plan_of_a_table(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = make_file(tmp_path, b"question\nHow?\nWhy?\n", "t.csv")
    options = ["--template", BODY, "--hardware", "cpu", "--policy", "dfs", "--all"]
    assert (
        main(["plan", "-i", str(table), "--model-path", str(demo_model), *options]) == 0
    )
    said = capsys.readouterr().out
    assert "Job: t.csv" in said
    assert "2  (of 2 lines)" in said


def test_a_plan_tells_what_the_order_of_fields_saves(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"Thing {i},The maker with number {i % 5}" for i in range(20)]
    content = "\n".join(["name,maker", *rows, ""]).encode()
    table = make_file(tmp_path, content, "t.csv")
    block = "{{#fields}}Name: {{name}}\\nMaker: {{maker}}{{/fields}}"
    options = ["--template", BODY.replace("{{question}}", block), "--hardware", "cpu"]
    options += ["-i", str(table), "--model-path", str(demo_model), "--policy", "dfs"]

    def job(*more: str) -> dict[str, Any]:
        assert main(["plan", "--json", *options, *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["job"]
        return found

    own, best = job(), job("--optimize-fields")
    assert best["prompt_tokens"] == own["prompt_tokens"]
    tokens = own["unique_prompt_tokens"]
    assert best["unique_prompt_tokens_in_own_order"] == tokens
    assert best["unique_prompt_tokens"] < 0.7 * tokens
    assert own["unique_prompt_tokens_in_own_order"] is None


def test_a_plan_counts_the_bits_of_weights_and_kv(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*inputs(tmp_path), "--hardware", "h100", "--policy", "dfs", "--json"]
    options += ["--model-path", str(demo_model), "--served-model-name", MODEL]

    def machine(*more: str) -> dict[str, Any]:
        assert main(["plan", *options, *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["machine"]
        return found

    plain = machine()
    bits = machine("--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3")
    assert bits["token_time_s"] < plain["token_time_s"]
    assert bits["kv_read_time_s"] == pytest.approx(plain["kv_read_time_s"] / 2)


def test_a_dry_run_refuses_the_same_inputs_as_a_run(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = str(make_file(tmp_path, batch_lines("a") + b"nope\n"))
    model = ["--model-path", str(demo_model)]
    for options, said in [
        (["-i", bad, "-o", str(tmp_path / "o"), *model], "line 2: This line is not"),
        (["-i", bad, "-o", bad, *model], "is both input and output"),
        (["-i", bad, "-o", str(tmp_path / "o")], "needs --model-path"),
    ]:
        assert main(["run", "--dry-run", *options]) == 2
        assert said in capsys.readouterr().err


def test_a_plan_leaves_bad_lines_out_if_they_are_to_be_skipped(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_file(tmp_path, batch_lines("a") + b"nope\n" + batch_lines("c"))
    model = ["--model-path", str(demo_model), "--served-model-name", MODEL]
    options = ["-i", str(path), *model, "--hardware", "cpu", "--policy", "fcfs"]
    assert main(["plan", *options]) == 2
    capsys.readouterr()
    assert main(["plan", *options, "--skip-invalid", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["job"]["lines"] == 3
    assert [left["name"] for left in planned["job"]["left_out"]] == ["line 2"]
