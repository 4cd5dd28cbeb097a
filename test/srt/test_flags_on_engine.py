"""Flags under the plan, in real SGLang: answers in a job are those of each request alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from flags_on_engine import GROUP, NUM_GROUPS, SHARED, prompts
from forked_children import command
from tiny_checkpoints import write_checkpoint

# KV for a few of the requests: the others wait, and some leave for a while.
KV = 480


def run(model: Path, log: Path | None = None, **arguments: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"step_log": str(log)} if log else {}
    arguments = {"max_total_tokens": KV, "offline_batch_config": config} | arguments
    done = subprocess.run(
        command("flags_on_engine", str(model), json.dumps(arguments)),
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["log"] = done.stdout + done.stderr
    return found


def test_deterministic_inference(demo_model: Path) -> None:
    found = run(demo_model, enable_deterministic_inference=True)
    state = found["state"]
    assert not state["mixed_chunk"] and not state["shares_prefixes"]
    assert state["tier"] == "LlamaForCausalLM: full"
    assert state["offloaded"] > 0  # bits survive the host
    cached = sum(each["cached"] for each in found["together"])
    assert cached >= NUM_GROUPS * (GROUP - 1) * SHARED
    for i, (one, alone) in enumerate(
        zip(found["together"], found["alone"], strict=True)
    ):
        assert one["tokens"] == alone["tokens"], i
        assert one["logprobs"] == alone["logprobs"], i  # bit by bit


def test_routed_experts_are_not_lost(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("qwen3_moe")
    model = write_checkpoint("qwen3_moe", path, demo_model)
    found = run(model, enable_return_routed_experts=True, moe_runner_backend="triton")
    assert found["state"]["tier"] == (
        "Qwen3MoeForCausalLM: planned; offloading is off because "
        "--enable-return-routed-experts keeps data per KV slot, and an offloaded request "
        "resumes in other slots"
    )
    assert f"{found['state']['tier']}." in found["log"]
    assert found["state"]["offloaded"] == 0
    greedy = range(0, len(prompts()), 2)
    for i in greedy:
        one, alone = found["together"][i], found["alone"][i]
        assert one["experts"], i
        assert (one["tokens"], one["experts"]) == (alone["tokens"], alone["experts"])


def test_a_second_tier_for_prefixes_that_do_not_fit(demo_model: Path) -> None:
    """Our host pool is the second tier: SGLang's own needs CUDA to start."""
    small: dict[str, Any] = {
        "max_total_tokens": 230,
        "max_running_requests": 1,
        "offline_batch_config": {"policy": "fcfs"},
    }
    without = run(demo_model, **small)
    tiered = run(demo_model, enable_hierarchical_cache=True, hicache_ratio=3.0, **small)
    for found in (without, tiered):
        for i in range(0, len(prompts()), 2):  # the greedy ones
            assert found["together"][i]["tokens"] == found["alone"][i]["tokens"], i
    assert without["state"]["prefixes_restored"] == 0
    assert tiered["state"]["prefixes_restored"] > 0
    assert (
        "Host memory for KV of offloaded requests: 0.00 GB, 693 tokens."
        in (tiered["log"])
    )
    computed = [
        sum(len(p) - one["cached"] for p, one in zip(prompts(), each, strict=True))
        for each in (without["together"], tiered["together"])
    ]
    once = sum(map(len, prompts())) - NUM_GROUPS * (GROUP - 1) * SHARED
    assert computed[1] == once < computed[0]
