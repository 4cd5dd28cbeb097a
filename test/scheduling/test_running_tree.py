"""The view of a running job's prefix tree."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from scheduling_jobs import arrive_all, job_of, plan_of, random_prompts

from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.running_tree import running_tree
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

SYSTEM, DOCUMENT = tuple(range(8)), tuple(range(100, 104))
# Two with a document behind the system prompt, two without, and one that shares nothing.
PROMPTS = [
    (*SYSTEM, *DOCUMENT, 1),
    (*SYSTEM, *DOCUMENT, 2),
    (*SYSTEM, 50),
    (*SYSTEM, 51, 52),
    (90,),
]


def nodes_of(job: JobState, limit: int = 100) -> dict[int, Any]:
    """The nodes by the tokens of their prefix."""
    return {n["prefix_tokens"]: n for n in running_tree([job], limit)["nodes"]}


def started(job: JobState, request: ScheduledRequest, cached: int) -> None:
    job.backlog.remove(request)
    job.uses.start(request, cached)


def test_a_job_that_has_not_begun() -> None:
    job = job_of(plan_of(PROMPTS))
    arrive_all(job)
    found = running_tree([job], 100)
    assert found["jobs"] == [
        {
            "job": "job",
            "policy": "dfs",
            "priority": 0,
            "waiting": 5,
            "followers": 0,
            "prefixes": 2,
            "in_use_tokens": 0,
            "kept_tokens": 0,
        }
    ]
    system, document = found["nodes"]
    assert (system["prefix_tokens"], system["tokens"]) == (8, 8)
    assert (document["prefix_tokens"], document["tokens"]) == (12, 4)
    assert document["parent"] == system["node"]
    assert system["parent"] == 0
    assert [n["uses_left"] for n in found["nodes"]] == [4, 2]
    assert {n["state"] for n in found["nodes"]} == {"absent"}


def test_a_prefix_is_computed_then_kept_then_spent() -> None:
    job = job_of(plan_of(PROMPTS))
    first, second, third, fourth, _ = arrive_all(job)
    started(job, first, 0)
    nodes = nodes_of(job)
    assert nodes[8]["state"] == nodes[12]["state"] == "computing"
    assert (nodes[12]["running"], nodes[12]["uses_left"]) == (1, 1)
    for node in job.uses.computed(first, 13):
        job.uses.pin(node, object())
    job.uses.leave(first, offloaded=False)
    nodes = nodes_of(job)
    assert nodes[8]["state"] == nodes[12]["state"] == "kept"
    assert nodes[8]["pinned"]
    assert nodes[8]["running"] == 0
    found = running_tree([job], 9)["jobs"][0]
    assert (found["kept_tokens"], found["in_use_tokens"]) == (12, 0)
    started(job, third, 8)
    started(job, fourth, 8)
    nodes = nodes_of(job)
    assert (nodes[8]["running"], nodes[8]["uses_left"]) == (2, 1)
    assert nodes[12]["running"] == 0
    started(job, second, 12)
    job.uses.leave(second, offloaded=False)
    assert nodes_of(job)[8]["next_use"] is None
    assert nodes_of(job)[8]["density"] is None
    assert 12 not in nodes_of(job)  # nobody needs it any more


def test_next_use_counts_the_requests_before_it() -> None:
    job = job_of(plan_of(PROMPTS, position=[3, 4, 0, 1, 2]))
    requests = arrive_all(job)
    assert nodes_of(job)[8]["next_use"] == 0
    assert nodes_of(job)[12]["next_use"] == 3
    started(job, requests[2], 0)
    assert nodes_of(job)[12]["next_use"] == 2


def test_density_is_of_those_to_come() -> None:
    plan = plan_of(PROMPTS)
    # The two with the document generate much, the others nothing.
    long = np.isin(plan.input_len, [13])
    steps = np.where(long, 100.0, 0.0)
    plan = replace(plan, est_decode_steps=steps, est_decode_steps_sq=steps**2)
    job = job_of(plan)
    requests = arrive_all(job)
    cost = plan.cost
    memory = 2 * (13 * 100 + 5000) * cost.kv_read_time_s
    nodes = nodes_of(job)
    assert nodes[12]["density"] == pytest.approx(2 * 101 * cost.token_time_s / memory)
    compute = (2 * 101 + 1 + 2) * cost.token_time_s
    assert nodes[8]["density"] == pytest.approx(compute / memory)
    for request in requests[:2]:
        started(job, request, 0)
    # The others read no KV.
    assert nodes_of(job)[8]["density"] is None
    assert nodes_of(job)[12]["density"] is None


def test_half_are_the_longest_in_the_cache_and_half_save_most() -> None:
    rng = Random(1)
    job = job_of(plan_of(random_prompts(rng, 300, step=4)))
    requests = arrive_all(job)
    everything = running_tree([job], 10_000)["nodes"]
    assert len(everything) == running_tree([job], 1)["jobs"][0]["prefixes"] > 60
    for request in rng.sample(requests, 12):
        started(job, request, 0)
    everything = running_tree([job], 10_000)["nodes"]
    some = running_tree([job], 20)["nodes"]
    assert len(some) == 20
    chosen = {n["node"] for n in some}
    there = [n for n in everything if n["state"] != "absent"]
    by_length = sorted((n["tokens"] for n in there), reverse=True)
    assert len(there) > 20
    assert all(n["node"] in chosen for n in there if n["tokens"] > by_length[10])

    def saved(node: Any) -> int:
        return int(node["tokens"] * (node["uses_left"] + node["running"]))

    by_saved = sorted(map(saved, everything), reverse=True)
    assert all(n["node"] in chosen for n in everything if saved(n) > by_saved[10])
    # With little in the cache, all of it is shown, and more of the others.
    assert {n["node"] for n in running_tree([job], 2 * len(there))["nodes"]} >= {
        n["node"] for n in there
    }
    # Depth first: each follows its parent, and parents are in the answer.
    seen = {0}
    for node in some:
        assert node["parent"] in seen
        seen.add(node["node"])


def test_jobs_share_the_limit_and_an_empty_one_is_no_error() -> None:
    jobs = [job_of(plan_of(PROMPTS)), job_of(plan_of([])), job_of(plan_of(PROMPTS[:2]))]
    for number, job in enumerate(jobs):
        job.job_id = f"job{number}"
    found = running_tree(jobs, 2)
    assert [job["prefixes"] for job in found["jobs"]] == [2, 0, 1]
    # 8 tokens four times, and 12 tokens twice.
    assert [(n["job"], n["tokens"]) for n in found["nodes"]] == [
        ("job0", 8),
        ("job2", 12),
    ]
    assert running_tree([], 5) == {"jobs": [], "nodes": []}
