"""The simulator takes as many steps as the real engine, and finds as much cached."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import preloaded
import pytest
from example_counts import combinations
from forked_children import command
from servers import SERVER_ARGS
from step_jobs import JOBS

POLICIES = ("dfs", "prefix-groups", "dual-scan")
TOLERANCE = 0.02


# With few rows, the dual scanner often finds none free.
ENGINES = {"page 1, 40 rows": (1, 40), "page 32, 10 rows": (32, 10)}
CASES = combinations([*ENGINES], [*JOBS], POLICIES)


@pytest.fixture(scope="module")
def counts(demo_model: Path) -> Callable[[str], dict[str, Any]]:
    """Steps, cached tokens and decode tokens of the cases of an engine."""

    @cache
    def found(engine: str) -> dict[str, Any]:
        page_size, rows = ENGINES[engine]
        cases = [case[1:] for case in CASES if case[0] == engine]
        server_args = [arg for arg in SERVER_ARGS if "max-total-tokens" not in arg]
        done = preloaded.run(
            [
                *command("steps_on_engine", json.dumps([cases, 0.0])),
                "--model-path", str(demo_model), *server_args, "--max-total-tokens=6144",
                "--chunked-prefill-size=512", f"--max-running-requests={rows}",
                # As on a GPU, which the simulator models.
                "--enable-mixed-chunk", f"--page-size={page_size}",
            ],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return printed

    return found


@pytest.mark.parametrize(("engine", "job", "policy"), CASES)
def test_steps_and_cached_tokens_are_as_simulated(
    counts: Callable[[str], dict[str, Any]], engine: str, job: str, policy: str
) -> None:
    case = counts(engine)[f"{job}, {policy}"]
    real, simulated = case["real"], case["simulated"]
    assert real["steps"] > 50
    assert real["cached_tokens"] > 10_000
    for name in ("steps", "cached_tokens"):
        assert simulated[name] == pytest.approx(real[name], rel=TOLERANCE)
    # The first token of an answer comes with its prompt.
    assert simulated["decode_tokens"] == real["decode_tokens"]
    # All lengths are known.
    assert simulated["offloaded"] == real["offloaded"] == 0
