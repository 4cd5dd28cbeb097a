"""``--row-share`` and ``--padded-attention``, and the measured value without them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sglang_batch.__main__ import main
from sglang_batch.store.measured_costs import KeptRowShare, RowShareKey, keep_row_share

GROUPS = ("--groups", "300,40,6,12", "--num-requests", "60", "--policies", "dfs")


@pytest.fixture(autouse=True)
def _nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def keep(row_share: float, device: str, *, kv_heads: int = 8, tp: int = 1) -> None:
    key = RowShareKey(
        device=device,
        attention_backend="fa3",
        kv_heads=kv_heads,
        head_dim=128,
        dtype="bfloat16",
        page_size=1,
        tp=tp,
    )
    keep_row_share(
        KeptRowShare(
            key=key,
            row_share=row_share,
            finding="measured",
            least=row_share,
            most=row_share,
            weights_s=5e-3,
            kv_read_s=4e-8,
            noise=0.01,
            measured_at="2026-01-01T00:00:00+00:00",
            versions={},
            points=[],
        )
    )


def machine(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["simulate", "--json", *GROUPS, *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["machine"]
    return found


def test_the_options_are_those_of_the_cost_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = machine(capsys, "--row-share", "16.5", "--padded-attention")
    assert found["row_share"] == 16.5
    assert found["padded"]


def test_the_table_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *GROUPS, "--row-share", "16.5"]) == 0
    assert "at most 1/16.5 of it" in capsys.readouterr().out
    assert main(["simulate", *GROUPS, "--padded-attention"]) == 0
    assert "as far as the longest row's" in capsys.readouterr().out


def test_unmeasured_it_is_0(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "sglang_batch"):
        found = machine(capsys)
    assert found["row_share"] == 0
    assert not found["padded"]
    assert caplog.text.count("row_share unmeasured: planning with 0") == 1


def test_the_measured_value_of_this_device_and_shape_is_the_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep(3.0, "NVIDIA H100 80GB HBM3")
    keep(4.0, "NVIDIA H100 80GB HBM3", tp=2)
    keep(5.0, "NVIDIA H100 80GB HBM3", kv_heads=1)
    keep(6.0, "NVIDIA A100-SXM4-80GB")
    keep(7.0, "Some other device")
    h100 = ("--hardware", "h100-sxm")
    assert machine(capsys, *h100)["row_share"] == 3
    assert machine(capsys, *h100, "--tp", "2")["row_share"] == 4
    assert machine(capsys)["row_share"] == 6  # simulate's default, an A100
    assert machine(capsys, "--hardware", "h20")["row_share"] == 0
    assert machine(capsys, *h100, "--row-share", "0")["row_share"] == 0
    assert machine(capsys, *h100, "--paper-costs")["row_share"] == 0


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x"])
def test_a_bad_value_is_named(capsys: pytest.CaptureFixture[str], value: str) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *GROUPS, "--row-share", value])
    assert f"'{value}' must be a number of 0 or more" in capsys.readouterr().err
