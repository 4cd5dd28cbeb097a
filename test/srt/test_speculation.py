"""Drafts from the answers so far (``--speculative-algorithm NGRAM``) under the plan, in real
SGLang.

Answers are compared with ``transformers``, and SGLang counts all KV after every step, as the
scheduler of the tests does.
"""

from __future__ import annotations

from pathlib import Path

from stress_runs import KV, scenario

NGRAM = ("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=6")
# SGLang drafts trees only with pages of one token.
TREES = "--speculative-ngram-max-bfs-breadth=4"
# Steps of many requests draft, too, whatever they cost here.
ALWAYS = '--offline-batch-config={"learn_costs": false, "draft_requests": 1000}'
FEW = '--offline-batch-config={"learn_costs": false, "draft_requests": 3}'
CHAINS = ("--speculative-ngram-max-bfs-breadth=1", "--page-size=16")


def test_trees_of_drafts(demo_model: Path) -> None:
    what = "too_long,branch_points,random"
    found = scenario(demo_model, what, 1, 2, *NGRAM, TREES, ALWAYS)
    # Each prefix was computed once.
    assert found["branch_points"]["computed"] == found["branch_points"]["least"]
    # A request that fills the KV alone ends like any other, and with room for its drafts.
    assert found["too_long"]["answered"] == 6
    assert KV - 40 < found["too_long"]["longest"] < KV
    assert found["random"]["lines"] > 50
    assert found["random"]["offloaded"] == 0


def test_chains_of_drafts_in_pages(demo_model: Path) -> None:
    """Also lines with grammars, log probabilities and several answers."""
    found = scenario(demo_model, "kinds,random", 1, 1, *NGRAM, *CHAINS, ALWAYS)
    assert found["random"]["lines"] >= 5


def test_drafts_where_few_run(demo_model: Path) -> None:
    """Requests change between steps with drafts and steps without."""
    found = scenario(demo_model, "too_long,kinds,random", 1, 2, *NGRAM, TREES, FEW)
    assert found["random"]["lines"] > 50
    assert found["random"]["offloaded"] == 0
