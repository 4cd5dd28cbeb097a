"""``--backend`` and the options of the transformers engine, before any engine loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_batch.__main__ import main
from sglang_batch.errors import ConfigError
from sglang_batch.run.backend_options import check_remote_code, transformers_options


def test_an_unknown_backend_is_refused_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", "-i", "in.jsonl", "-o", "out.jsonl", "--backend", "vllm"])
    assert end.value.code == 2
    assert "'vllm'" in capsys.readouterr().err


def test_known_options_have_sglangs_names() -> None:
    given = transformers_options(
        ["--model=m", "--served-model-name=s", "--max-running-requests", "7"]
    )
    assert vars(given) == {
        "model_path": "m",
        "served_model_name": "s",
        "max_running_requests": 7,
    }


@pytest.mark.parametrize("option", ["--tp=2", "--grammar-backend", "--mem-fraction=1"])
def test_an_option_of_sglangs_is_refused_by_name(option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name} is an option of SGLang's.*does not"):
        transformers_options(["--model-path=m", option])


@pytest.mark.parametrize(
    "argv", [["--model-path=m", "--max-total-tokens=0"], ["--dtype=float32"]]
)
def test_a_bad_value_and_a_missing_model_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        transformers_options(argv)


def test_code_of_a_model_needs_permission(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--model-path", str(tmp_path)]
    with pytest.raises(ConfigError, match=r"own.OwnConfig.*--trust-remote-code"):
        check_remote_code(transformers_options(argv))
    check_remote_code(transformers_options([*argv, "--trust-remote-code"]))


def test_the_command_ends_with_status_2_and_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    command = ["run", "-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    command += ["--backend=transformers", "--model-path=m", "--tp", "2"]
    assert main(command) == 2
    assert "--tp is an option of SGLang's" in capsys.readouterr().err
