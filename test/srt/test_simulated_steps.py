"""The simulator takes as many steps as the real engine, and finds as much cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import preloaded
import pytest
from forked_children import command
from servers import SERVER_ARGS
from step_jobs import JOBS

POLICIES = ("dfs", "prefix-groups", "dual-scan")
TOLERANCE = 0.02


# With few rows, the dual scanner often finds none free.
@pytest.fixture(
    scope="module", params=[(1, 40), (32, 10)], ids="page size, rows {}".format
)
def counts(
    demo_model: Path, request: pytest.FixtureRequest
) -> dict[str, dict[str, dict[str, int]]]:
    """Steps, cached tokens and decode tokens by case, from one engine."""
    page_size, rows = request.param
    server_args = [arg for arg in SERVER_ARGS if "max-total-tokens" not in arg]
    done = preloaded.run(
        [
            *command("steps_on_engine", json.dumps([POLICIES, 0.0, [*JOBS]])),
            "--model-path", str(demo_model), *server_args, "--max-total-tokens=6144",
            "--chunked-prefill-size=512", f"--max-running-requests={rows}",
            # As on a GPU, which the simulator models.
            "--enable-mixed-chunk", f"--page-size={page_size}",
        ],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("job", JOBS)
def test_steps_and_cached_tokens_are_as_simulated(
    counts: dict[str, dict[str, dict[str, int]]], job: str, policy: str
) -> None:
    case = counts[f"{job}, {policy}"]
    real, simulated = case["real"], case["simulated"]
    assert real["steps"] > 50
    assert real["cached_tokens"] > 10_000
    for name in ("steps", "cached_tokens"):
        assert simulated[name] == pytest.approx(real[name], rel=TOLERANCE)
    # The first token of an answer comes with its prompt.
    assert simulated["decode_tokens"] == real["decode_tokens"]
    # All lengths are known.
    assert simulated["offloaded"] == real["offloaded"] == 0
