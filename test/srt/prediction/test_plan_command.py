"""``sglang-batch plan``: the report about a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_command import MAX_TOKENS_IS_USED, chat, is_picture, plan, write

from sglang_batch.config import PAGED_ORDERS, POLICY_TABLE
from sglang_batch.planner.costs.cost_model import CostModel

pytestmark = MAX_TOKENS_IS_USED


@pytest.fixture
def small_job(tmp_path: Path) -> Path:
    lines = [chat(f"q{i}", f"Question {i}?", max_tokens=16) for i in range(12)]
    lines += [
        chat("fixed", "Again?", max_tokens=7, ignore_eos=True),
        chat("three", "Thrice?", max_tokens=9, n=3),
        chat("long", "long " * 2000),
    ]
    return write(tmp_path, lines)


def test_json_has_the_job_the_bounds_and_every_policy(
    small_job: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(small_job, demo_model, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    job = found["job"]
    assert job["lines"] == 15
    assert job["requests"] == 16  # "three" counts three times, "long" not at all
    assert [each["name"] for each in job["left_out"]] == ["long"]
    assert "context length" in job["left_out"][0]["reason"]
    sides = (job["compute_intensive"], job["memory_intensive"])
    assert sum(side["requests"] for side in sides) == 16
    assert sum(side["share_of_memory"] for side in sides) == pytest.approx(1)
    assert 0 < job["prefix_sharing_ratio"] < 1
    # One of exactly 7. The others, of at most 16 or 9, have a third of the mean limit.
    assert job["expected_output_tokens"] == 12 * 4 + 7 + 3 * 4
    orders = {name for name in PAGED_ORDERS if not POLICY_TABLE[name].by_length}
    assert {each["policy"] for each in found["policies"]} == orders
    seconds = [each["seconds"] for each in found["policies"]]
    assert seconds == sorted(seconds)
    seconds = {each["policy"]: each["seconds"] for each in found["policies"]}
    assert seconds[found["chosen"]] <= 1.002 * min(seconds.values())
    for each in found["policies"]:
        assert 0 < each["share_of_bound"] <= 1
        assert each["seconds"] >= found["bounds"]["tightest_s"]
    assert found["machine"]["hardware"] == "cpu"
    assert found["machine"]["interference_exponent"] == 1


def test_equal_lines_are_planned_once(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [chat(f"q{i}", f"Question {i % 3}?", temperature=0) for i in range(8)]
    file = write(tmp_path, lines)
    assert plan(file, demo_model, "--policy", "dfs", "--all") == 0
    assert (
        "merged                    5 that are equal to others"
        in capsys.readouterr().out
    )
    assert plan(file, demo_model, "--policy", "dfs", "--dedupe", "off", "--json") == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert (job["requests"], job["merged"]) == (8, 0)


def test_three_lines_are_the_answer(
    small_job: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--policy", "dfs", "--compare", "fcfs", "--price-per-gpu-hour", "2.5")
    assert plan(small_job, demo_model, *options) == 0
    time, cost, advice, *left_out = capsys.readouterr().out.splitlines()
    assert time.startswith("Time: ") and "16 requests on cpu (not calibrated: " in time
    assert cost.startswith("Cost: $0.00 at $2.5 an hour")
    assert advice.startswith("Advice: order: dfs; the others are within 1 %.")
    assert left_out[0] == "left out: 1 that cannot run:"


def test_the_table_names_what_people_look_for(
    small_job: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = plan(
        small_job, demo_model, "--policy", "dfs", "--compare", "lpt", "fcfs",
        "--kv-capacity-tokens", "700", "--overlap", "1.47", "--all",
    )  # fmt: skip
    said = capsys.readouterr().out
    assert status == 0
    assert "Job: in.jsonl" in said
    assert "16  (of 15 lines)" in said
    assert "long: The input" in said
    assert "KV capacity               700 tokens" in said
    assert "s with shared-prefix attention)\n" in said
    assert "1 lengths are known; the others assumed: 4 on average" in said
    rows = [each for each in said.splitlines() if "%" in each and each[:2] in "*   "]
    assert {"dfs", "lpt", "fcfs"} <= {row.replace("*", "").split()[0] for row in rows}
    assert "prefix-groups" not in said
    assert "\norder: dfs: " in said


def test_requests_too_large_for_the_cache_are_named(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [chat("small", "?", max_tokens=4), chat("big", "big " * 200, max_tokens=4)]
    path = write(tmp_path, lines)
    assert plan(path, demo_model, "--json", "--kv-capacity-tokens", "500") == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert job["requests"] == 1
    assert [each["name"] for each in job["left_out"]] == ["big"]
    assert "KV cache of 500 tokens" in job["left_out"][0]["reason"]


def test_the_assumed_length_and_measured_figures_count(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, [chat(f"q{i}", f"Question {i}?") for i in range(8)])

    def figures(*options: str) -> dict[str, Any]:
        assert plan(path, demo_model, "--json", "--policy", "dfs", *options) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    assert figures("--compare", "dfs")["job"]["expected_output_tokens"] == 8 * 256
    other = figures(
        "--default-output-len=100", "--compute-tflops=2", "--bandwidth-tbs=0.5"
    )
    assert other["job"]["expected_output_tokens"] == 800
    assert other["machine"]["compute_flops"] == 2e12
    assert other["machine"]["bandwidth_bytes_per_s"] == 5e11


@pytest.mark.parametrize(
    "option", [["--shared-prefix-attention"], ["--attention-backend=shared_prefix"]]
)
def test_shared_prefixes_read_once_are_predicted(
    small_job: Path,
    demo_model: Path,
    capsys: pytest.CaptureFixture[str],
    option: list[str],
) -> None:
    def memory_s(*options: str) -> float:
        assert plan(small_job, demo_model, "--json", "--policy", "dfs", *options) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        job = found["job"]
        assert 0 < job["kv_read_shared_s"] < job["kv_read_s"]
        seconds: float = found["policies"][0]["memory_s"]
        return seconds

    assert memory_s(*option) < memory_s()


def test_the_forecast_is_that_of_the_plan_a_run_makes() -> None:
    from sglang_batch.planner.machine_model import EngineLimits, Machine
    from sglang_batch.planner.ordering.order import OrderSettings
    from sglang_batch.planner.plan import Candidates, best
    from sglang_batch.prediction.report import forecast
    from sglang_batch.prediction.workloads.mix import industry

    requests = industry(120, seed=1).requests
    cost = CostModel(token_time_s=1e-5, kv_read_time_s=1e-8, weight_read_time_s=1e-3)
    machine = Machine(cost, EngineLimits(kv_capacity_tokens=6000))
    found = forecast(requests, machine, PAGED_ORDERS, OrderSettings())
    job = Candidates(requests, machine, OrderSettings())
    made = {policy: job.run(policy) for policy in PAGED_ORDERS}
    assert found.best_of(made) == best(made)
    assert found.job.too_large.tolist() == job.too_large.tolist()
    for policy, run in found.runs.items():
        assert run.seconds == made[policy].seconds


def test_the_plot_is_a_picture(
    small_job: Path, demo_model: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    assert plan(small_job, demo_model, "--plot", str(picture)) == 0
    assert is_picture(picture)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hardware", "abacus"], "hardware='abacus' is not known"),
        (["--plot", "plan.pdf"], "--plot plan.pdf must end in .png."),
        (["--plot", "no/plan.png"], "its directory is missing"),
        (["--tp", "64", "--mem-fraction-static", "1e-9"], "leave no room for KV"),
        (["--kv-capacity-tokens", "3"], "No request fits into a KV cache of 3 tokens"),
        (["--pp-size", "2"], "--pp-size 2 would not be predicted: plan takes one"),
        (["--dp", "8"], "--dp-size 8 would not be predicted"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--served-model-name", "other"], "The provided model 'demo' is not"),
    ],
)
def test_options_that_cannot_be_used_end_it(
    small_job: Path,
    demo_model: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    assert plan(small_job, demo_model, *options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        ["--tp", "0"],
        ["--policy", "best"],
        ["--overlap", "0.5"],
        ["--mem-fraction-static", "2"],
    ],
)
def test_options_out_of_range_end_with_the_usage(
    small_job: Path, demo_model: Path, option: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(small_job, demo_model, *option)
    assert ended.value.code == 2


def test_bad_files_are_refused_as_run_refuses_them(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path / "no.jsonl", demo_model) == 2
    assert "no.jsonl does not exist." in capsys.readouterr().err
    path = write(tmp_path, [chat("a", "?"), chat("a", "?")])
    assert plan(path, demo_model) == 2
    assert "line 2: The custom_id of this request" in capsys.readouterr().err
    path = write(tmp_path, [chat("a", "?", temperature="hot")])
    assert plan(path, demo_model) == 2
    assert "body.temperature" in capsys.readouterr().err


def test_a_file_of_which_nothing_can_run_says_why(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, [chat("long", "long " * 2000)])
    assert plan(path, demo_model) == 2
    assert "can run; long: The input" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(
    small_job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(small_job, tmp_path / "no-model") == 2
    said = capsys.readouterr().err
    assert "no-model" in said
    assert "Traceback" not in said
