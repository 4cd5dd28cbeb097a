"""Attention data parallelism and pipeline parallelism under the plan, in real SGLang.

Answers are compared with ``transformers``, and the scheduler of the tests checks its sums
after every step, on every rank. SGLang counts KV after every step, or when it is idle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import preloaded
import pytest
from forked_children import command
from free_ports import free_port
from stress_runs import scenario
from tiny_checkpoints import ARGUMENTS, write_checkpoint
from tiny_drafts import drafts_of, write_draft_model

RANKS = "0|1"  # each rank has a core of its own
WHAT = "shards,random,aborts,between,prompt_logprobs"


@pytest.fixture(autouse=True)
def _a_core_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", RANKS)


@pytest.fixture(scope="module")
def experts(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "deepseek_v3"
    # A layer without experts and one with, each of which waits for the other rank.
    return write_checkpoint("deepseek_v3", path, demo_model, num_hidden_layers=2)


def jobs(model: Path, what: str, *argv: str) -> Any:
    return scenario(model, what, 5, 2, f"--port={free_port()}", *argv)


def test_attention_ranks_have_a_shard_each(experts: Path) -> None:
    found = jobs(
        experts,
        WHAT,
        *ARGUMENTS["deepseek_v3"],
        *("--tp=2", "--attn-dp-size=2", "--max-running-requests=16"),
        *("--ep-size=2", "--enable-mixed-chunk"),
    )
    assert len(found["shards"]["ranks"]) == 2
    # Each prefix was computed once by each rank that has lines of it.
    assert found["shards"]["computed"] == found["shards"]["least"]
    # Dealt line by line, the eight families would have 16 places. How many are opened
    # twice depends on the ranks' progress: the one that is ahead takes from the other.
    assert 8 <= found["shards"]["places"] <= 11
    assert found["random"]["lines"] > 50
    assert found["aborts"]["running"] == [2, 2]  # one on each rank
    assert found["totals"]["offloaded"] > 0
    assert found["totals"]["resumed"] > 0


def test_micro_batches_follow_one_plan(demo_model: Path) -> None:
    found = jobs(demo_model, "shards,random,aborts", "--pp-size=2")
    assert found["shards"]["computed"] == found["shards"]["least"]
    assert found["random"]["lines"] > 50
    # Requests that make room are computed again.
    assert found["totals"]["offload_recomputed"] > 0
    assert found["totals"]["resumed"] == 0


@pytest.mark.parametrize("algorithm", ["", "EAGLE"])
def test_replicas_have_a_shard_each(
    demo_model: Path, tmp_path: Path, algorithm: str
) -> None:
    """Also with a draft model, which reads each token with the next one."""
    drafts: list[str] = []
    if algorithm:
        draft = write_draft_model(algorithm, tmp_path / "draft", demo_model)
        drafts = drafts_of(draft, algorithm, 2, 6)
    found = jobs(demo_model, "shards,random,aborts", "--dp-size=2", *drafts)
    shards = found["shards"]
    assert len(shards["ranks"]) == 2
    followers = sum(shards["ranks"]) - shards["places"]
    again = followers if algorithm else 0
    assert shards["computed"] == shards["least"] + again
    assert 8 <= shards["places"] <= 11
    assert found["random"]["lines"] > 50
    assert found["aborts"]["running"] == [2, 2]


def test_a_model_split_over_all_ranks_is_refused(demo_model: Path) -> None:
    done = preloaded.run(
        command(
            "stress_scenarios",
            *(str(demo_model), "shards", "1", "1", "--tp=2", "--attn-dp-size=2"),
            f"--port={free_port()}",
        ),
    )
    assert done.returncode != 0
    wrong = "LlamaForCausalLM does not work with --attn-dp-size 2: SGLang splits its"
    assert wrong in done.stdout + done.stderr
