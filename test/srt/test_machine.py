"""What planning is told of an engine is what its schedulers run with."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.prediction.options import OVERLAP
from sglang_batch.srt.engine import machine as machine_module
from sglang_batch.srt.engine.machine import (
    NO_OVERLAP,
    machine_of,
    model_spec,
    row_share_key,
)
from sglang_batch.store.measured_costs import KeptRowShare, keep_row_share


def test_plan_and_simulate_presume_the_overlap_of_the_engine() -> None:
    assert OVERLAP == NO_OVERLAP


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_settings_that_the_user_left_out(mixed: bool, shares: bool) -> None:
    """SGLang leaves its arguments as they were given, and resolves them elsewhere."""
    manager = SimpleNamespace(
        server_args=SimpleNamespace(
            tp_size=1,
            pp_size=1,
            ep_size=1,
            offline_config=OfflineBatchConfig(learn_costs=False),
            quantization=None,
            chunked_prefill_size=None,
            enable_mixed_chunk=False,
        ),
        model_config=SimpleNamespace(hf_config=LlamaConfig(num_hidden_layers=2)),
    )
    ours = {
        "step_tokens": 4096,
        "mixed_chunk": mixed,
        "page_size": 16,
        "shares_prefixes": shares,
    }
    machine = machine_of(
        manager,
        {
            "offline_batch": ours,
            "memory_usage": {"token_capacity": 20_000},
            "effective_max_running_requests_per_dp": 64,
        },
    )
    assert (machine.limits.step_tokens, machine.limits.page_size) == (4096, 16)
    assert machine.limits.as_sglang == mixed
    assert machine.cost.shared_kv_read_once == shares


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A tokenizer manager and the state of its scheduler. No row_share is kept."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    machine_module._say_unmeasured.cache_clear()
    config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=4)
    manager = SimpleNamespace(
        server_args=SimpleNamespace(
            tp_size=2,
            pp_size=1,
            ep_size=1,
            quantization=None,
            offline_config=OfflineBatchConfig(),
        ),
        model_config=SimpleNamespace(
            hf_config=config, head_dim=128, dtype="torch.bfloat16"
        ),
    )
    state = {
        "offline_batch": {"step_tokens": 4096, "mixed_chunk": True, "page_size": 16},
        "memory_usage": {"token_capacity": 20_000},
        "effective_max_running_requests_per_dp": 64,
        "attention_backend": "flashinfer",
        "decode_attention_backend": None,
        "kv_cache_dtype": "auto",
    }
    return manager, state


def test_an_attention_rank_has_its_part_of_the_devices(
    engine: tuple[Any, Any],
) -> None:
    manager, state = engine
    whole = machine_of(manager, state).cost
    state["offline_batch"]["attention_ranks"] = 2
    part = machine_of(manager, state).cost
    assert part.token_time_s == pytest.approx(2 * whole.token_time_s, rel=0.1)
    assert part.kv_read_time_s == pytest.approx(2 * whole.kv_read_time_s)
    # Each rank reads all of attention's weights, and reduces half as often.
    assert part.weight_read_time_s == pytest.approx(whole.weight_read_time_s, rel=0.02)


def test_the_row_share_that_was_measured_for_this_engine(
    engine: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    manager, state = engine
    key = row_share_key(manager, state, model_spec(manager.model_config.hf_config))
    assert (key.kv_heads, key.head_dim, key.dtype) == (4, 128, "bfloat16")
    assert (key.attention_backend, key.page_size, key.tp) == ("flashinfer", 16, 2)
    kept = KeptRowShare(
        key=key, row_share=7.5, finding="measured", least=7.0, most=8.0,
        weights_s=1e-3, kv_read_s=1e-8, noise=0.01,
        measured_at="2026-01-01T00:00:00+00:00", versions={}, points=[],
    )  # fmt: skip
    other = msgspec.structs.replace(key, attention_backend="triton")
    keep_row_share(kept)
    keep_row_share(msgspec.structs.replace(kept, key=other, row_share=1.5))
    with caplog.at_level(logging.INFO, machine_module.__name__):
        assert machine_of(manager, state).cost.row_share == 7.5
        state["decode_attention_backend"] = "triton"
        assert machine_of(manager, state).cost.row_share == 1.5
    assert "row_share 7.5, measured at 2026-01-01" in caplog.text
    assert "unmeasured" not in caplog.text


def test_an_unmeasured_row_share_is_0_and_said_once(
    engine: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, machine_module.__name__):
        for _ in range(2):
            assert machine_of(*engine).cost.row_share == 0
    assert caplog.text.count("row_share unmeasured: planning with 0") == 1


def test_quantised_weights_and_kv_have_their_real_costs(
    engine: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "device_name", lambda: "NVIDIA H100 80GB HBM3")
    manager, state = engine
    plain = machine_of(manager, state).cost
    manager.server_args.quantization = "fp8"
    state["kv_cache_dtype"] = "fp8_e4m3"
    cost = machine_of(manager, state).cost
    assert cost.kv_read_time_s == plain.kv_read_time_s / 2
    assert cost.weight_read_time_s < plain.weight_read_time_s
    assert cost.token_time_s < 0.65 * plain.token_time_s
    assert cost.attention_time_s == plain.attention_time_s
    # A device without a rate for 8 bits multiplies at that of 16.
    monkeypatch.setattr(machine_module, "device_name", lambda: "NVIDIA A100-SXM4-80GB")
    slow = machine_of(manager, state).cost
    manager.server_args.quantization = None
    wide = machine_of(manager, state).cost
    assert slow.token_time_s == pytest.approx(wide.token_time_s, rel=0.02)


def test_an_unknown_quantisation_is_counted_as_none(
    engine: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    manager, state = engine
    plain = machine_of(manager, state)
    manager.server_args.quantization = "gguf"
    assert machine_of(manager, state) == plain
    assert "Planning with weights of 16 bits: " in caplog.text
    assert "quantization 'gguf'" in caplog.text
