"""``sglang-batch plan`` again: prompts that an earlier plan rendered need no SGLang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from plan_command import MAX_TOKENS_IS_USED, chat, plan, write

from sglang_batch.errors import ExitStatus
from sglang_batch.prediction import rendered_file
from sglang_batch.srt.engine import in_process

pytestmark = MAX_TOKENS_IS_USED

LINES = [chat(f"q{i}", f"Question {i}?", max_tokens=16) for i in range(6)]
LINES += [chat("three", "Thrice?", max_tokens=9, n=3), chat("long", "long " * 2000)]


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def model(demo_model: Path, tmp_path: Path) -> Path:
    """A copy that a test can change."""
    return Path(shutil.copytree(demo_model, tmp_path / "model"))


@pytest.fixture
def renders(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each time that SGLang rendered a file."""
    seen: list[Any] = []
    real = in_process.renderer

    def counted(args: Any) -> Any:
        seen.append(args)
        return real(args)

    monkeypatch.setattr(in_process, "renderer", counted)
    return seen


def kept() -> list[Path]:
    return sorted((platformdirs.user_data_path("sglang-batch") / "prompts").glob("*"))


def test_a_second_plan_is_equal_and_imports_neither_sglang_nor_torch(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = write(tmp_path, LINES)
    # SGLang sets variables. Without our helpers, no fork has imported it.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    assert plan(job, model, "--json") == 0
    first = capfd.readouterr().out
    (file,) = kept()
    assert file.parent.stat().st_mode & 0o077 == 0  # prompts are their owner's
    again = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from sglang_batch.__main__ import main\n"
        "status = main(sys.argv[1:])\n"
        "sys.exit(status or (3 if {'torch', 'sglang'} & set(sys.modules) else 0))"
    )
    options = ["-i", str(job), "--model-path", str(model), "--json"]
    options += ["--served-model-name", LINES[0]["body"]["model"], "--hardware", "cpu"]
    source = str(Path(rendered_file.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", again, source, "plan", *options],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(first)


def test_other_devices_policies_and_choices_need_no_second_rendering(
    tmp_path: Path, model: Path, renders: list[Any]
) -> None:
    job = write(tmp_path, LINES)
    assert plan(job, model) == 0
    assert plan(job, model, "--policy", "fcfs", "--all") == 0
    assert plan(job, model, "--kv-capacity-tokens", "4000") == 0
    assert plan(job, model, "--choose", "--price-per-gpu-hour", "1") == 0
    assert len(renders) == 1


def _other_line(job: Path, model: Path) -> list[str]:
    write(job.parent, [*LINES[:-1], chat("other", "Another?", max_tokens=3)])
    return []


def _other_template(job: Path, model: Path) -> list[str]:
    (model / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    return []


def _other_context(job: Path, model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] //= 2
    (model / "config.json").write_text(json.dumps(config))
    return []


def _template_file(job: Path, model: Path) -> list[str]:
    file = job.parent / "own.jinja"
    file.write_text("{{ messages[-1]['content'] }}")
    return ["--chat-template", str(file)]


def _variable(job: Path, model: Path) -> list[str]:
    os.environ["SGLANG_OF_A_TEST"] = "1"
    return []


@pytest.mark.parametrize(
    "change",
    [
        _other_line,
        _other_template,
        _other_context,
        _template_file,
        _variable,
        lambda job, model: ["--context-length", "300"],
        lambda job, model: ["--dedupe", "off"],
        lambda job, model: ["--skip-invalid"],
    ],
)
def test_whatever_prompts_depend_on_renders_them_again(
    tmp_path: Path,
    model: Path,
    renders: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, Path], list[str]],
) -> None:
    monkeypatch.delenv("SGLANG_OF_A_TEST", raising=False)
    job = write(tmp_path, LINES)
    assert plan(job, model) == 0
    options = change(job, model)
    try:
        assert plan(job, model, *options) == 0
        assert len(renders) == 2
        assert plan(job, model, *options) == 0
        assert len(renders) == 2
    finally:
        os.environ.pop("SGLANG_OF_A_TEST", None)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 and no more", b"text"])
def test_a_damaged_file_is_rendered_again(
    tmp_path: Path, model: Path, renders: list[Any], damage: bytes
) -> None:
    job = write(tmp_path, LINES)
    assert plan(job, model) == 0
    (file,) = kept()
    file.write_bytes(damage)
    assert plan(job, model) == 0
    assert len(renders) == 2
    assert file.stat().st_size > len(damage)


def test_the_files_used_last_are_kept(
    tmp_path: Path,
    model: Path,
    renders: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendered_file, "KEPT_FILES", 2)
    jobs = []
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        jobs.append(write(tmp_path / str(i), [*LINES, chat(f"own{i}", "Which?")]))
    for i in (0, 1, 0, 2):  # the second is used longest ago
        assert plan(jobs[i], model) == 0
    assert len(kept()) == 2
    assert len(renders) == 3
    assert plan(jobs[0], model) == 0
    assert len(renders) == 3
    assert plan(jobs[1], model) == 0
    assert len(renders) == 4


def test_what_is_too_large_or_cannot_be_written_is_planned_all_the_same(
    tmp_path: Path,
    model: Path,
    renders: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = write(tmp_path, LINES)
    monkeypatch.setattr(rendered_file, "KEPT_TOKENS", 100)
    assert plan(job, model) == 0
    assert kept() == []
    monkeypatch.setattr(rendered_file, "KEPT_TOKENS", 1 << 26)
    (tmp_path / "data").write_text("a file where the directory belongs")
    assert plan(job, model) == 0
    assert len(renders) == 2


def test_bad_lines_and_options_are_errors_every_time(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write(tmp_path, [*LINES, chat("bad", "?", temperature="hot")])
    for _ in range(2):
        assert plan(job, model) == ExitStatus.BAD_INPUT
        assert "temperature" in capsys.readouterr().err
        assert plan(job, model, "--no-such-option", "1") == ExitStatus.BAD_INPUT
        assert "no-such" in capsys.readouterr().err
    assert kept() == []
