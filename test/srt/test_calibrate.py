"""``sglang-batch calibrate`` on a real engine: it measures, prints and keeps."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import preloaded
import pytest
from forked_children import command

from sglang_batch.errors import ConfigError
from sglang_batch.request import random_prompts
from sglang_batch.srt.engine.decode_timing import ENVIRONMENT
from sglang_batch.store.measured_costs import kept_row_shares


def test_the_command_prints_and_keeps_a_row_share(
    demo_model: Path, tmp_path: Path
) -> None:
    # In an engine of its own: the others keep no times of their steps. SGLang reads the
    # environment when it is imported, which its children here do before the command.
    done = preloaded.run(
        [
            *command("slow_to_send", "calibrate", f"--model-path={demo_model}"),
            *(
                "--dtype=float32",
                "--max-total-tokens=3000",
                "--mem-fraction-static=0.3",
            ),
            *("--rows=8", "--tokens=1000"),
        ],
        env={**os.environ, **ENVIRONMENT, "XDG_DATA_HOME": str(tmp_path)},
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "decode steps with 8 rows" in done.stdout, done.stderr[-3000:]
    assert "Costs of " in done.stdout
    timed = json.loads((tmp_path / "sglang-batch" / "timed_steps.json").read_text())
    (steps,) = timed["engines"]
    assert steps["key"]["attention_backend"] == "torch_native"
    assert len(steps["samples"]) > 40
    prompts = [sample for sample in steps["samples"] if sample[2]]
    assert any(sample[3] == 0 for sample in prompts)
    assert len(prompts) < len(steps["samples"])
    kept = kept_row_shares(tmp_path / "sglang-batch" / "row_shares.json")
    if "not measurable" in done.stdout:
        # Other processes disturb this machine: honest, and nothing to keep.
        assert not kept
        return
    (entry,) = kept
    assert "row_share " in done.stdout
    assert math.isfinite(entry.row_share)
    assert entry.row_share >= 0
    assert entry.key.attention_backend == "torch_native"
    assert (entry.key.kv_heads, entry.key.head_dim, entry.key.tp) == (2, 16, 1)
    assert len(entry.points) >= 12
    assert all(point.seconds > 0 for point in entry.points)
    # Rows grow by the same number of tokens in all batches of one sum.
    sums = sorted({point.total for point in entry.points})
    assert sums == [250 + 8 * 24.5, 500 + 8 * 24.5, 1000 + 8 * 24.5]


def test_prompts_share_no_prefix() -> None:
    prompts = random_prompts([5, 3, 1, 4], 100, seed=1)
    assert list(map(len, prompts)) == [5, 3, 1, 4]
    assert len({prompt[0] for prompt in prompts}) == 4
    assert all(12 <= token < 50 for prompt in prompts for token in prompt)
    assert prompts == random_prompts([5, 3, 1, 4], 100, seed=1)
    assert prompts != random_prompts([5, 3, 1, 4], 100, seed=2)
    # With more rows than ids in the middle of the vocabulary, all of them.
    assert len({prompt[0] for prompt in random_prompts([1] * 90, 100, seed=0)}) == 90
    with pytest.raises(ConfigError, match="--rows 101 is more than the 100 tokens"):
        random_prompts([1] * 101, 100, seed=0)
