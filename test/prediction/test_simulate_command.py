"""``sglang-batch simulate``: jobs without a model, policies compared."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from sglang_batch.__main__ import main
from sglang_batch.config import ORDERS, POLICIES
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.prediction.models import MODELS
from sglang_batch.prediction.options import add_plan, add_simulate

GROUPS = ("--groups", "300,40,6,12", "--num-requests", "60")


def simulate(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["simulate", "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_groups_share_what_they_are_made_to_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = simulate(capsys, *GROUPS)
    job = found["job"]
    assert job["requests"] == 60
    assert job["prompt_tokens"] == 60 * 340
    assert job["unique_prompt_tokens"] == pytest.approx(10 * 300 + 60 * 40, abs=60)
    # The truth drives the simulation.
    assert job["simulated_output_tokens"] == 60 * 12
    assert {each["policy"] for each in found["policies"]} == set(ORDERS)
    assert found["machine"]["hardware"] == "a100-sxm-80gb"
    # As in SGLang, and in ``plan``.
    assert found["machine"]["interference_exponent"] == 1


def test_seconds_depend_on_the_overlap_and_on_the_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def seconds(*options: str) -> float:
        found = simulate(capsys, *GROUPS, "--policies", "dfs", *options)
        return float(found["policies"][0]["seconds"])

    perfect, none = seconds("--overlap", "inf"), seconds("--overlap", "1")
    assert perfect < seconds("--overlap", "1.47") < none == seconds()
    assert seconds("--paper-costs") < seconds()
    assert seconds("--tp", "2") < seconds()


def test_quantised_weights_and_kv_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = (*GROUPS, "--policies", "dfs", "--hardware", "h100-sxm")
    plain = simulate(capsys, *options)["machine"]
    weights = simulate(capsys, *options, "--quantization", "fp8")["machine"]
    both = (*options, "--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3")
    kv = simulate(capsys, *both)["machine"]
    # The embeddings keep their 16 bits, and a step takes time besides.
    assert 0.5 < weights["weight_read_time_s"] / plain["weight_read_time_s"] < 0.85
    # This device's rate for 8 bits is twice that for 16.
    assert weights["token_time_s"] == kv["token_time_s"]
    assert 0.5 < weights["token_time_s"] / plain["token_time_s"] < 0.6
    assert weights["kv_read_time_s"] == plain["kv_read_time_s"]
    assert kv["kv_read_time_s"] == pytest.approx(plain["kv_read_time_s"] / 2)
    assert kv["kv_capacity_tokens"] > 2 * plain["kv_capacity_tokens"]


def test_a_checkpoint_quantised_in_an_unknown_way_counts_with_16_bits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = dict(MODELS["llama-3-8b"])
    found = []
    for stored in ({}, {"quantization_config": {"quant_method": "new"}}):
        (tmp_path / "config.json").write_text(json.dumps(config | stored))
        options = (*GROUPS, "--policies", "dfs", "--model-path", str(tmp_path))
        found.append(simulate(capsys, *options)["machine"])
    assert found[0] == found[1]


def test_no_number_of_the_json_is_infinite(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "--json", *GROUPS, "--overlap", "inf"]) == 0
    said = capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(said, parse_constant=refuse)


def test_a_blend_has_its_density_and_the_sample_its_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = simulate(
        capsys, "--blend", "1.2,0.25", "--num-requests", "4000", "--paper-costs",
        "--policies", "dual-scan", "dfs", "--sample-share", "0.02",
    )  # fmt: skip
    job = found["job"]
    assert job["name"] == "blend (density 1.2, sharing 0.25)"
    assert job["compute_density"] == pytest.approx(1.2, rel=0.03)
    assert "learnt from 8" in job["output_lengths_from"]
    seconds = {each["policy"]: each["seconds"] for each in found["policies"]}
    assert seconds[found["chosen"]] <= 1.002 * min(seconds.values())


def test_traces_are_read_and_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    azure, vidur = tmp_path / "azure.csv", tmp_path / "vidur.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "x,100,7\n" * 30)
    vidur.write_text("num_prefill_tokens,num_decode_tokens\n" + "50,3\n" * 30)
    paths = ("--lengths", str(azure), str(vidur))
    job = simulate(capsys, *paths, "--policies", "fcfs")["job"]
    assert job["name"] == "azure.csv + vidur.csv"
    assert job["prompt_tokens"] == 30 * 150
    assert job["simulated_output_tokens"] == 30 * 10
    some = simulate(capsys, *paths, "--policies", "fcfs", "--num-requests", "20")
    assert some["job"]["requests"] == 20
    assert main(["simulate", "--lengths", str(azure), str(azure)]) == 2
    assert "give each file once" in capsys.readouterr().err


def test_a_config_json_stands_for_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2.5-7b"]))
    by_name = simulate(capsys, *GROUPS, "--policies", "dfs", "--model", "qwen2.5-7b")
    by_path = simulate(
        capsys, *GROUPS, "--policies", "dfs", "--model-path", str(tmp_path)
    )
    assert by_path["policies"] == by_name["policies"]
    assert by_path["machine"]["model"] == str(tmp_path)


@pytest.mark.parametrize(
    ("model", "num_params"),
    [
        ("llama-3.1-8b", 8.03e9),
        ("llama-3.1-70b", 70.6e9),
        ("qwen2.5-7b", 7.62e9),
        ("qwen3-30b-a3b", 30.5e9),
        ("qwen3-next-80b-a3b", 79.67e9),
        ("kimi-linear-48b-a3b", 49.12e9),
        ("llama-3-8b", 8.03e9),
        ("llama-2-70b", 68.98e9),
        ("llama-3-70b", 70.6e9),
        ("llama-3.3-70b", 70.6e9),
        ("llama-3.1-405b", 405.9e9),
        ("qwen2-72b", 72.7e9),
        ("qwen3-32b", 32.8e9),
        ("mixtral-8x7b", 46.7e9),
        ("qwen3-235b-a22b", 235.1e9),
        ("gpt-oss-20b", 20.9e9),
        ("gpt-oss-120b", 116.8e9),
        ("deepseek-v3", 671.0e9),
        ("deepseek-r1", 671.0e9),
    ],
)
def test_the_models_have_their_published_size(model: str, num_params: float) -> None:
    spec = ModelSpec.from_hf_config(MODELS[model])
    assert spec.num_params == pytest.approx(num_params, rel=0.005)


def test_every_model_has_its_size_checked() -> None:
    assert len(MODELS) == 19


def test_the_table_and_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sim.png"
    options = ("--industry", "--num-requests", "80", "--plot", str(picture))
    assert main(["simulate", *options]) == 0
    said = capsys.readouterr()
    assert "Job: snippets of documents (industry)" in said.out
    assert "auto chooses " in said.out
    assert f"wrote {picture}" in said.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_a_tiny_job_has_fitting_units(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("--groups", "10,5,2,3", "--num-requests", "4")
    options = (*job, "--tp", "64", "--paper-costs")
    assert main(["simulate", *options]) == 0
    said = capsys.readouterr().out
    assert "0.000" not in said
    assert "time (\u00b5s)" in said
    assert " million tokens/s" in said
    assert not re.search(r"\d,\d{3},\d{3} tokens/s", said)


def test_each_policy_has_a_bar_against_the_bound(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    policies = ["fcfs", "dfs", "dual-scan"]
    found = simulate(
        capsys, *GROUPS, "--policies", *policies, "--plot", str(tmp_path / "sim.png")
    )
    times, cached = drawn[0].axes[:2]
    ranking = [each["policy"] for each in found["policies"]]
    assert [label.get_text() for label in times.get_yticklabels()] == ranking
    for axes, key in ((times, "seconds"), (cached, "prefix_sharing_ratio")):
        widths = [bar.get_width() for bar in axes.patches]
        values = [each[key] for each in found["policies"]]
        # The axis of the times may be in ms.
        scale = widths[0] / values[0]
        assert scale in (pytest.approx(1), pytest.approx(1000))
        assert widths == pytest.approx([scale * value for value in values])
    (bound,) = times.lines
    assert bound.get_xdata()[0] == pytest.approx(
        found["bounds"]["tightest_s"] * times.patches[0].get_width()
        / found["policies"][0]["seconds"]
    )  # fmt: skip
    (possible,) = cached.lines
    assert possible.get_xdata()[0] == found["job"]["prefix_sharing_ratio"]


def test_plan_and_simulate_presume_the_same_engine() -> None:
    commands = argparse.ArgumentParser().add_subparsers(dest="command")
    add_plan(commands, len)
    add_simulate(commands, len)
    plan, simulate = (
        {
            action.dest: action.default
            for action in parser._actions
            if action.dest not in ("hardware", "model", "model_path")
        }
        for parser in commands.choices.values()
    )
    both = plan.keys() & simulate.keys()
    assert {"overlap", "mem_fraction_static", "chunked_prefill_size"} <= both
    assert {name: plan[name] for name in both} == {
        name: simulate[name] for name in both
    }


def test_one_policy_is_drawn_alone(tmp_path: Path) -> None:
    picture = tmp_path / "one.png"
    options = ("--policies", "lof", "--plot", str(picture))
    assert main(["simulate", *GROUPS, *options]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--blend", "9,0.9"], "density=9 with sharing=0.9 cannot be mixed"),
        (["--lengths", "no.csv"], "no.csv cannot be read"),
        (["--model-path", "nowhere"], "nowhere cannot be read"),
        (["--quantization", "fp3"], "not known for quantization 'fp3'"),
        (["--kv-cache-dtype", "fp3"], "dtype='fp3' is not known"),
        (["--hardware", "abacus"], "hardware='abacus' is not known"),
        (["--model", "llama-3.1-70b"], "raise tp or mem_fraction"),
        ([*GROUPS, "--kv-capacity-tokens", "9"], "No request fits"),
    ],
)
def test_options_that_cannot_be_used_end_it(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["simulate", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--blend", "1.2"],
        ["--groups", "1,2,3"],
        ["--groups", "1,2,3,x"],
        ["--num-requests", "0"],
        ["--sample-share", "2"],
        ["--policies", "auto"],
        ["--compute-tflops", "-1"],
        ["--trace", "1", "--industry"],
        ["--unknown"],
    ],
)
def test_options_out_of_range_end_with_the_usage(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *options])
    assert ended.value.code == 2


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_help_names_every_order(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    said = "".join(capsys.readouterr().out.split())  # lines break at hyphens
    for policy in POLICIES if command == "plan" else ORDERS:
        assert policy in said
