"""Where a model can be: directories, cached repositories, and names of GGUF files."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

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
    check_model(Namespace(model_path="none", tokenizer_path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"--model-path .* has no config\.json"):
        check_model(Namespace(model_path=str(tmp_path)))


def test_a_cached_tokenizer_is_found_offline(offline: Path) -> None:
    check_model(Namespace(model_path="none", tokenizer_path="owner/repo"))
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_model(Namespace(model_path="owner/repo"))


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"seq_length": 64, "rope_scaling": {"factor": 4.0}}, 256),
        (
            {"seq_length": 64, "rope_parameters": {"rope_type": "llama3", "factor": 4}},
            64,
        ),
        (
            {
                "max_seq_len": 64,
                "rope_scaling": {"factor": 4, "original_max_position_embeddings": 16},
            },
            64,
        ),
        ({"seq_length": 64, "rope_parameters": {"full_attention": {"factor": 4}}}, 64),
        ({"max_position_embeddings": "64", "rope_scaling": "yarn"}, None),
        ({"seq_length": 64, "rope_scaling": {"factor": "4"}}, 64),
        ({}, None),
    ],
)
def test_the_context_is_that_of_sglang(
    tmp_path: Path, config: dict[str, Any], longest: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = Namespace(model_path=str(tmp_path))
    check_model(known)
    assert known.limits.context_len == longest
    known.context_length = 65
    if longest == 64:
        with pytest.raises(ConfigError, match="65 is more than the model's, 64"):
            check_model(known)
    else:
        check_model(known)
        assert known.limits.context_len == 65


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
