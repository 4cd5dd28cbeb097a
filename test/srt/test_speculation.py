"""Drafts from the answers so far (``--speculative-algorithm NGRAM``) under the plan, in real
SGLang.

Answers are compared with ``transformers``, and SGLang counts all KV after every step, as the
scheduler of the tests does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from stress_runs import scenario

NGRAM = ("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=6")
# SGLang drafts trees only with pages of one token.
TREES = "--speculative-ngram-max-bfs-breadth=4"
CHAINS = ("--speculative-ngram-max-bfs-breadth=1", "--page-size=16")


@pytest.mark.parametrize(
    ("what", "rounds", "arguments"),
    [
        ("too_long,branch_points,random", 2, (*NGRAM, TREES)),
        ("kinds,random", 2, (*NGRAM, *CHAINS)),
    ],
    ids=["trees", "chains-in-pages"],
)
def test_jobs_with_drafts(
    demo_model: Path, what: str, rounds: int, arguments: tuple[str, ...]
) -> None:
    found = scenario(demo_model, what, 1, rounds, *arguments)
    print(found)
    assert found["random"]["lines"] > 50
    assert found["random"]["offloaded"] == 0
