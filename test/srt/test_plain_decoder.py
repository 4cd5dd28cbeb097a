"""Steps of plain decoders in real SGLang: the states of SGLang's modules, bit for bit."""

from __future__ import annotations

import json
from functools import wraps
from pathlib import Path
from typing import Any

import preloaded
import pytest
from forked_children import command
from sglang.srt.models.llama import LlamaMLP
from tiny_checkpoints import write_checkpoint

from sglang_batch.srt.cpu.plain_decoder import _is_known

# SGLang's own scheduler mixes steps here, ours would not; biases; heads with norms.
CASES: dict[str, dict[str, Any]] = {
    "llama": {
        "dtype": "float32", "offline_batch": False, "enable_mixed_chunk": True,
    },
    "qwen2": {"dtype": "bfloat16", "page_size": 16},
    "qwen3": {"dtype": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("model_type", CASES)
def test_states_are_those_of_sglangs_modules(
    model_type: str, demo_model: Path, tmp_path: Path
) -> None:
    models = [
        write_checkpoint(model_type, tmp_path / str(seed), demo_model, seed=seed)
        for seed in range(2)
    ]
    done = preloaded.run(
        command(
            "plain_engine",
            *map(str, models),
            json.dumps(CASES[model_type]),
            str(tmp_path / "steps.json"),
        )
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["DECODE"] > 20
    assert found["EXTEND"] > 4
    assert found["whole"] > 2
    assert found["zeros"] > 100
    if model_type == "llama":
        assert found["mixed"] > 2
    assert found["different"] == 0
    assert found["odd"] == 0
    assert found["changed"]


def test_other_code_is_left_to_sglang() -> None:
    class Alike(LlamaMLP):  # type: ignore[misc]
        pass

    class Other(LlamaMLP):  # type: ignore[misc]
        def forward(self, x: Any, forward_batch: Any = None) -> Any:
            return x

    class Hooked(LlamaMLP):  # type: ignore[misc]
        @wraps(LlamaMLP.forward)
        def forward(self, *args: Any) -> Any:
            return LlamaMLP.forward(self, *args)

    known = [_is_known(kind.__new__(kind)) for kind in (LlamaMLP, Alike, Other, Hooked)]
    assert known == [True, True, False, False]
