"""Requests offloaded on the host and resumed, in real SGLang: nothing changes for them."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import preloaded
import pytest
from forked_children import command

COUNT = 32
NEVER = 10**6
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {"engine": {"max_total_tokens": 20000}},
    # Results are not drained first: requests in flight must not be offloaded.
    "in-flight": {"drain": False, "engine": {"max_total_tokens": 20000}},
    "normal-loop": {
        "engine": {"max_total_tokens": 20000, "disable_overlap_schedule": True},
    },
    "pages-under-pressure": {
        "evict_every": 7,
        "pool_bytes": 320 * 512,  # a fifth of the device's KV
        "engine": {"max_total_tokens": 1600, "page_size": 16},
    },
}


def run(model: Path, name: str) -> dict[str, Any]:
    """What 32 requests gave undisturbed and with offloading."""
    result: dict[str, Any] = run_all(model, json.dumps(SETTINGS[name]["engine"]))[name]
    return result


@cache
def run_all(model: Path, engine: str) -> dict[str, Any]:
    """The runs whose engines have these arguments, one after the other in one."""
    runs = {
        name: {
            "seed": seed,
            "count": COUNT,
            "drain": True,
            "evict_every": NEVER,
            "pool_bytes": None,
            **SETTINGS[name],
        }
        for seed, name in enumerate(SETTINGS)
        if json.dumps(SETTINGS[name]["engine"]) == engine
    }
    arguments = json.loads(engine) | {"max_running_requests": 12}
    done = preloaded.run(
        command("offloading_engine", str(model)),
        env={
            **os.environ,
            "OFFLOADING_TEST_SETTINGS": json.dumps({"engine": arguments, "runs": runs}),
            # SGLang counts all KV after every step, and dies of a token too many.
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Mem Check (BUSY)" in done.stderr + done.stdout
    # Python's own resource tracker speaks of leaks too, when processes are ended.
    lines = (done.stderr + done.stdout).splitlines()
    leaks = [x for x in lines if "leak" in x.lower() and "resource_tracker" not in x]
    assert not leaks
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_offloading_changes_no_output(demo_model: Path, name: str) -> None:
    found = run(demo_model, name)
    assert found["before"].get("offloaded", 0) == 0
    assert found["counts"]["offloaded"] > 5
    assert len({tuple(one["ids"]) for one in found["plain"]}) > COUNT / 2
    for plain, offloaded in zip(found["plain"], found["offloaded"], strict=True):
        assert offloaded["ids"] == plain["ids"]
        assert offloaded["finish"] == plain["finish"]
        for field in ("logprobs", "top", "chosen"):
            assert_close(offloaded[field], plain[field])


@pytest.mark.parametrize("name", SETTINGS)
def test_every_offloaded_request_leaves_the_host(demo_model: Path, name: str) -> None:
    counts = run(demo_model, name)["counts"]
    assert counts["left"] == [0, 0]
    assert counts["host_bytes"] > 0
    assert counts["offloaded"] == counts["resumed"] + counts.get("given_up", 0)


def test_with_everything_offloaded_no_kv_is_missing(demo_model: Path) -> None:
    counts = [run(demo_model, name)["counts"] for name in SETTINGS]
    assert sum(each.get("idle_checks", 0) for each in counts) > 0


@pytest.mark.parametrize("name", ["overlap", "in-flight", "normal-loop"])
def test_nothing_is_computed_twice(demo_model: Path, name: str) -> None:
    found = run(demo_model, name)
    assert found["counts"]["recomputed"] == 0
    assert found["counts"]["left_to_tree"] > 0
    cached = [one["cached"] for one in found["plain"]]
    assert [one["cached"] for one in found["offloaded"]] == cached
    assert max(cached) > 0


def test_a_lost_prefix_means_a_retracted_request(demo_model: Path) -> None:
    counts = run(demo_model, "pages-under-pressure")["counts"]
    assert counts["evictions"] > 0
    assert counts["given_up"] > 0
    assert counts["resumed"] > 0
    assert counts["recomputed"] > 0


def test_a_full_host_pool_means_requests_that_are_computed_again(
    demo_model: Path,
) -> None:
    counts = run(demo_model, "pages-under-pressure")["counts"]
    assert counts["made_room"] > 0
    assert counts["discarded"] > 0
    assert counts["host_bytes"] <= counts["pool_bytes"]
    roomy = run(demo_model, "overlap")["counts"]
    assert "made_room" not in roomy
    assert "discarded" not in roomy


def test_a_resumed_request_is_one_copy(demo_model: Path) -> None:
    """Of a few it is two, and of more where the pool is full: free pages in pieces."""
    for name, settings in SETTINGS.items():
        counts = run(demo_model, name)["counts"]
        most = 2.0 if "pool_bytes" in settings else 1.2
        assert counts["resumed"] * 0.9 <= counts["loads"] <= counts["resumed"] * most


def test_results_are_drained_only_in_the_overlap_loop(demo_model: Path) -> None:
    assert run(demo_model, "overlap")["counts"]["drained"] > 0
    assert run(demo_model, "overlap")["counts"]["refused"] == 0
    assert run(demo_model, "in-flight")["counts"]["refused"] > 0
    assert run(demo_model, "normal-loop")["counts"]["drained"] == 0
    assert run(demo_model, "normal-loop")["counts"]["refused"] == 0


def assert_close(found: Any, expected: Any) -> None:
    """Equal up to the last digits of the floats: a batch of another size adds up in
    another order."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    else:
        assert found == expected
