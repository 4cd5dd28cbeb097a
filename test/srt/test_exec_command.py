"""``sglang-batch exec`` runs a module with SGLang's plugins loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from sglang_batch import __main__ as cli


def test_a_module_runs_with_plugins_and_its_own_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[str] = []
    plugins = ModuleType("sglang.srt.plugins")
    plugins.load_plugins = lambda: loaded.append("plugins")  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", plugins)
    (tmp_path / "some_tool.py").write_text(
        "import sys\nprint(__name__, sys.argv[1:])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sglang-batch"])
    assert cli.main(["exec", "some_tool", "--offline-batch", "-x", "1"]) == 0
    assert loaded == ["plugins"]
    assert capsys.readouterr().out == "__main__ ['--offline-batch', '-x', '1']\n"


@pytest.mark.parametrize("module", ["no_such_module", "no.such.module", "."])
def test_a_missing_module_is_named(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["exec", module]) == 2
    assert f"there is no Python module '{module}'" in capsys.readouterr().err
