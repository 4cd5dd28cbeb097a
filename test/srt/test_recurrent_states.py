"""Models with a recurrent state besides KV, under the plan, in real SGLang.

Answers are compared with ``transformers``, and SGLang counts KV and states after every step,
as the scheduler of the tests does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from stress_runs import scenario
from tiny_checkpoints import ARGUMENTS, write_checkpoint

from sglang_batch.errors import ConfigError
from sglang_batch.srt.plugin.defaults import check_states_anywhere

# Gated delta nets with few states: 3 requests run at a time, and hold 2 each. Mamba-2.
CASES = {
    "qwen3_next": ("branch_points,random", "--max-mamba-cache-size=9"),
    "granitemoehybrid": ("branch_points,random", "--enable-mixed-chunk"),
}


@pytest.mark.parametrize("model_type", CASES)
def test_jobs_on_a_model_with_states(
    model_type: str,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As the weights. SGLang keeps the last inputs of convolutions in bfloat16.
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    model = write_checkpoint(model_type, tmp_path / model_type, demo_model)
    what, *arguments = CASES[model_type]
    found = scenario(model, what, 1, 2, *ARGUMENTS[model_type], *arguments)
    # Each prefix was computed once.
    assert found["branch_points"]["computed"] == found["branch_points"]["least"]
    assert found["random"]["lines"] > 50


@pytest.mark.parametrize(
    ("strategy", "page_size", "wrong"),
    [
        ("auto", None, None),
        ("no_buffer", 1, None),
        ("extra_buffer", 1, "--mamba-radix-cache-strategy extra_buffer"),
        ("auto", 64, "--page-size 64"),
    ],
)
def test_states_are_kept_at_any_token_or_not_at_all(
    strategy: str, page_size: int | None, wrong: str | None
) -> None:
    if wrong is None:
        check_states_anywhere(strategy, page_size)
        return
    with pytest.raises(
        ConfigError, match=f"^{wrong} does not work .*; drop it, or give"
    ):
        check_states_anywhere(strategy, page_size)
