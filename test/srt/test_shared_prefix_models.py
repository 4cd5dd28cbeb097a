"""Models of which some layers share prefixes in attention, under the plan, in real SGLang.

Answers are compared with ``transformers``. There are aborted, online and wrongly estimated
requests among them, and SGLang counts KV after every step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from stress_runs import scenario
from tiny_checkpoints import ARGUMENTS, write_checkpoint

# Full layers beside windows of 32 tokens: in one pool, once with capped logits, and in pools
# of their own, with V of another size than K, and with sinks. Full layers beside gated delta
# nets and beside Mamba-2. Latents, in all layers and beside Kimi's delta attention.
CASES = {
    "gemma2": ("--disable-overlap-schedule",),
    "gemma3_text": ("--enable-mixed-chunk",),
    "gemma4_text": ("--swa-full-tokens-ratio=0.6",),
    "mimo_v2_flash": ("--enable-mixed-chunk", "--swa-full-tokens-ratio=0.6"),
    "gpt_oss": ("--enable-mixed-chunk", "--swa-full-tokens-ratio=0.6"),
    "qwen3_next": (),
    "qwen3_5_text": (),
    "granitemoehybrid": ("--enable-mixed-chunk",),
    "deepseek_v3": ("--enable-mixed-chunk",),
    "kimi_linear": (),
}
SHARE = '--offline-batch-config={"learn_costs": false, "attention": "torch"}'


@pytest.mark.parametrize("model_type", CASES)
def test_jobs_on_a_model_that_shares(
    model_type: str,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    model = write_checkpoint(model_type, tmp_path / model_type, demo_model)
    arguments = (*ARGUMENTS.get(model_type, ()), *CASES[model_type], SHARE)
    found = scenario(model, "branch_points,random", 1, 2, *arguments)
    assert found["branch_points"]["computed"] == found["branch_points"]["least"]
    assert found["random"]["lines"] > 50
    totals = found["totals"]
    assert 0 < totals["attention_steps_shared"] <= totals["attention_steps"]
    assert totals["kv_read_bytes_saved"] > 0
