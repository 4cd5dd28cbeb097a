"""``--choose``: its output and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_batch.__main__ import main

JOB = ("--groups", "500,100,4,120", "--num-requests", "400", "--model", "llama-3.1-70b")
CHOOSE = ("simulate", *JOB, "--choose")


def document(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*CHOOSE, "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_table_has_the_reasons_and_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = ("--fleet", "8xh200=3.5", "4xh100=2", "--deadline", "5m")
    assert main([*CHOOSE, *fleet, "--allow-quantization", "fp8"]) == 0
    said = capsys.readouterr().out
    assert "Job: groups of 4 with 500 + 100 prompt tokens, 120 output tokens" in said
    assert "8x h200-sxm at 3.5 an hour each, simulated:" in said
    assert "the choice" in said
    assert "* changes the answers" in said
    assert "the weights take 141.1 GB of the" in said
    assert "In 300.0 s, each server with an equal part of the job:" in said
    assert "(least price)" in said
    command = said.splitlines()[-1]
    assert command.startswith("  sglang-batch run -i INPUT --model-path MODEL --")
    assert "--quantization" not in command
    # Every marked way is of other bits, and no other way is.
    rows = [line for line in said.splitlines() if "fp8" in line or "as stored" in line]
    assert rows
    for row in rows:
        assert row.startswith("  *") == ("fp8" in row)


def test_json_has_all_ways_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--hardware", "8xh200", "--price-per-gpu-hour", "2")
    (box,) = found["boxes"]
    assert (box["hardware"], box["devices"]) == ("h200-sxm", 8)
    best = box["simulated"][0]
    assert found["chosen"] == best
    assert best["price"] == pytest.approx(best["seconds"] / 3600 * 8 * 2)
    tokens = found["prompt_tokens"] + found["output_tokens"]
    assert tokens == 400 * (600 + 120)
    assert best["tokens_per_second"] == pytest.approx(tokens / best["seconds"])
    assert best["prefix_sharing_ratio"] > 0.5
    impossible = [x for x in box["closed_form"] if x["seconds"] is None]
    assert all("GB" in x["why"] for x in impossible)


def test_prices_of_a_file_and_the_choice_among_boxes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"h200-sxm": 3.0, "h100-sxm": 100}')
    found = document(capsys, "--fleet", "4xh100", "4xh200", "--prices", str(prices))
    assert [box["price_per_gpu_hour"] for box in found["boxes"]] == [100, 3]
    assert found["chosen"]["hardware"] == "4x h200-sxm"
    # Given with the server, a price counts more than that of the file.
    found = document(
        capsys, "--fleet", "4xh100=0.01", "4xh200", "--prices", str(prices)
    )
    assert found["chosen"]["hardware"] == "4x h100-sxm"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--hardware", "8xh300"), "'h300' is not known"),
        (("--hardware", "0xh200"), "'0xh200' must be like 8xh200-sxm"),
        (("--fleet", "8xh200=free"), "the price 'free' must be a number above 0"),
        (("--fleet", "8xh200", "--hardware", "h200"), "give one of them"),
        (("--hardware", "1xh100"), "141.1 GB"),
        (("--prices", "missing.json"), "cannot be read"),
    ],
)
def test_what_cannot_be_chosen(
    options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHOOSE, *options]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--fleet", "8xh200"),
        ("--deadline", "1h"),
        ("--allow-quantization", "fp8"),
    ],
)
def test_options_of_the_choice_alone(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *JOB, *options]) == 2
    assert f"{options[0]} has no use without --choose" in capsys.readouterr().err


def test_a_price_alone_tells_the_cost_of_each_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--price-per-gpu-hour", "3.6", "--tp", "2"]
    assert main(["simulate", *JOB, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for order in found["policies"]:
        assert order["dollars"] == pytest.approx(order["seconds"] * 0.002, abs=1e-6)
    assert main(["simulate", *JOB, *options]) == 0
    assert "cost" in capsys.readouterr().out


def test_several_devices_need_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *JOB, "--hardware", "8xh200"]) == 2
    assert "only --choose takes several devices" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["soon", "-1h", "1w", "0s"])
def test_a_deadline_that_is_no_time(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*CHOOSE, f"--deadline={text}"])
    assert "must be a time above 0" in capsys.readouterr().err
