"""The forest that attention is given says nothing that the prompts do not share."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from scheduling_jobs import plan_of, random_prompts

from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.scheduled_request import ScheduledRequest
from sglang_batch.srt.attention.prefix_forest import PrefixForest, PrefixForestBuilder

PAGE = 4


@dataclass
class Kv:
    req_pool_idx: int
    cache_protected_len: int


@dataclass(eq=False)
class Running:
    """A request as SGLang has it, as far as groups look at it."""

    rid: str
    kv: Kv
    prefix_len: int = 0
    origin_input_ids: tuple[int, ...] = ()
    extra_key: str | None = None
    cache_salt: str | None = None


@dataclass
class Jobs:
    requests: dict[str, tuple[JobState, ScheduledRequest]] = field(default_factory=dict)

    def planned(self, req: Running) -> tuple[JobState, ScheduledRequest] | None:
        return self.requests.get(req.rid)


def batch_of(random: Random, prompts: list[Any]) -> tuple[Any, list[Running]]:
    """Decoding requests, each with some of its prompt in the cache."""
    job = JobState("job", plan_of(prompts), PAGE)
    jobs, reqs = Jobs(), []
    for number, prompt in enumerate(prompts):
        held = random.choice([len(prompt), random.randint(0, len(prompt))])
        req = Running(f"r{number}", Kv(100 + number, held), origin_input_ids=prompt)
        if random.random() < 0.2:
            req.extra_key = "other"
        request = job.add(req, number, len(prompt), 10)
        request.decoding = True
        jobs.requests[req.rid] = (job, request)
        reqs.append(req)
    return jobs, reqs


def groups_of(jobs: Jobs, reqs: list[Running], *, decodes: bool = True) -> PrefixForest:
    return PrefixForestBuilder(jobs).of(reqs, rows_of(reqs), decodes=decodes)


def rows_of(reqs: list[Running]) -> Any:
    return np.array([req.kv.req_pool_idx for req in reqs], np.int32)


def nodes_of(groups: PrefixForest, request: int) -> list[int]:
    """A request's nodes, deepest first."""
    found, node = [], int(groups.request_node[request])
    while node >= 0:
        found.append(node)
        node = int(groups.node_parent[node])
    return found


@pytest.mark.parametrize("seed", range(8))
def test_requests_below_a_node_share_what_it_covers(seed: int) -> None:
    random = Random(seed)
    prompts = random_prompts(random, 30, step=3)
    jobs, reqs = batch_of(random, prompts)
    groups = groups_of(jobs, reqs)
    assert groups.table_row.tolist() == [100 + i for i in range(len(reqs))]
    below: dict[int, list[int]] = {}
    for i, req in enumerate(reqs):
        nodes = nodes_of(groups, i)
        lengths = [int(groups.node_end[node]) for node in nodes]
        assert lengths == sorted(set(lengths), reverse=True)
        assert all(0 < each <= req.kv.cache_protected_len for each in lengths)
        assert all(each % PAGE == 0 for each in lengths)
        for node in nodes:
            below.setdefault(node, []).append(i)
    assert len(below) == len(groups.node_end)
    for node, members in below.items():
        end = groups.node_end[node]
        assert len({tuple(prompts[i][:end]) for i in members}) == 1
        assert len({reqs[i].extra_key for i in members}) == 1
    assert below


def test_all_that_the_plan_shares_is_found() -> None:
    first = tuple(range(8))
    prompts = [(*first, 50 + i // 2, 9, 9, 9, 60 + i, 1) for i in range(4)]
    jobs, reqs = batch_of(Random(0), prompts)
    for req in reqs:
        req.kv.cache_protected_len, req.extra_key = 14, None
    groups = groups_of(jobs, reqs)
    found = [[int(groups.node_end[n]) for n in nodes_of(groups, i)] for i in range(4)]
    assert found == [[12, 8]] * 4
    assert len(groups.node_end) == 3


def test_groups_are_found_anew_only_if_requests_change() -> None:
    jobs, reqs = batch_of(Random(1), random_prompts(Random(1), 12, step=3))
    finder, rows = PrefixForestBuilder(jobs), rows_of(reqs)
    groups = finder.of(reqs, rows, decodes=True)
    assert finder.of(list(reqs), rows.copy(), decodes=True) is groups
    assert finder.of(reqs, rows[::-1], decodes=True) is not groups
    groups = finder.of(reqs, rows, decodes=True)
    assert finder.of(reqs[1:], rows[1:], decodes=True) is not groups
    groups = finder.of(reqs, rows, decodes=True)
    finder.forget()
    assert finder.of(reqs, rows, decodes=True) is not groups
    mixed = finder.of(reqs, rows, decodes=False)
    assert finder.of(reqs, rows, decodes=False) is not mixed


def test_further_beams_read_alone() -> None:
    jobs, reqs = batch_of(Random(1), random_prompts(Random(1), 5, step=3))
    rows = np.append(rows_of(reqs), [7, 8]).astype(np.int32)
    groups = PrefixForestBuilder(jobs).of(reqs, rows, decodes=True)
    assert groups.table_row.tolist()[-2:] == [7, 8]
    assert groups.request_node.tolist()[-2:] == [-1, -1]


def test_another_prompt_than_was_planned_is_not_shared() -> None:
    prompts = [(*range(12), 90 + i) for i in range(4)]
    jobs, reqs = batch_of(Random(3), prompts)
    for req in reqs:
        req.kv.cache_protected_len, req.extra_key = 13, None
    reqs[2].origin_input_ids = (*range(5), 77, *range(6, 12), 92)
    assert groups_of(jobs, reqs).request_node.tolist() == [0, 0, -1, 0]


def test_who_is_not_planned_reads_alone() -> None:
    jobs, reqs = batch_of(Random(2), random_prompts(Random(2), 6, step=3))
    online = Running("online", Kv(7, 40))
    unknown = Running("unknown", Kv(8, 40))
    groups = groups_of(jobs, [online, *reqs, unknown])
    assert groups.request_node[0] == groups.request_node[-1] == -1


def test_a_prompt_that_is_computed_shares_what_it_found() -> None:
    prompts = [(*range(12), 90 + i) for i in range(3)]
    jobs, reqs = batch_of(Random(3), prompts)
    for req in reqs:
        req.kv.cache_protected_len, req.extra_key = 13, None
    jobs.requests["r2"][1].decoding = False
    reqs[2].prefix_len = 5
    groups = groups_of(jobs, reqs, decodes=False)
    assert groups.request_node.tolist() == [0, 0, -1]
    reqs[2].prefix_len = 12
    groups = groups_of(jobs, reqs, decodes=False)
    assert groups.request_node.tolist() == [0, 0, 0]
