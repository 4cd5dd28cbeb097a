"""The tier of each kind of model, in the table, in the log and in the docs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.configs.model_config import ModelConfig
from tiny_models import tiny_config

from sglang_batch.errors import ConfigError
from sglang_batch.srt.compat.support import DROP_FLAG, LIMITS, REFUSALS
from sglang_batch.srt.compat.tiers import (
    MODEL_KINDS,
    Tier,
    check_drafts,
    check_model,
    model_tier,
)

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def read(model_type: str, path: Path, architecture: str, **values: Any) -> Any:
    """SGLang's own configuration of a tiny model."""
    config = tiny_config(model_type)
    config.architectures = [architecture]
    for name, value in values.items():
        setattr(config, name, value)
    config.save_pretrained(path)
    return ModelConfig(str(path), dtype="float32")


def test_tiers_of_real_configurations(tmp_path: Path) -> None:
    llama = read("llama", tmp_path / "a", "LlamaForCausalLM")
    assert str(model_tier(llama)) == "LlamaForCausalLM: full"
    gpt_oss = read("gpt_oss", tmp_path / "b", "GptOssForCausalLM")
    assert model_tier(gpt_oss).tier is Tier.PLANNED
    assert str(model_tier(gpt_oss)) == (
        "GptOssForCausalLM: planned; offloading is off because its sliding-window "
        "layers keep KV in a separate pool"
    )
    assert model_tier(gpt_oss, hybrid_swa_disabled=True).tier is Tier.FULL


def test_an_index_besides_kv_is_planned(tmp_path: Path) -> None:
    sparse = {"index_topk": 64, "index_head_dim": 32, "index_n_heads": 2}
    config = read("deepseek_v3", tmp_path / "a", "DeepseekV32ForCausalLM", **sparse)
    assert model_tier(config).tier is Tier.PLANNED
    plain = read("deepseek_v3", tmp_path / "b", "DeepseekV3ForCausalLM")
    assert model_tier(plain).tier is Tier.FULL


def test_a_server_that_cannot_offload_is_planned(tmp_path: Path) -> None:
    llama = read("llama", tmp_path / "a", "LlamaForCausalLM")
    full = model_tier(llama)
    assert full.without_offloading() == full
    assert str(full.without_offloading("--kv-cache-dtype nvfp4 keeps scales")) == (
        "LlamaForCausalLM: planned; offloading is off because --kv-cache-dtype nvfp4 "
        "keeps scales"
    )
    gpt_oss = model_tier(read("gpt_oss", tmp_path / "b", "GptOssForCausalLM"))
    assert str(gpt_oss.without_offloading("of a mode")).endswith(
        "layers keep KV in a separate pool and of a mode"
    )


def test_drafts_are_refused_where_they_keep_more_than_kv(tmp_path: Path) -> None:
    llama = read("llama", tmp_path / "a", "LlamaForCausalLM")
    check_drafts([llama], "NGRAM")
    with pytest.raises(
        ConfigError, match=r"does not work with --pp-size 2 .*; drop one"
    ):
        check_drafts([llama], "NGRAM", 2)
    with pytest.raises(ConfigError, match=r"--enable-dp-attention .*; drop one"):
        check_drafts([llama], "EAGLE", attention_dp=True)
    recurrent = read("qwen3_next", tmp_path / "b", "Qwen3NextForCausalLM")
    with pytest.raises(
        ConfigError, match=r"^Qwen3Next.* NGRAM .* state .*; drop the flag"
    ):
        check_drafts([recurrent], "NGRAM")
    with pytest.raises(ConfigError, match=r"^Qwen3Next.* STANDALONE .*; drop the flag"):
        check_drafts([llama, recurrent], "STANDALONE")


def test_windows_only_are_refused_with_a_way_out(tmp_path: Path) -> None:
    layers = ["sliding_attention"] * 2
    config = read("gpt_oss", tmp_path / "a", "GptOssForCausalLM", layer_types=layers)
    with pytest.raises(ConfigError, match="add --disable-hybrid-swa-memory, or give"):
        check_model(config)
    assert check_model(config, hybrid_swa_disabled=True).tier is Tier.FULL


def test_each_kind_says_why_in_one_sentence() -> None:
    for kind in MODEL_KINDS:
        assert kind.tier is not Tier.FULL
        assert kind.reason and not kind.reason.endswith(".")


def test_an_index_of_groups_is_refused(tmp_path: Path) -> None:
    sparse = {"index_topk": 64, "index_head_dim": 32, "index_n_heads": 2}
    pooled = {**sparse, "index_kpool": 4}
    config = read("deepseek_v3", tmp_path / "a", "DeepseekV32ForCausalLM", **pooled)
    assert model_tier(config).tier is Tier.REFUSED


def kinds_table() -> str:
    """The kinds of models and their tiers, as a Markdown table."""
    lines = [
        "| kind of model | tier | why |",
        "|---|---|---|",
        "| KV of all tokens, nothing else | full | |",
    ]
    for kind in MODEL_KINDS:
        why = f"{kind.reason}; {kind.way_out}" if kind.way_out else kind.reason
        lines.append(f"| {kind.name} | {kind.tier} | {why} |")
    return "\n".join(lines)


def limits_table() -> str:
    """The flags with which requests are not offloaded, as a Markdown table."""
    return _table_of_flags(
        (
            f"{_flags(limit.fields.split())} {', '.join(limit.values)}".rstrip(),
            limit.reason,
        )
        for limit in LIMITS
    )


def refusals_table() -> str:
    """The flags that the offline scheduler refuses, as a Markdown table."""
    return _table_of_flags(
        (_flags(each.fields.split()), each.reason)
        if each.way_out == DROP_FLAG
        else (_flags(each.fields.split()), f"{each.reason}; {each.way_out}")
        for each in REFUSALS
    )


def _table_of_flags(rows: Iterable[tuple[str, str]]) -> str:
    """rows: flags and their reason. Neighbours with the same reason become one row."""
    lines = ["| flag | why |", "|---|---|"]
    for why, group in groupby(rows, key=itemgetter(1)):
        lines.append(f"| {', '.join(flags for flags, _ in group)} | {why} |")
    return "\n".join(lines)


def _flags(names: list[str]) -> str:
    return ", ".join(f"`--{name.replace('_', '-')}`" for name in names)


def test_docs_have_the_tables() -> None:
    text = DOCS.read_text()
    assert kinds_table() in text
    assert limits_table() in text
    assert refusals_table() in text
