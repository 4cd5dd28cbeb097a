"""Runs a scenario of ``stress_scenarios`` in a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import preloaded
from forked_children import command

# Tokens of KV of the engine, and the states in which scenarios abort a line.
KV = 800
STATES = ("backlog", "follower", "leader", "running", "offloaded")


def scenario(model: Path, what: str, seed: int, rounds: int, *argv: str) -> Any:
    """The counts of each scenario. Fails if SGLang or a scenario found a fault.

    what: names of scenarios with commas, for one engine.
    """
    done = preloaded.run(
        command("stress_scenarios", str(model), what, str(seed), str(rounds), *argv),
        env={
            **os.environ,
            # SGLang counts all KV after every step, and dies of a token too many.
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        },
        cwd=Path(__file__).parent,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, _without_counts(log)[-6000:]
    # SGLang's loop for pipeline parallelism counts KV only when it is idle.
    assert "Mem Check (BUSY)" in log or "--pp-size=2" in argv
    # Not Python's "resources might leak" when the engine's processes end.
    assert "leak detected" not in log.lower()
    return json.loads(done.stdout.splitlines()[-1])


def _without_counts(log: str) -> str:
    lines = log.splitlines()
    return "\n".join(line for line in lines if "Mem Check" not in line)
