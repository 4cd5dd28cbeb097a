"""One prefix in several jobs: who computes it, who waits, and what is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from scheduling_jobs import Prompt, Req, arrive, job_of, plan_of

from sglang_batch.scheduling.equal_prefixes import EqualPrefixes
from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.open_jobs import OpenJobs
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

SHARED = (1, 1)
FIRST = [(*SHARED, 0), (*SHARED, 1), (2, 2, 0), (2, 2, 1)]
SECOND = [(3, 0), (3, 1), (*SHARED, 5), (*SHARED, 6)]


class Jobs:
    """Open jobs whose requests arrive with their tokens."""

    def __init__(self) -> None:
        self.open = OpenJobs()
        self.equal = EqualPrefixes(self.open, self._digests)
        self._prompts: dict[str, Prompt] = {}

    def _digests(self, req: Any, ends: Sequence[int]) -> list[bytes]:
        return [repr(self._prompts[req.rid][:end]).encode() for end in ends]

    def add(self, name: str, prompts: list[Prompt]) -> JobState:
        job = job_of(plan_of(prompts))
        job.job_id = name
        self.open.add(job)
        self.equal.opened(job)
        return job

    def arrive(self, job: JobState, number: int, prompt: Prompt) -> ScheduledRequest:
        req = Req(f"{job.job_id}-{number}")
        self._prompts[req.rid] = prompt
        request = job.add(req, number, len(prompt), 100)
        self.equal.note(job, request)
        return request


def begin(job: JobState, request: ScheduledRequest) -> None:
    job.backlog.remove(request)
    request.running = True
    job.start(request, 0)


def blocked(job: JobState, request: ScheduledRequest) -> bool:
    return bool(job.uses.blocked_by(request.node))


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.mark.parametrize("arrives_first", [False, True])
def test_a_prefix_that_one_job_computes_is_awaited_by_the_other(
    jobs: Jobs, arrives_first: bool
) -> None:
    first, second = jobs.add("a", FIRST), jobs.add("b", SECOND)
    leader = jobs.arrive(first, 0, FIRST[0])
    if arrives_first:
        waiting = jobs.arrive(second, 2, SECOND[2])
        begin(first, leader)
    else:
        begin(first, leader)
        waiting = jobs.arrive(second, 2, SECOND[2])
    other = jobs.arrive(second, 0, SECOND[0])
    assert blocked(second, waiting)
    assert not blocked(second, other)
    second.follow(waiting, second.uses.blocked_by(waiting.node))
    [node] = leader.leading
    [(job, at)] = first.elsewhere(node)
    assert job is second
    first.uses.computed(leader, 2)
    second.no_longer_awaits(at, first)
    assert not blocked(second, waiting)
    assert waiting.waiting


def test_a_leader_that_leaves_keeps_no_job_waiting(jobs: Jobs) -> None:
    each = [jobs.add(name, FIRST) for name in "abc"]
    requests = [jobs.arrive(job, 0, FIRST[0]) for job in each]
    begin(each[0], requests[0])
    assert all(map(blocked, each[1:], requests[1:]))
    each[1].follow(requests[1], requests[1].node)
    each[0].leave(requests[0], offloaded=True)
    assert not any(map(blocked, each, requests))
    assert requests[1].waiting
    begin(each[1], requests[1])
    assert blocked(each[2], requests[2])


def test_a_job_with_another_tree_keeps_no_job_waiting(jobs: Jobs) -> None:
    first, second = jobs.add("a", FIRST), jobs.add("b", FIRST)
    leader, waiting = (jobs.arrive(job, 0, FIRST[0]) for job in (first, second))
    begin(first, leader)
    assert blocked(second, waiting)
    jobs.equal.forget(first)
    assert not blocked(second, waiting)
    first.extend(plan_of([*FIRST, (7, 7)]), lambda request: 0)
    jobs.equal.note_all(first)
    assert leader.leading
    assert first.elsewhere(leader.leading[0]) == [(second, waiting.node)]
    # What the second computes meanwhile is its own affair.
    begin(second, waiting)
    assert not second.elsewhere(0)


def test_what_the_cache_holds_is_not_awaited(jobs: Jobs) -> None:
    first, second = jobs.add("a", FIRST), jobs.add("b", FIRST)
    leader, other = (jobs.arrive(job, 0, FIRST[0]) for job in (first, second))
    second.uses.pin(other.node, "lock")
    begin(first, leader)
    assert not blocked(second, other)


def test_jobs_that_were_open_alone_are_noted_with_the_second(jobs: Jobs) -> None:
    first = jobs.add("a", FIRST)
    early = jobs.arrive(first, 0, FIRST[0])
    assert not first.elsewhere(early.node)
    second = jobs.add("b", SECOND)
    late = jobs.arrive(second, 3, SECOND[3])
    assert first.elsewhere(early.node) == [(second, late.node)]
    jobs.open.remove(first)
    jobs.equal.forget(first)
    assert not second.elsewhere(late.node)


def test_other_prompts_than_planned_are_not_noted(jobs: Jobs) -> None:
    first, second = jobs.add("a", FIRST), jobs.add("b", FIRST)
    assert jobs.equal.note(first, first.add(Req("x"), 0, 99, 10)) == []
    assert not second.elsewhere(arrive(second, 1).node)
