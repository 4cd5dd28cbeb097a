"""``sglang-batch calibrate``: mistakes that end it before SGLang is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_batch.__main__ import main
from sglang_batch.planner.costs.cost_model import StepExtras
from sglang_batch.planner.costs.step_law import StepLaw
from sglang_batch.prediction.calibration.calibrate_command import (
    Measurement,
    as_table,
    law_text,
)
from sglang_batch.prediction.calibration.decode_shapes import Sizes, shapes, step_point
from sglang_batch.prediction.calibration.row_share import fit_row_share
from sglang_batch.store.measured_costs import RowShareKey


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--model-path MODEL is required."),
        (["--model-path", "./none"], "--model-path ./none"),
        (["--model-path", "MODEL", "--no-such-flag"], "--no-such-flag"),
        (
            ["--model-path", "MODEL", "--dp-size", "2"],
            "--dp-size 2: replicas are alike",
        ),
        (
            ["--model-path", "MODEL", "--disaggregation-mode", "decode"],
            "--disaggregation-mode decode: ",
        ),
        (["--model-path", "MODEL", "--is-embedding"], "does not decode"),
    ],
)
def test_a_mistake_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    named = [str(tmp_path) if each == "MODEL" else each for each in options]
    assert main(["calibrate", *named]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--rows", "7"], ["--rows", "x"], ["--tokens", "0"]]
)
def test_a_size_must_be_a_number(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--model-path", "m", *options])
    assert "must be a whole number" in capsys.readouterr().err


def test_the_table_has_a_row_for_each_batch_and_the_law() -> None:
    key = RowShareKey(
        device="cpu",
        attention_backend="torch_native",
        kv_heads=2,
        head_dim=16,
        dtype="float32",
        page_size=1,
        tp=1,
    )
    sizes = Sizes(rows=10, tokens=1_000, new_tokens=50)
    points = []
    for lengths in shapes(sizes) * 2:
        point = step_point(lengths, 1.0)
        decides = max(point.total, 4 * point.longest)
        points.append(point._replace(seconds=1e-3 + 1e-6 * decides))
    lines = as_table(
        Measurement(key, sizes, points, None), fit_row_share(points)
    ).splitlines()
    assert lines[0].startswith("cpu, attention torch_native, KV of 2 heads of 16")
    assert "10 rows, in 2 rounds" in lines[1]
    assert len(lines) == 3 + 6 + 2
    for line in lines[3:9]:
        _sum, _longest, step, _ms, law, _ = line.split()
        assert step == law
    assert lines[-2].startswith("weights 1.000 ms, 1e+03 ns per token of KV")
    assert lines[-1].startswith("row_share 4 (from ")


def test_the_costs_of_timed_steps_are_told_by_their_parts() -> None:
    law = StepLaw(
        factors=(1.5, 1.25, 2.0, 1.125),
        fixed_s=4e-3,
        extras=StepExtras(1e-3, 2e-3, 3e-3, 5e-3),
        exponent=1.0,
        noise=0.04,
        num_samples=300,
    )
    said = law_text(law)
    assert said.startswith("Costs of 300 timed steps, half of them within 4%:")
    assert "1.5 times the datasheet's seconds" in said
    assert "timed_steps.json" in said
    assert said.count(" ms") == 1 + len(StepExtras._fields)
    assert "datasheet" in law_text(None)
