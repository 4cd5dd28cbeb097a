"""Where a model can be: directories, cached repositories, and names of GGUF files."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from sglang_batch.errors import ConfigError
from sglang_batch.run.model_place import check_model, check_model_path


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with one GGUF file, and no hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--repo"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    (snapshot / "q4").mkdir(parents=True)
    (snapshot / "q4" / "model.gguf").write_bytes(b"")
    (snapshot / "tokenizer.json").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "a.model"])
def test_a_tokenizer_needs_no_configuration_of_a_model(
    tmp_path: Path, file: str
) -> None:
    (tmp_path / file).write_text("{}")
    check_model(Namespace(tokenizer_path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"--model-path .* has no config\.json"):
        check_model(Namespace(model_path=str(tmp_path)))


def test_a_cached_tokenizer_is_found_offline(offline: Path) -> None:
    check_model(Namespace(tokenizer_path="owner/repo"))
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_model(Namespace(model_path="owner/repo"))


def test_an_adapter_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    check_model_path(str(tmp_path), "--model-path")


def test_a_gguf_file_in_a_repository_is_found(offline: Path) -> None:
    check_model_path("owner/repo/q4/model.gguf", "--model-path")
    for missing in ("owner/repo/q8/model.gguf", "owner/none:Q4_K_M"):
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
            check_model_path(missing, "--model-path")


@pytest.mark.parametrize(
    "name", ["a--b", "./none", "/none/x", "a/b/c", "a b", "~/none", "/a:b"]
)
def test_a_name_that_no_repository_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be the name .* \(owner/name\)"):
        check_model_path(name, "--model-path")
