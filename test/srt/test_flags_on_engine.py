"""Flags under the plan, in real SGLang: answers in a job are those of each request alone."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import preloaded
import pytest
from flags_on_engine import GROUP, NUM_GROUPS, SHARED, prompts
from forked_children import command
from tiny_checkpoints import write_checkpoint

# KV for a few of the requests: the others wait, and some leave for a while.
KV = 480


def run(model: Path, most: int, **arguments: Any) -> dict[str, Any]:
    """What ``flags_on_engine`` prints, and its log.

    most: tokens of the first answer, at most.
    """
    arguments = {"max_total_tokens": KV} | arguments
    done = preloaded.run(
        command("flags_on_engine", str(model), str(most), json.dumps(arguments)),
        env=os.environ,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["log"] = done.stdout + done.stderr
    return found


def same(found: dict[str, Any], kind: str, *fields: str) -> bool:
    alone = found["alone"][kind == "sampled" :: 2]
    return all(
        one[field] == other[field]
        for one, other in zip(found[kind], alone, strict=True)
        for field in fields
    )


def test_deterministic_inference(demo_model: Path) -> None:
    flags = {"enable_deterministic_inference": True, "max_total_tokens": 300}
    found = run(demo_model, 150, **flags)
    state = found["state"]
    assert not state["mixed_chunk"] and not state["shares_prefixes"]
    assert state["tier"] == "LlamaForCausalLM: full"
    for kind in ("greedy", "sampled"):
        cached = sum(each["cached"] for each in found[kind])
        assert cached >= NUM_GROUPS * (GROUP // 2 - 1) * SHARED
        assert same(found, kind, "tokens", "logprobs")  # bit by bit


def test_drafts_from_answers_without_drafts(demo_model: Path) -> None:
    """Of requests together only the last two are drafted, and later all alone, as before."""
    found = run(
        demo_model,
        40,
        enable_deterministic_inference=True,
        max_total_tokens=3000,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=6,
        offline_batch_config={"draft_requests": 2},
    )
    for kind in ("greedy", "sampled"):
        assert same(found, kind, "tokens"), kind
        assert all(
            math.isclose(a, b, abs_tol=1e-4)
            for one, other in zip(
                found[kind], found["alone"][kind == "sampled" :: 2], strict=True
            )
            for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
        )
        together = sum(each["verified"] for each in found[kind])
        alone = sum(each["verified"] for each in found["alone"][kind == "sampled" :: 2])
        assert alone < together / 2, kind


def test_routed_experts_are_not_lost(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("qwen3_moe")
    model = write_checkpoint("qwen3_moe", path, demo_model)
    flags = {"enable_return_routed_experts": True, "moe_runner_backend": "triton"}
    found = run(model, 150, **flags)
    assert found["state"]["tier"] == (
        "Qwen3MoeForCausalLM: planned; offloading is off because "
        "--enable-return-routed-experts keeps data per KV slot, and an offloaded request "
        "resumes in other slots"
    )
    assert f"{found['state']['tier']}." in found["log"]
    assert found["state"]["offloaded"] == 0
    assert all(each["experts"] for each in found["greedy"])
    assert same(found, "greedy", "tokens", "experts")


def test_a_second_tier_for_prefixes_that_do_not_fit(demo_model: Path) -> None:
    """Our host pool is the second tier: SGLang's own needs CUDA to start."""
    small: dict[str, Any] = {
        "max_total_tokens": 170,
        "max_running_requests": 1,
        "offline_batch_config": {"policy": "random"},
    }
    without = run(demo_model, 8, **small)
    tiered = run(
        demo_model, 8, enable_hierarchical_cache=True, hicache_ratio=3.0, **small
    )
    assert without["state"]["prefixes_restored"] == 0
    assert tiered["state"]["prefixes_restored"] > 0
    assert same(without, "greedy", "tokens") and same(tiered, "greedy", "tokens")
    asked = prompts()[::2]
    computed = [
        sum(len(p) - one["cached"] for p, one in zip(asked, each, strict=True))
        for each in (without["greedy"], tiered["greedy"])
    ]
    once = sum(map(len, asked)) - NUM_GROUPS * (GROUP // 2 - 1) * SHARED
    assert computed[1] <= once < computed[0]
