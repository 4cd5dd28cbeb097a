"""``sglang-batch plan --steps``: the steps of a run, alone and with a prediction."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from builders import make_body
from plan_command import MAX_TOKENS_IS_USED, is_picture, line, write

from sglang_batch.__main__ import main
from sglang_batch.scheduling.step_record import COLUMNS, StepLog, StepRecord

pytestmark = MAX_TOKENS_IS_USED

NUM_STEPS = 1000


def write_steps(path: Path, count: int, **values: float) -> Path:
    log = StepLog(path)
    for step in range(1, count + 1):
        zero = StepRecord(*[0] * (len(COLUMNS) - 2), 0.0, 0.0)
        log.append(zero._replace(step=step, **values))
    log.flush()
    return path


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    return write_steps(
        tmp_path / "steps.csv",
        NUM_STEPS,
        prefill_left=900, prefill_online=3, decode_left=20, decode_right=80,
        kv_left=7000, kv_right=40_000, kv_shared=1000, kv_cached=500,
        cached_tokens=400, evicted_tokens=25, offloaded=2,
        compute_s=0.02, memory_s=0.01,
    )  # fmt: skip


def rows(said: str) -> dict[str, list[str]]:
    """The values in the table of measured steps, by label."""
    table = said[said.index("Measured: ") :].splitlines()[1:]
    return {row[2:28].strip(): row[28:].split() for row in table if row}


def test_steps_alone_need_no_job(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "steps.png"
    assert main(["plan", "--steps", str(steps), "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Measured: steps.csv\n")
    found = rows(said)
    assert found["steps"] == ["1,000"]
    assert found["prompt tokens computed"] == ["903,000"]
    assert found["prompt tokens cached"] == ["400,000"]
    assert found["requests offloaded"] == ["2,000"]
    assert found["KV tokens evicted"] == ["25,000"]
    assert found["most KV tokens in use"] == ["48,000"]
    assert found["compute time (s)"] == ["20.00"]
    assert found["ratio spread"] == ["0.000"]
    assert is_picture(picture)


def test_steps_alone_as_json(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--steps", str(steps), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    assert found["num_steps"] == NUM_STEPS
    assert found["memory_s"] == pytest.approx(10)
    assert found["ratio_spread"] == 0


@pytest.mark.parametrize(
    "values",
    [{}, {"decode_left": 1}, {"kv_cached": 9, "compute_s": 1.0}, {"memory_s": 1e-300}],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 2, 121])
def test_steps_that_lack_something_are_drawn_too(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    count: int,
    values: dict[str, float],
) -> None:
    path = write_steps(tmp_path / "few.csv", count, **values)
    picture = tmp_path / "few.png"
    assert main(["plan", "--steps", str(path), "--plot", str(picture)]) == 0
    assert is_picture(picture)
    assert rows(capsys.readouterr().out)["ratio spread"] == ["-"]
    assert main(["plan", "--steps", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["measured"]["ratio_spread"] is None


def test_the_columns_of_the_picture_are_means_of_all_steps(steps: Path) -> None:
    from sglang_batch.prediction.plot import NUM_TIMES, _binned_steps
    from sglang_batch.prediction.table import read_measured

    edges, means = _binned_steps(read_measured(steps))
    assert (edges[0], edges[-1], len(edges)) == (0, NUM_STEPS, NUM_TIMES + 1)
    assert means["prefill_left"].tolist() == [900.0] * NUM_TIMES
    widths = edges[1:] - edges[:-1]
    total = NUM_STEPS * (NUM_STEPS + 1) / 2
    assert (means["step"] * widths).sum() == pytest.approx(total)


def test_a_job_and_its_steps_are_shown_together(
    steps: Path,
    demo_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture = tmp_path / "both.png"
    body = make_body("Hello?", without="model", max_tokens=8)
    job = write(tmp_path, [line(f"q{i}", body) for i in range(5)])
    command = [
        *("plan", "-i", str(job), "--model-path", str(demo_model)),
        *("--hardware", "cpu", "--policy", "dfs", "--steps", str(steps)),
    ]
    assert main([*command, "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "Job: in.jsonl" in said
    found = rows(said)
    assert found[""] == ["measured", "dfs"]
    assert is_picture(picture)
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["measured"]["num_steps"] == NUM_STEPS
    (predicted,) = document["policies"]
    assert found["steps"] == ["1,000", f"{predicted['steps']:,}"]
    assert found["requests retracted"] == ["0", f"{predicted['retractions']:,}"]
    # Both in the unit of the longer time.
    assert math.isclose(
        float(found["memory time (s)"][1]), predicted["memory_s"], rel_tol=6e-4
    )
    assert found["ratio spread"] == ["0.000", "-"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "a plan needs -i FILE and --model-path MODEL"),
        (["-i", "in.jsonl"], "a plan needs -i FILE and --model-path MODEL"),
        (["--model-path", "demo", "--steps", "STEPS"], "a plan needs -i FILE and"),
        (["--steps", "STEPS", "--tp-rank", "3"], "--tp-rank has no use without -i"),
        (["--steps", "STEPS", "--plot", "steps.pdf"], "must end in .png."),
        (["--steps", "none.csv"], "none.csv cannot be read: No such file"),
        (["--steps", "BAD"], "bad.csv, line 2: 1 values instead of 24."),
        (["--steps", "EMPTY"], "empty.csv has no step yet"),
    ],
)
def test_what_cannot_be_used_ends_it(
    steps: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    header = steps.read_text().partition("\n")[0]
    (tmp_path / "bad.csv").write_text(f"{header}\nfast\n")
    (tmp_path / "empty.csv").write_text(f"{header}\n")
    names = {
        "STEPS": str(steps),
        "BAD": str(tmp_path / "bad.csv"),
        "EMPTY": str(tmp_path / "empty.csv"),
    }
    assert main(["plan", *(names.get(each, each) for each in options)]) == 2
    assert said in capsys.readouterr().err
