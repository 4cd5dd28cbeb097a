"""A model with a pool of its own for its sliding windows, under the plan, in real SGLang.

Answers are compared with ``transformers``, and SGLang counts the KV of both pools after every
step, as the scheduler of the tests does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from stress_runs import scenario
from tiny_checkpoints import ARGUMENTS, write_checkpoint

MODEL = "gpt_oss"
# The window pool is for 240 of 800 tokens, and a window has 32.
SMALL = "--swa-full-tokens-ratio=0.3"


@pytest.fixture(scope="module")
def gpt_oss(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(MODEL, tmp_path_factory.mktemp("gpt_oss"), demo_model)


@pytest.mark.parametrize(
    ("what", "rounds", "arguments"),
    [
        ("too_long,branch_points,random", 2, ("--enable-mixed-chunk", SMALL)),
        ("branch_points,random", 2, ("--disable-overlap-schedule", "--page-size=16")),
    ],
    ids=["small-window-pool", "pages"],
)
def test_jobs_on_a_model_with_windows(
    gpt_oss: Path, what: str, rounds: int, arguments: tuple[str, ...]
) -> None:
    arguments = (*ARGUMENTS[MODEL], *arguments)
    found = scenario(gpt_oss, what, 1, rounds, *arguments)
    # Each prefix was computed once.
    assert found["branch_points"]["computed"] == found["branch_points"]["least"]
    assert found["random"]["lines"] > 50
    assert found["random"]["offloaded"] == 0
