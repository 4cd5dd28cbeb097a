"""Hundreds of requests of small jobs at random, in real SGLang with hardly any KV.

Lines are aborted, jobs stopped, generation paused and online requests sent all the
while. SGLang counts its KV after every step, and so does the scheduler of the tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from stress_runs import scenario

ENGINES = {
    "overlap": (),
    "normal-loop-pages": ("--disable-overlap-schedule", "--page-size=16"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_every_request_is_answered_right_and_nothing_is_left(
    demo_model: Path, name: str
) -> None:
    # That answers are right and nothing is left is asserted in there, every round.
    found = scenario(demo_model, "random", 1, 12, *ENGINES[name])
    assert found["lines"] > 200
    assert found["aborted"] > 0
    assert found["online"] > 10
    assert found["all_decode"] > 50
    assert found["parked"] >= found["resumed"] > 0
