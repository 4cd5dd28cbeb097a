"""Hundreds of requests of small jobs at random, in real SGLang with hardly any KV.

Lines are aborted, jobs stopped, generation paused and online requests sent all the
while. SGLang counts its KV after every step, and so does the scheduler of the tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stress_runs import scenario

PAGES = (
    "--disable-overlap-schedule",
    "--enable-mixed-chunk",
    "--page-size=16",
    # 7 of the device's 50 pages: some requests find no room, and are computed again.
    '--offline-batch-config={"offload_bytes": 60000, "prefetch_bytes": 30000,'
    ' "learn_costs": false}',
)


@pytest.mark.parametrize("name", ["overlap", "normal-loop-pages"])
def test_every_request_is_answered_right_and_nothing_is_left(
    demo_model: Path, name: str, stress_run: dict[str, Any]
) -> None:
    # That answers are right and nothing is left is asserted in there, every round.
    if name == "overlap":
        found = stress_run["random"]
    else:
        found = scenario(demo_model, "random", 1, 9, *PAGES)["random"]
    assert found["lines"] > 200
    assert found["aborted"] > 0
    assert found["online"] > 10
    assert found["all_decode"] > 50
    assert found["mixed_logprobs"] > 100
    assert found["offloaded"] >= found["resumed"] > 0
