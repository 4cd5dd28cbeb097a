"""Drafts (``--speculative-algorithm``) under the plan, in real SGLang.

Answers are compared with ``transformers``, and SGLang counts all KV after every step, as the
scheduler of the tests does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stress_runs import KV, scenario
from tiny_checkpoints import ARGUMENTS, write_checkpoint
from tiny_drafts import add_next_token_layer, drafts_of, write_draft_model

from sglang_batch.run.demo_model import write_demo_model

NGRAM = ("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=6")
# SGLang drafts trees only with pages of one token.
TREES = "--speculative-ngram-max-bfs-breadth=4"
# Steps of many requests draft, too, whatever they cost here.
ALWAYS = '--offline-batch-config={"learn_costs": false, "draft_requests": 1000}'
FEW = (
    '--offline-batch-config={"learn_costs": false, "draft_requests": 3,'
    ' "attention": "torch"}'
)
CHAINS = ("--speculative-ngram-max-bfs-breadth=1", "--page-size=16")
# Verification of chains reads shared prefixes once.
SHARE = ALWAYS.replace("}", ', "attention": "torch"}')


def shares(found: Any) -> bool:
    totals = found["totals"]
    steps, shared = totals["attention_steps"], totals["attention_steps_shared"]
    return bool(0 < shared < steps and totals["kv_read_bytes_saved"] > 0)


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


@pytest.mark.parametrize("settings", [ALWAYS, SHARE])
def test_chains_of_drafts_in_pages(demo_model: Path, settings: str) -> None:
    """Also lines with grammars, log probabilities and several answers."""
    what = "branch_points,kinds,random"
    found = scenario(demo_model, what, 1, 1, *NGRAM, *CHAINS, settings)
    assert found["random"]["lines"] >= 5
    assert settings == ALWAYS or shares(found)


def test_drafts_where_few_run(demo_model: Path) -> None:
    """Requests change between steps with drafts and steps without, which share prefixes."""
    found = scenario(demo_model, "too_long,kinds,random", 1, 2, *NGRAM, TREES, FEW)
    assert found["random"]["lines"] > 50
    assert found["random"]["offloaded"] == 0
    assert shares(found)


def test_a_draft_model_that_is_the_model(demo_model: Path) -> None:
    """Most drafts are accepted. Not all, since SGLang's draft model never sees the first token."""
    what = "too_long,branch_points,drafted,kinds,random"
    drafts = drafts_of(demo_model, "STANDALONE", 1, 4)
    found = scenario(demo_model, what, 1, 1, *drafts)
    assert found["drafted"]["drafts"][-1] <= 20  # for 40 tokens
    assert found["branch_points"]["computed"] == found["branch_points"]["least"]
    assert found["too_long"]["answered"] == 6
    assert KV - 40 < found["too_long"]["longest"] < KV
    assert found["random"]["lines"] >= 5
    assert found["random"]["offloaded"] == 0


def test_trees_of_another_model(demo_model: Path, tmp_path: Path) -> None:
    """Few drafts are accepted, and answers are the same."""
    other = tmp_path / "other"
    write_demo_model(other, seed=1)
    drafts = drafts_of(other, "STANDALONE", 2, 6)
    found = scenario(demo_model, "drafted,branch_points,random", 1, 1, *drafts)
    assert found["drafted"]["drafts"][-1] > 20
    assert found["branch_points"]["computed"] == found["branch_points"]["least"]


def test_chains_of_a_draft_model_in_pages(demo_model: Path) -> None:
    drafts = (*drafts_of(demo_model, "STANDALONE", 1, 4), "--page-size=16")
    # SGLang has a backend for prompts beside it, which verifies by default.
    named = (
        "--decode-attention-backend=shared_prefix",
        "--speculative-attention-mode=decode",
    )
    what = "branch_points,kinds,random"
    found = scenario(demo_model, what, 1, 1, *drafts, *named)
    assert found["branch_points"]["computed"] == found["branch_points"]["least"]
    assert shares(found)


@pytest.mark.parametrize(
    ("algorithm", "topk", "width", "page"),
    [("EAGLE", 1, 4, 16), ("EAGLE", 2, 6, 1), ("EAGLE3", 4, 16, 1)],
)
def test_drafts_from_hidden_states(
    demo_model: Path, tmp_path: Path, algorithm: str, topk: int, width: int, page: int
) -> None:
    draft = write_draft_model(algorithm, tmp_path / "draft", demo_model)
    drafts = (*drafts_of(draft, algorithm, topk, width), SHARE)
    what = "drafted,too_long,branch_points,kinds,random"
    found = scenario(demo_model, what, 1, 1, *drafts, f"--page-size={page}")
    assert shares(found) == (topk == 1)
    if width > 4:  # few drafts of a random model are right
        assert found["drafted"]["drafts"][0] < 40
    assert found["branch_points"]["computed"] == found["branch_points"]["least"]
    assert found["too_long"]["answered"] == 6
    assert found["random"]["offloaded"] == 0


@pytest.mark.parametrize(("topk", "width"), [(2, 6), (1, 4)])
def test_drafts_of_a_layer_of_the_model(
    demo_model: Path, tmp_path: Path, topk: int, width: int
) -> None:
    """With KV of latent attention."""
    kind = "deepseek_v3"
    model = write_checkpoint(kind, tmp_path / kind, demo_model)
    add_next_token_layer(model)
    arguments = [*drafts_of(model, "NEXTN", topk, width), *ARGUMENTS[kind], SHARE]
    what = "drafted,branch_points,random"
    found = scenario(model, what, 1, 1, *arguments, "--enable-mixed-chunk")
    assert found["random"]["lines"] >= 5
    assert found["random"]["mixed"] == 0
    assert shares(found) == (topk == 1)


def test_a_draft_model_with_windows(demo_model: Path, tmp_path: Path) -> None:
    model = write_checkpoint("gpt_oss", tmp_path / "gpt_oss", demo_model)
    arguments = [*drafts_of(model, "STANDALONE", 2, 6), *ARGUMENTS["gpt_oss"]]
    found = scenario(model, "branch_points,random", 1, 1, *arguments)
    assert found["branch_points"]["computed"] == found["branch_points"]["least"]
    assert found["random"]["lines"] >= 5
