"""What planning is told of an engine is what its schedulers run with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from sglang_batch.prediction.machine_options import OVERLAP
from sglang_batch.srt.engine.machine import NO_OVERLAP, machine_of


def test_plan_and_simulate_presume_the_overlap_of_the_engine() -> None:
    assert OVERLAP == NO_OVERLAP


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_settings_that_the_user_left_out(mixed: bool, shares: bool) -> None:
    """SGLang leaves its arguments as they were given, and resolves them elsewhere."""
    manager = SimpleNamespace(
        server_args=SimpleNamespace(
            tp_size=1, chunked_prefill_size=None, enable_mixed_chunk=False
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
